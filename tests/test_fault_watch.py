"""Trainings with a fault built in are told of, once; a healthy one isn't."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import MASK_TOKEN_ID, load_tiny
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_helpers import make_trainer, random_sample, write_cache

from callbacks import DecodedAcceptance
from callbacks.fault_watch import WatchForFaults
from datamodules import FeatureCacheDataModule
from dflash_lightning.cache import Sample
from dflash_lightning.config import DrafterSettings
from dflash_lightning.decoding.context import Context
from dflash_lightning.decoding.decode import plain_decode
from dflash_lightning.evaluation.prompt_results import load_prompts
from dflash_lightning.features import compute_features
from dflash_lightning.target import load_tokenizer
from dflash_lightning.training.losses import SlotResults
from dflash_lightning.training.module import DFlashModule, OptimizerSettings

LAYERS = [1, 3]
ANSWER = 40


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"say {i * 7} please"}) + "\n" for i in range(3)))
    return path


@pytest.fixture(scope="module")
def answered(llama_folder, prompts) -> list[Sample]:
    """The target's answers to the prompts, each under four names: held back under one, it is learned under another."""
    target, samples = load_tiny(llama_folder), []
    for prompt in load_prompts(prompts, load_tokenizer(str(llama_folder))):
        text = plain_decode(target, prompt.token_ids, max_new_tokens=ANSWER, stop_ids=()).token_ids
        tokens = torch.tensor([[*prompt.token_ids, *text]])
        samples.append(
            Sample(
                sample_id=prompt.id,
                input_ids=tokens[0].numpy().astype(np.int32),
                loss_mask=(np.arange(tokens.shape[1]) >= len(prompt.token_ids)).astype(np.uint8),
                features=compute_features(target, tokens, torch.ones_like(tokens), LAYERS)[0].bfloat16(),
            )
        )
    return [replace(sample, sample_id=f"{sample.sample_id}-{copy}") for sample in samples for copy in range(4)]


@pytest.fixture
def train(llama_folder, prompts, tmp_path):
    """Trains on samples and returns the module and the warnings in its TensorBoard by name, with their steps."""

    def run(
        samples: list[Sample],
        *,
        max_steps: int,
        decode: bool = False,
        module: DFlashModule | None = None,
        logs: str = "logs",
        resume: Path | None = None,
    ) -> tuple[DFlashModule, dict[str, list[int]]]:
        if not (tmp_path / "cache").exists():
            write_cache(tmp_path / "cache", samples, target=llama_folder, layer_ids=LAYERS, hidden_size=32)
        module = module or new_module(llama_folder)
        logger = TensorBoardLogger(tmp_path, name=logs, version="", default_hp_metric=False)
        decoding = [DecodedAcceptance(str(prompts), max_new_tokens=ANSWER)] if decode else []
        trainer = make_trainer(
            "plain",
            max_steps=max_steps,
            gradient_clip_val=1.0,
            logger=logger,
            log_every_n_steps=2,
            val_check_interval=max_steps // 2,
            check_val_every_n_epoch=None,
            callbacks=[*decoding, WatchForFaults()],
        )
        data = FeatureCacheDataModule(
            str(tmp_path / "cache"), batch_tokens=1000, num_anchors=24, validation_fraction=0.3
        )
        trainer.fit(module, datamodule=data, ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0}).Reload()
        return module, {
            name.removeprefix("warnings/").removesuffix("/text_summary"): [event.step for event in events.Tensors(name)]
            for name in events.Tags()["tensors"]
        }

    return run


def new_module(target: Path, kind: type[DFlashModule] = DFlashModule) -> DFlashModule:
    torch.manual_seed(0)
    drafter = DrafterSettings(num_layers=2, block_size=4, target_layer_ids=LAYERS, mask_token_id=MASK_TOKEN_ID)
    return kind(str(target), drafter, optimizer=OptimizerSettings(lr=5e-3))


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught if "Likely cause:" in str(warning.message)]


@pytest.mark.slow
def test_a_healthy_training_is_told_nothing_and_a_trained_drafter_that_starts_as_new_is(
    train, answered, llama_folder, tmp_path
):
    module, found = train(answered, max_steps=120, decode=True)
    assert found == {}
    assert module.trainer.callback_metrics["decode/tau"] > 2, "else it proves nothing"
    weights = {name: weight.clone() for name, weight in module.drafter.state_dict().items()}

    def trained(start_from: Path | None) -> DFlashModule:
        again = new_module(llama_folder)
        again.configure_model()
        again.drafter.load_state_dict(weights)
        again.start_from = start_from
        return again

    assert train(answered, max_steps=2, module=trained(tmp_path), logs="fine-tuned")[1] == {}
    with pytest.warns(
        UserWarning, match=r"cross entropy \d\.\d\d before the first step, where random weights give 5.61"
    ):
        assert train(answered, max_steps=2, module=trained(None), logs="leak")[1] == {"low_first_loss": [0]}


def reversed_slots(self: Context, anchors: torch.Tensor, draft=Context.draft) -> torch.Tensor:
    """A fault of decoding: slot 1 gets what was drafted for the last slot, and so on."""
    return draft(self, anchors).flip(1)


@pytest.mark.slow
def test_decoding_that_disagrees_with_training_is_told_once(train, answered, monkeypatch):
    monkeypatch.setattr(Context, "draft", reversed_slots)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, found = train(answered, max_steps=120, decode=True)
    assert module.trainer.callback_metrics["decode/teacher_forced_tau"] > 2
    assert set(found) >= {"decoding_below_teacher_forced", "decoding_below_validation"}
    assert all(len(steps) == 1 for steps in found.values())
    assert len(told(caught)) == len(found)


class SlotOneShifted(DFlashModule):
    """Its labels of slot 1 are another slot's, so that they are never met."""

    def _score(self, batch):
        results, blocks = super()._score(batch)
        correct = results.correct.clone()
        correct[..., 1] = False
        return SlotResults(results.entropy, correct, results.supervised, results.valid), blocks


@pytest.mark.slow
def test_a_slot_that_is_worse_than_later_ones_is_told(train, answered, llama_folder):
    with pytest.warns(UserWarning, match=r"validation accuracy is .* in slot 2, above the 0.0% of slot 1"):
        _, found = train(answered, max_steps=120, module=new_module(llama_folder, SlotOneShifted))
    assert found == {"later_slot_above_earlier": [59]}


@pytest.mark.slow
def test_faults_of_the_data_are_told_at_the_start_and_not_again_after_a_resume(train, tmp_path):
    samples = [random_sample(f"s{i}", 30 + i, 0, 64, seed=i) for i in range(12)]
    for sample in samples:
        sample.features[:, 48:] = 0
        sample.input_ids[20] = MASK_TOKEN_ID
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, found = train(samples, max_steps=4)
    messages = told(caught)
    assert found == {"supervised_share": [0], "constant_features": [0], "mask_token_in_data": [1]}
    assert len(messages) == 3
    assert "in 100% of the samples all are, the prompt too" in messages[0]
    assert "50% of layer 3 have one value" in messages[1]
    assert "the mask token 3 is a token of the data" in messages[2]
    assert train(samples, max_steps=8, logs="resumed", resume=tmp_path / "end.ckpt")[1] == {}


@pytest.mark.slow
def test_a_drafter_that_is_never_accepted_is_told_after_the_second_decoding(train, answered, monkeypatch):
    monkeypatch.setattr(Context, "draft", lambda self, anchors, draft=Context.draft: -draft(self, anchors))
    with pytest.warns(UserWarning, match="not one draft token was accepted in the last 2 decodings, up to step 4"):
        assert train(answered, max_steps=4, decode=True)[1] == {"nothing_accepted": [3]}
