"""Where a target's files are: a folder, a hub name or a `.gguf` file, checked before anything is loaded."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from transformers import modeling_gguf_pytorch_utils as gguf
from transformers.utils import logging as transformers_logging

from dflash_lightning.errors import TargetError

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]

# What transformers, safetensors and the hub's configuration checks raise about files that they can't use.
UNUSABLE = (
    OSError,
    ValueError,
    KeyError,
    NotImplementedError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
    struct.error,
)


@dataclass(frozen=True)
class TargetFiles:
    """A target found on this machine.

    Attributes:
        name: What the user called it.
        folder: The folder that holds its files.
        gguf: Name of the GGUF file inside `folder`, or None for a plain transformers folder.
        revision: Commit hash of a hub download, else "".
    """

    name: str
    folder: Path
    gguf: str | None = None
    revision: str = ""

    @property
    def pretrained(self) -> dict[str, str]:
        """The arguments by which every `from_pretrained` of transformers finds these files."""
        location = {"pretrained_model_name_or_path": str(self.folder)}
        return location if self.gguf is None else {**location, "gguf_file": self.gguf}

    @property
    def weights(self) -> list[Path]:
        """The weight files, sorted by name."""
        return sorted(self.folder.glob("*.safetensors")) if self.gguf is None else [self.folder / self.gguf]


def find_target(name: str | Path) -> TargetFiles:
    """Find a target's files; a hub name is downloaded, or taken from the hub's cache.

    Raises:
        TargetError: `name` is a folder without a model, a missing path, or a hub name that can't be reached.
    """
    name, path = str(name), Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise TargetError(f"Target {name!r}: there is no such GGUF file. Give the path of an existing .gguf file.")
        return TargetFiles(path.name, path.resolve().parent, gguf=path.resolve().name)
    if path.is_dir():
        folder = path.resolve()
        _check_folder(name, folder)
        return TargetFiles(folder.name, folder)
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        found = "a file that isn't a .gguf" if path.exists() else "no such path"
        raise TargetError(f"Target {name!r}: {found}. Expected a transformers folder, a hub name or a .gguf file.")
    return _from_hub(name)


def _check_folder(name: str, folder: Path) -> None:
    missing = [
        kind
        for kind, pattern in (("config.json", "config.json"), ("*.safetensors weights", "*.safetensors"))
        if not any(folder.glob(pattern))
    ]
    if missing:
        raise TargetError(
            f"Target {name!r}: the folder has no {' and no '.join(missing)}, so it isn't a target. "
            "Expected what `save_pretrained` of a transformers model and of its tokenizer writes; "
            "for a .gguf file give the path of the file itself."
        )


def _from_hub(name: str) -> TargetFiles:
    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TargetError(
            f"Target {name!r}: there is no such folder here, and the hub didn't give a model of that name ({reason}). "
            "Give an existing folder or .gguf file, or check the name, the network and, for a gated model, the login."
        ) from error
    _check_folder(name, folder)
    return TargetFiles(name, folder, revision=folder.name)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings inside the block, and restore them after it."""
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # The bar for a GGUF file isn't among those that can be switched off; in a log it would write control characters.
    gguf_bar, gguf.tqdm = gguf.tqdm, partial(gguf.tqdm, disable=True)
    try:
        yield
    finally:
        gguf.tqdm = gguf_bar
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def loading(what: str, files: TargetFiles) -> Iterator[None]:
    """Turn what transformers says about unusable files into one `TargetError` that names the file.

    Args:
        what: The part being loaded, as it stands in the message ("configuration", "tokenizer", "weights").
    """
    place = files.folder if files.gguf is None else files.folder / files.gguf
    try:
        with quiet_transformers():
            yield
    except UNUSABLE as error:
        reason = " ".join(str(error).split())
        raise TargetError(
            f"Target {files.name!r}: its {what} can't be loaded from {place}: {reason.rstrip('.')}. "
            "Expected a causal language model that this version of transformers supports."
        ) from error
