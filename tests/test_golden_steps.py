"""Five optimizer steps on real features, on which three independent trainers agree (shared/cases/golden-steps)."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from training_helpers import RecordSteps, make_trainer

from dflash_lightning.config import DrafterSettings
from dflash_lightning.training.losses import LossSettings
from dflash_lightning.training.module import ContextBatch, DFlashModule, OptimizerSettings

GOLDEN = Path(__file__).parents[1].parent / "shared" / "cases" / "golden-steps"

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden steps at {GOLDEN}"),
]


@pytest.fixture(scope="module")
def expected() -> dict:
    return json.loads((GOLDEN / "expected.json").read_text())


@pytest.fixture(scope="module")
def initial() -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(GOLDEN / "init.safetensors").items()}


@pytest.fixture(scope="module")
def batches() -> list[ContextBatch]:
    stored = load_file(GOLDEN / "batches.safetensors")
    return [make_batch([sample(stored, step, j) for j in range(2)]) for step in range(5)]


def sample(stored, step, j) -> dict[str, torch.Tensor]:
    return {name: stored[f"step{step}.sample{j}.{name}"] for name in ("features", "input_ids", "loss_mask", "anchors")}


def make_batch(samples) -> ContextBatch:
    """Right-padded rows; every given anchor is valid."""

    def rows(name, value=0):
        return torch.nn.utils.rnn.pad_sequence([s[name] for s in samples], batch_first=True, padding_value=value)

    anchors = rows("anchors").long()
    documents = [torch.zeros_like(s["input_ids"], dtype=torch.long) for s in samples]
    return ContextBatch(
        features=rows("features"),
        input_ids=rows("input_ids").long(),
        loss_mask=rows("loss_mask").long(),
        document_ids=torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=-1),
        anchors=anchors,
        valid=torch.ones_like(anchors, dtype=torch.bool),
        samples=torch.arange(len(samples)),
        anchors_in_step=torch.tensor(anchors.numel()),
    )


def make_module(folder, expected, initial) -> DFlashModule:
    drafter = expected["drafter"]
    module = DFlashModule(
        str(folder),
        DrafterSettings(
            num_layers=drafter["num_hidden_layers"],
            block_size=drafter["block_size"],
            target_layer_ids=drafter["target_layer_ids"],
            mask_token_id=drafter["mask_token_id"],
        ),
        LossSettings(gamma=expected["loss"]["gamma"]),
        # Warm-up over 12 of 300 steps: the expected list of learning rates.
        OptimizerSettings(lr=1e-3, warmup_ratio=0.04),
    )
    module.configure_model()
    module.drafter.load_state_dict(initial)
    return module


class LearningRates(L.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, *_):
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def check_config(config, drafter):
    """The drafter that follows from the converted target is the one of the golden steps."""
    assert (config.hidden_size, config.intermediate_size) == (drafter["hidden_size"], drafter["intermediate_size"])
    assert (config.num_heads, config.num_kv_heads) == (drafter["num_attention_heads"], drafter["num_key_value_heads"])
    assert config.head_dim == drafter["head_dim"]
    assert config.rms_norm_eps == pytest.approx(drafter["rms_norm_eps"], rel=1e-6)
    assert config.rope_parameters["rope_theta"] == drafter["rope_theta"]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("strategy", ["plain", "zero2"])
def test_golden_steps(strategy, smollm2_folder, expected, initial, batches):
    module = make_module(smollm2_folder, expected, initial)
    check_config(module.drafter_config, expected["drafter"])
    logger, rates = RecordSteps(), LearningRates()
    trainer = make_trainer(
        strategy,
        max_epochs=1,
        max_steps=300,
        limit_train_batches=5,
        gradient_clip_val=1.0,
        logger=logger,
        callbacks=[rates],
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))

    assert trainer.global_step == 5
    assert rates.seen == pytest.approx(expected["optimizer"]["lr"], rel=1e-9)
    for name, losses in expected["loss"]["value"].items():
        assert logger.values("train/loss") == pytest.approx(losses, rel=expected["loss"]["relative_tolerance"]), name
    updates = {name: (tensor - initial[name]).norm().item() for name, tensor in module.drafter.state_dict().items()}
    assert updates == pytest.approx(
        expected["update_norm_after_5_steps"], rel=expected["update_norm_relative_tolerance"]
    )
