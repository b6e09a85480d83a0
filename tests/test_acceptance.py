"""Decoding while training: the same figures on any ranks, within its share of time, and without a trace in training."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import MASK_TOKEN_ID, load_tiny, make_drafter
from lightning.pytorch.callbacks import ModelCheckpoint
from test_throughput import Clock, Compute
from training_helpers import Job, random_sample, run_on_ranks, write_cache

from callbacks import DecodedAcceptance
from callbacks import acceptance as acceptance_module
from callbacks.frozen_target import FrozenTarget
from dflash_lightning.config import DrafterSettings
from dflash_lightning.errors import ConfigError
from dflash_lightning.evaluation.prompt_results import decode_plainly, evaluate_prompt, load_prompts
from dflash_lightning.target import load_tokenizer
from dflash_lightning.training.losses import LossSettings
from dflash_lightning.training.module import OptimizerSettings

DRAFTER = DrafterSettings(num_layers=1, block_size=4, target_layer_ids=[1, 3], mask_token_id=MASK_TOKEN_ID)
STOPS = [2, *range(60, 85)]
# What a report says of the texts; the rest of it are times.
OF_TEXTS = (
    *("step", "tau", "tau_low", "tau_high", "teacher_forced_tau", "rounds", "prompts", "by_family", "histogram"),
    *("texts", "tau_mean", "acceptance_by_slot", "lossless", "mask_token_prompts"),
)
TIMES = ("seconds", "plain_seconds", "prefill_seconds", "plain_prefill_seconds")


@pytest.fixture(scope="module")
def talker(llama_folder, tmp_path_factory) -> Path:
    """The tiny target with so many stop tokens that its answers end at all lengths."""
    folder = tmp_path_factory.mktemp("targets") / "talker"
    shutil.copytree(llama_folder, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": STOPS}))
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": f"p{i}", "family": "ab"[i % 2], "prompt": f"say {i * 7} please"} for i in range(7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def job(talker, tmp_path_factory) -> Job:
    """Six steps of 4 micro-batches, 3 steps an epoch, and a validation after each epoch."""
    samples = [random_sample(f"s{i}", 14 + i, 3, 64, seed=i) for i in range(17)]
    cache = tmp_path_factory.mktemp("cache") / "cache"
    write_cache(cache, samples, target=talker, layer_ids=[1, 3], hidden_size=32)
    return Job(
        target=str(talker),
        drafter=DRAFTER,
        loss=LossSettings(),
        optimizer=OptimizerSettings(lr=0.01),
        initial=make_drafter(load_tiny(talker), num_layers=1).state_dict(),
        data={"cache": str(cache), "batch_tokens": 78, "num_anchors": 3, "validation_fraction": 0.1},
        max_steps=6,
        clip=1.0,
        accumulation=4,
    )


class ComputeOnly(Compute):
    """Validations take no time beside the decoding."""

    def on_validation_start(self, *_):
        pass


def decoding(job: Job, prompts: Path, root: Path, **settings) -> Job:
    callback = DecodedAcceptance(str(prompts), **{"max_new_tokens": 24, **settings})
    return replace(job, callbacks=(callback,), root=root)


def reports(root: Path) -> list[dict]:
    return [json.loads(line) for line in (root / "decoding.jsonl").read_text().splitlines()]


def of_texts(report: dict) -> dict:
    return {name: report[name] for name in OF_TEXTS}


def random_states():
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()


def test_training_goes_on_as_if_nothing_had_been_decoded(job, prompts, tmp_path):
    ends = []
    for variant in (job, decoding(job, prompts, tmp_path)):
        torch.manual_seed(7)
        ends.append((variant.run(), random_states()))
    (plain, states_without), (decoded, states_with) = ends
    assert states_with == states_without
    assert all(torch.equal(decoded.weights[name], weight) for name, weight in plain.weights.items())
    assert [report["step"] for report in reports(tmp_path)] == [0, 3, 6]
    assert all(0 < report["time_share"] < 1 for report in reports(tmp_path))


def test_a_validation_every_second_epoch_decodes_there(job, prompts, tmp_path):
    decoding(job, prompts, tmp_path, limit=1).run(check_val_every_n_epoch=2)
    assert [report["step"] for report in reports(tmp_path)] == [0, 6]


@pytest.fixture(scope="module")
def answers(talker, prompts) -> list[int]:
    """Length of each prompt's answer."""
    chosen = load_prompts(prompts, load_tokenizer(str(talker)))
    return [len(run.token_ids) for run in decode_plainly(load_tiny(talker), chosen, max_new_tokens=24, stop_ids=STOPS)]


@pytest.mark.slow
def test_two_ranks_report_what_one_does(job, prompts, answers, tmp_path):
    """ZeRO-2 and 3; with answers of unequal length, and under ZeRO-3, where ranks wait for each other, with fewer
    prompts than ranks."""
    assert max(answers[::2]) - min(answers) > 5
    assert sum(answers[::2]) != sum(answers[1::2])
    two = replace(job, devices=2, accumulation=2)
    jobs = {}
    for strategy in ("zero2", "zero3"):
        cut = replace(two, strategy=strategy)
        jobs[strategy, "without"] = cut
        jobs[strategy, "all"] = decoding(cut, prompts, tmp_path / strategy / "all", target_on="host")
    jobs["zero3", "one"] = decoding(cut, prompts, tmp_path / "zero3" / "one", limit=1)
    ranks = run_on_ranks(2, jobs, tmp_path)
    decoding(job, prompts, tmp_path / "all").run()
    decoding(job, prompts, tmp_path / "one", limit=1).run()
    for strategy, kind in (name for name in jobs if name[1] != "without"):
        found = reports(tmp_path / strategy / kind)
        # Before training the weights are the same bit for bit, and so is every figure.
        assert of_texts(found[0]) == of_texts(reports(tmp_path / kind)[0])
        assert [report["step"] for report in found] == [0, 3, 6]
        assert {report["prompts"] for report in found} == {7 if kind == "all" else 1}
        assert all(report["lossless"]["identical"] == report["prompts"] for report in found)
        for outcomes in ranks:
            without, decoded = outcomes[strategy, "without"].weights, outcomes[strategy, kind].weights
            assert all(torch.equal(decoded[name], weight) for name, weight in without.items())


def test_decoding_keeps_to_its_share_of_time_and_says_so(job, prompts, tmp_path, monkeypatch):
    """A step takes 8 seconds, a decoding 20, and half of the time may go into decoding."""
    clock = Clock()
    monkeypatch.setattr("callbacks.time_budget.time", clock)

    def ten_seconds(*arguments, **options):
        clock.now += 10
        return evaluate_prompt(*arguments, **options)

    monkeypatch.setattr(acceptance_module, "evaluate_prompt", ten_seconds)
    best = ModelCheckpoint(tmp_path, "{step}", monitor="decode/tau", mode="max", save_on_train_epoch_end=False)
    logged = decoding(job, prompts, tmp_path, limit=2, max_time_share=0.5)
    logged = replace(logged, max_steps=8, accumulation=1, callbacks=(*logged.callbacks, ComputeOnly(clock, 8), best))
    with pytest.warns(UserWarning, match=r"step 1 is left out: with it 83.3% of the .* max_time_share is 50.0%"):
        outcome = logged.run(val_check_interval=1, check_val_every_n_epoch=None)
    # Step 4: (20 + 20) of (20 + 4 * 8 + 20) seconds would be more than half; step 5: exactly half.
    assert [report["step"] for report in reports(tmp_path)] == [0, 5, 8]
    assert [report["time_share"] for report in reports(tmp_path)] == [1.0, 0.5, 60 / 124]
    assert [metrics["decode/left_out"] for metrics in outcome.validation] == [1, 2, 3, 4, 4, 5, 6, 6]
    assert [metrics["decode/time_share"] for metrics in outcome.validation][:2] == pytest.approx([20 / 28, 20 / 36])
    # The best is chosen among the decoded ones.
    assert Path(best.best_model_path).stem in ("step=5", "step=8")
    assert best.best_model_score == pytest.approx(max(report["tau"] for report in reports(tmp_path)[1:]))


def test_it_decodes_as_often_as_it_is_told(job, prompts, tmp_path):
    told = decoding(replace(job, accumulation=1, max_steps=8), prompts, tmp_path, limit=1, every_n_steps=3)
    told.run(val_check_interval=1, check_val_every_n_epoch=None)
    assert [report["step"] for report in reports(tmp_path)] == [0, 3, 6]


def tensors_of(target) -> list[torch.Tensor]:
    return [*target.parameters(), *target.buffers()]


def test_a_target_on_the_host_leaves_the_device_as_it_was(talker):
    """The device is "meta" here, which holds no values but counts as another one."""
    frozen = FrozenTarget(str(talker), dtype=torch.float32, device=torch.device("meta"), residence="host")
    with frozen.at_hand() as target:
        assert {tensor.device.type for tensor in tensors_of(target)} == {"meta"}
        assert target.get_output_embeddings().weight is target.get_input_embeddings().weight
    assert all(map(torch.equal, tensors_of(target), tensors_of(load_tiny(talker))))
    with pytest.raises(KeyboardInterrupt), frozen.at_hand():
        raise KeyboardInterrupt
    assert {tensor.device.type for tensor in tensors_of(target)} == {"cpu"}


def test_a_target_under_a_device_map_decodes_the_same(talker, prompts):
    """So little memory that its layers and tables are read from disk in every forward."""
    frozen = FrozenTarget(
        str(talker),
        dtype=torch.float32,
        device=torch.device("cpu"),
        residence="device_map",
        max_memory={"cpu": "40KB"},
    )
    whole, limits = load_tiny(talker), {"max_new_tokens": 24, "stop_ids": STOPS}
    drafter, chosen = make_drafter(whole), load_prompts(prompts, load_tokenizer(str(talker)), limit=3)
    with frozen.at_hand() as target:
        assert "meta" in {parameter.device.type for parameter in target.parameters()}
        for prompt in chosen:
            results = []
            for model in (target, whole):
                (plain,) = decode_plainly(model, [prompt], **limits)
                result = evaluate_prompt(model, drafter, prompt, plain, **limits)
                results.append(replace(result, **dict.fromkeys(TIMES, 0.0)))
            assert results[0] == results[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 1}, "max_new_tokens of DecodedAcceptance is 1; expected at least 2"),
        ({"limit": 0}, "limit of DecodedAcceptance is 0"),
        ({"every_n_steps": 0}, "every_n_steps of DecodedAcceptance is 0"),
        ({"max_time_share": 0.0}, "max_time_share of DecodedAcceptance is 0.0"),
        ({"max_memory": {"cpu": "1GB"}}, "set target_on to device_map"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DecodedAcceptance("prompts.jsonl", **settings)
