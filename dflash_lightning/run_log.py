"""What a finished or running training has logged, read back from its TensorBoard event files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader, RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.image.metadata import PLUGIN_NAME as IMAGES
from tensorboard.plugins.scalar.metadata import PLUGIN_NAME as SCALARS
from tensorboard.util.tensor_util import make_ndarray

from dflash_lightning.errors import DataError
from dflash_lightning.progress import inform

EVENT_FILES = "events.out.tfevents.*"
TEXT = "/text_summary"
# Length and checksums (TFRecord).
BYTES_AROUND_RECORD = 8 + 4 + 4


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
    """Read the log of the run whose folder is given; what can't be read of it is told.

    Raises:
        DataError: there is no log, or more than one, or nothing can be read of it.
    """
    folder = find_log_folder(run)
    points, damaged = _points(folder), False
    for file in sorted(folder.glob(EVENT_FILES)):
        size = file.stat().st_size
        if (read := _readable_bytes(file)) < size:
            damaged = True
            inform(f"{file}: {size - read:,} of its {size:,} bytes can't be read: it is cut off or damaged there.")
    if damaged and not any(points.values()):
        raise DataError(f"{folder}: nothing can be read of its event files. Take a copy of them, or train again.")
    return RunLog(
        folder=folder,
        scalars={name: sorted(found.items()) for name, found in points["scalars"].items()},
        texts={name: found[max(found)] for name, found in points["texts"].items() if found},
        images={name: found[max(found)] for name, found in points["images"].items() if found},
    )


def _readable_bytes(file: Path) -> int:
    """How far the records of an event file go before one is cut off or damaged."""
    return sum(len(record) + BYTES_AROUND_RECORD for record in RawEventFileLoader(str(file)).Load())


def _points(folder: Path) -> dict[str, dict[str, dict[int, Any]]]:
    """Kind -> name -> step -> value. What was logged of a step once more is the valid value, and a later start takes
    back all from its first step on."""
    points: dict[str, dict[str, dict[int, Any]]] = {"scalars": {}, "texts": {}, "images": {}}
    for file in sorted(folder.glob(EVENT_FILES)):
        for event in EventFileLoader(str(file)).Load():
            if event.session_log.status == SessionLog.START:
                for found in (found for names in points.values() for found in names.values()):
                    for step in [step for step in found if step >= event.step]:
                        del found[step]
            for value in event.summary.value:
                kind, content = _content(value)
                if kind:
                    name = value.tag.removesuffix(TEXT) if kind == "texts" else value.tag
                    points[kind].setdefault(name, {})[event.step] = content
    return points


def _content(value: Summary.Value) -> tuple[str | None, Any]:
    """Which kind of point it is, and its value; the loader turns all of them into tensors."""
    plugin, tensor = value.metadata.plugin_data.plugin_name, value.tensor
    if plugin == SCALARS:
        return "scalars", make_ndarray(tensor).item()
    if plugin == IMAGES:
        return "images", tensor.string_val[2]  # after width and height
    if value.tag.endswith(TEXT):
        return "texts", tensor.string_val[0].decode()
    return None, None
