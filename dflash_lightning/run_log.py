"""What a finished or running training has logged, read back from its TensorBoard event files."""

from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog

from dflash_lightning.errors import DataError

EVENT_FILES = "events.out.tfevents.*"
TEXT = "/text_summary"


@dataclass(frozen=True)
class RunLog:
    """The log of one run, a resumed one in one piece.

    Attributes:
        folder: where the event files lie.
        scalars: name -> (step, value) in order of steps; Lightning numbers them from 0.
        texts: name -> the latest text, Markdown.
        images: name -> the latest picture, PNG.
    """

    folder: Path
    scalars: dict[str, list[tuple[int, float]]]
    texts: dict[str, str]
    images: dict[str, bytes]

    def latest(self, name: str) -> float | None:
        """The latest value of a scalar; None if it was never logged."""
        return self.scalars[name][-1][1] if self.scalars.get(name) else None


def find_log_folder(run: Path) -> Path:
    """The folder of event files: the one given, or the only one below it.

    Raises:
        DataError: there is none, or more than one.
    """
    folders = [run] if any(run.glob(EVENT_FILES)) else sorted({file.parent for file in run.rglob(EVENT_FILES)})
    if len(folders) != 1:
        found = f"those of {', '.join(map(str, folders))}; give one of them" if folders else "none"
        raise DataError(f"{run} should hold the TensorBoard logs of one run, and holds {found}. `fit` writes them.")
    return folders[0]


def read_run_log(run: Path) -> RunLog:
    """Read the log of the run whose folder is given. Raises DataError, see `find_log_folder`."""
    folder = find_log_folder(run)
    everything = {"scalars": 0, "images": 1}
    events = EventAccumulator(str(folder), size_guidance=everything).Reload()
    tags = events.Tags()
    return RunLog(
        folder=folder,
        # What was logged of a step once more is the valid value.
        scalars={
            name: list({event.step: event.value for event in events.Scalars(name)}.items()) for name in tags["scalars"]
        },
        texts=_latest_texts(folder),
        images={name: found[-1].encoded_image_string for name in tags["images"] if (found := events.Images(name))},
    )


def _latest_texts(folder: Path) -> dict[str, str]:
    """The latest text of each name. A later start takes back those from its first step on.

    Event by event, as TensorBoard's accumulator takes back everything but texts.
    """
    texts: dict[str, dict[int, str]] = {}
    for file in sorted(folder.glob(EVENT_FILES)):
        for event in EventFileLoader(str(file)).Load():
            if event.session_log.status == SessionLog.START:
                texts = {name: {s: t for s, t in told.items() if s < event.step} for name, told in texts.items()}
            for value in event.summary.value:
                if value.tag.endswith(TEXT):
                    name = value.tag.removesuffix(TEXT)
                    texts.setdefault(name, {})[event.step] = value.tensor.string_val[0].decode()
    return {name: told[max(told)] for name, told in texts.items() if told}
