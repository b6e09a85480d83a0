"""The shipped configurations keep the best checkpoint by decoded tau, and the last; one process exports either."""

from dataclasses import dataclass, replace
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from resume_helpers import make_job, write_random_cache
from training_helpers import Job, run_on_ranks

from dflash_lightning.checkpoints import read_training_checkpoint
from dflash_lightning.cli import run
from dflash_lightning.export import load_drafter
from dflash_lightning.training.gathering import gather_drafter

CONFIGURATIONS = ("quickstart", "train_qwen3_8b")
STEPS_AN_EPOCH = 3
# After each epoch. The second is the best; the loss is the lowest after another one.
TAUS = [2.0, 3.0, 2.5]
BEST_STEP, LAST_STEP = 2 * STEPS_AN_EPOCH, 3 * STEPS_AN_EPOCH

pytestmark = pytest.mark.slow


@dataclass
class KnownTau(L.Callback):
    """Stands in for DecodedAcceptance with taus that are known, and saves the weights that they belong to."""

    folder: Path

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("decode/tau", TAUS[trainer.global_step // STEPS_AN_EPOCH - 1], sync_dist=True)
        weights = gather_drafter(pl_module.drafter).state_dict()
        if trainer.is_global_zero:
            self.folder.mkdir(exist_ok=True)
            torch.save(weights, self.folder / f"{trainer.global_step}.pt")


def shipped_savers(name: str, folder: Path) -> list[ModelCheckpoint]:
    """The ModelCheckpoints of a configuration in conf/, saving to `folder`."""
    file = Path(__file__).parents[1] / "conf" / f"{name}.yaml"
    callbacks = yaml.safe_load(file.read_text())["trainer"]["callbacks"]
    settings = [given["init_args"] for given in callbacks if given["class_path"].endswith(".ModelCheckpoint")]
    return [ModelCheckpoint(**given | {"dirpath": folder}) for given in settings]


@pytest.fixture(scope="module")
def trained(llama_folder, tmp_path_factory):
    """A run of two ranks under ZeRO-3 for each configuration: what rank 0 ended with, and its folder."""
    folder = tmp_path_factory.mktemp("best")
    cache = write_random_cache(folder / "cache", llama_folder, 19)
    data = {"cache": str(cache), "batch_tokens": 110, "num_anchors": 3, "validation_fraction": 0.1}
    job = make_job(llama_folder, data=data, max_steps=LAST_STEP, strategy="zero3", devices=2)
    jobs = {
        name: replace(
            Job(**vars(job)),
            callbacks=(KnownTau(folder / name / "weights"), *shipped_savers(name, folder / name / "checkpoints")),
            save_to=folder / name / "each step",
        )
        for name in CONFIGURATIONS
    }
    for name in CONFIGURATIONS:
        (folder / name).mkdir()
    return run_on_ranks(2, jobs, folder)[0], folder


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_best_by_tau_and_last_are_kept_and_export_from_one_process(trained, name, tmp_path):
    outcomes, folder = trained
    losses = [metrics["val/loss"] for metrics in outcomes[name].validation]
    assert len(losses) == len(TAUS)
    assert min(losses) < losses[1]
    best, last = f"step={BEST_STEP}-tau=3.00.ckpt", "last.ckpt"
    kept = folder / name / "checkpoints"
    assert {path.name for path in kept.iterdir()} == {best, last}
    for checkpoint, step in ((best, BEST_STEP), (last, LAST_STEP)):
        path = kept / checkpoint
        assert len(list(path.glob("checkpoint/*_model_states.pt"))) == 2  # half of the weights in each
        assert read_training_checkpoint(path).step == step
        output = tmp_path / str(step)
        run(["export", "--checkpoint", str(path), "--output", str(output), "--verify", "false"])
        expected = torch.load(folder / name / "weights" / f"{step}.pt")
        for written in sorted(output.iterdir()):
            exported = load_drafter(written, dtype=torch.bfloat16).state_dict()
            assert exported.keys() == expected.keys()
            for key, weight in expected.items():
                assert torch.equal(exported[key], weight.bfloat16()), (written, key)
