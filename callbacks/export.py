"""Exports the best checkpoint when training ends."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from callbacks.early_check import CheckedEarly
from dflash_lightning.config import DrafterConfig
from dflash_lightning.distributed import launched_place
from dflash_lightning.errors import ConfigError, ExportError
from dflash_lightning.export import check_free, export, parse_formats
from dflash_lightning.export.card import METADATA_FILE, Provenance
from dflash_lightning.export.loading import read_json
from dflash_lightning.training.module import DFlashModule
from dflash_lightning.training.resume import OneStart
from dflash_lightning.writable import check_writable


class ExportDrafter(CheckedEarly):
    """Writes the best checkpoint as folders that servers load, one a format, on rank 0 at the end of `fit`.

    "Best" is what the trainer's first `ModelCheckpoint` monitors. That the folders are free is checked before the first
    step, so that hours of training don't end in a refusal. A training that is resumed replaces what it exported before:
    an export of ours of the same shape for the same target. Nothing names a run itself, as a resumed one may have other
    settings, another log folder and a copied checkpoint; give trainings of one shape folders of their own.

    The files are read back and compared, but nothing is decoded: that would need the target in float32 where the
    training still holds the memory, while the other ranks wait. `dflash-lightning export` with the checkpoint, or with
    the exported folder and its target, does it afterwards.
    """

    def __init__(self, dirpath: str, formats: str = "zlab,transformers"):
        """
        Args:
            dirpath: folder that gets one folder a format.
            formats: separated by commas: zlab, transformers, speculators.

        Raises:
            ExportError: a format is unknown.
        """
        self.dirpath, self.formats = Path(dirpath), formats
        self._names = [form.name for form in parse_formats(formats)]

    def check(self) -> None:
        if launched_place().rank == 0:  # nobody else writes there
            check_writable("dirpath of ExportDrafter", self.dirpath, folder=True)

    # The first hook: before DeepSpeed is set up, and before anything is decoded.
    def setup(self, trainer: L.Trainer, pl_module: DFlashModule, stage: str) -> None:  # noqa: ARG002
        if _best(trainer) is None:
            raise ConfigError("ExportDrafter exports the best checkpoint; add a ModelCheckpoint to the callbacks.")
        if any(isinstance(known, OneStart) and not known.start.checkpoint for known in trainer.callbacks):
            self._check_free(trainer, pl_module)

    # Not earlier, when DeepSpeed hasn't loaded a checkpoint yet and the trainer doesn't know of one.
    def on_train_start(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:
        self._check_free(trainer, pl_module)

    def _check_free(self, trainer: L.Trainer, module: DFlashModule) -> None:
        if trainer.is_global_zero:
            self.check()  # names the setting as it is called here
            for folder in self._not_ours(trainer, module):
                check_free(folder)

    def on_fit_end(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:
        best = _best(trainer).best_model_path
        if not best:
            rank_zero_warn("ExportDrafter: no checkpoint was saved, so nothing is exported.")
        elif trainer.is_global_zero:
            score = _best(trainer).best_model_score
            if score is not None and score.isnan():
                rank_zero_warn(
                    f"ExportDrafter: {_best(trainer).monitor} was never measured, so which checkpoint is best isn't "
                    f"known. {best} is exported; `dflash-lightning export --checkpoint` takes another one."
                )
            free = self._not_ours(trainer, pl_module)
            former = [folder for name in self._names if (folder := self.dirpath / name) not in free]
            with _out_of_the_way(former):
                export(Path(best), self.dirpath, self.formats, verify=False)

    def _not_ours(self, trainer: L.Trainer, module: DFlashModule) -> list[Path]:
        """The folders to make, but for those that an earlier end of this training has made.

        Sets right first what an end that was killed has left out of the way.
        """
        folders = [self.dirpath / name for name in self._names]
        for folder in folders:
            _take_back(folder)
        return [folder for folder in folders if not (trainer.ckpt_path and _is_of(module, folder / METADATA_FILE))]


def _is_of(module: DFlashModule, metadata: Path) -> bool:
    """Whether a folder says that it holds a drafter like the module's, for the same target.

    One that says it in the fields of another version, or can't be read, counts as somebody else's.
    """
    if not metadata.is_file():
        return False
    try:
        told = read_json(metadata)
        made, drafter = Provenance.from_dict(told), DrafterConfig.from_dict(told["drafter"])
    except (KeyError, TypeError, ConfigError, ExportError):
        return False
    return made is not None and made.target.fits(module.target_identity) and drafter == module.drafter_config


@contextmanager
def _out_of_the_way(folders: Sequence[Path]) -> Iterator[None]:
    """Free the names of folders; they go when the block has ended well, and come back if it hasn't."""
    aside = {folder: _place_aside(folder) for folder in folders}
    with ExitStack() as back:
        for folder, place in aside.items():
            folder.rename(place)
            back.callback(place.rename, folder)
        yield
        back.pop_all()
    for place in aside.values():
        shutil.rmtree(place)


def _take_back(folder: Path) -> None:
    """After a kill in `_out_of_the_way`: give a former export its name again, or remove it if a new one has that."""
    place = _place_aside(folder)
    if place.exists() and not folder.exists():
        place.rename(folder)
    elif place.exists():
        shutil.rmtree(place)


def _place_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _best(trainer: L.Trainer) -> ModelCheckpoint | None:
    """The first ModelCheckpoint of the trainer."""
    return next((saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)), None)
