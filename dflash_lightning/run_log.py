"""What a finished or running training has logged, read back from its TensorBoard event files."""

from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_lightning.errors import DataError

EVENT_FILES = "events.out.tfevents.*"


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
    """The folder of event files in or below the folder of a run.

    Raises:
        DataError: there is none, or more than one.
    """
    folders = sorted({file.parent for file in run.rglob(EVENT_FILES)})
    if len(folders) != 1:
        found = f"those of {', '.join(map(str, folders))}; give one of them" if folders else "none"
        raise DataError(f"{run} should hold the TensorBoard logs of one run, and holds {found}. `fit` writes them.")
    return folders[0]


def read_run_log(run: Path) -> RunLog:
    """Read the log of the run whose folder is given. Raises DataError, see `find_log_folder`."""
    folder = find_log_folder(run)
    everything = {"scalars": 0, "tensors": 0, "images": 1}
    events = EventAccumulator(str(folder), size_guidance=everything).Reload()
    tags = events.Tags()
    suffix = "/text_summary"
    return RunLog(
        folder=folder,
        scalars={name: [(event.step, event.value) for event in events.Scalars(name)] for name in tags["scalars"]},
        texts={
            name.removesuffix(suffix): events.Tensors(name)[-1].tensor_proto.string_val[0].decode()
            for name in tags["tensors"]
            if name.endswith(suffix)
        },
        images={name: events.Images(name)[-1].encoded_image_string for name in tags["images"]},
    )
