"""Real speculative decoding of held-out prompts while training: the number that a server will see."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng

from callbacks.early_check import CheckedEarly
from callbacks.frozen_target import FrozenTarget, Residence
from callbacks.time_budget import TimeBudget
from datamodules import FeatureCacheDataModule
from dflash_lightning.decoding.decode import Generation, length_limits
from dflash_lightning.distributed import gather_when_all_are_done
from dflash_lightning.errors import ConfigError
from dflash_lightning.evaluation.prompt_results import (
    Prompt,
    PromptResult,
    decode_plainly,
    evaluate_prompt,
    load_prompts,
)
from dflash_lightning.evaluation.report import summarize
from dflash_lightning.progress import track
from dflash_lightning.prompts.sets import read_evaluation_prompts
from dflash_lightning.target import load_generation_config, load_tokenizer, stop_token_ids, target_text_config
from dflash_lightning.training.gathering import gather_drafter
from dflash_lightning.training.module import DFlashModule

IF_LOST = (
    "Start all processes again with --resume auto; for slow ranks raise timeout_minutes of trainer.strategy, or give "
    "them less to do."
)
LOGGED = ("tau", "tau_low", "tau_high", "teacher_forced_tau", "tokens_per_second", "speedup")


class DecodingObserver(Callback):
    """A callback that `DecodedAcceptance` tells about each decoding, on every rank."""

    def on_decoded(self, trainer: L.Trainer, report: dict[str, Any], results: Sequence[PromptResult]) -> None:
        """After a decoding, before its figures are logged.

        Args:
            report: as it is written to ``decoding.jsonl``.
            results: of all prompts, in the order of their file.
        """


class DecodedAcceptance(CheckedEarly):
    """Decodes prompts with the drafter in training: before the first step, and at validations.

    Logs ``decode/tau`` (committed tokens / verify rounds, bonus included) with its 95 % interval,
    ``decode/teacher_forced_tau`` on the same texts, speed against plain decoding, and how many texts equal plain
    greedy decoding, differ at a tie, or differ. Full reports go to ``decoding.jsonl`` in the run's log folder.

    Prompts are dealt over ranks. While they decode no rank waits for another one; at the end all results are gathered
    once. With the weights sharded by ZeRO-3, each rank first gets a whole copy of the drafter, for as long as it
    decodes. What training does next isn't changed: not its random numbers, nor anything else.

    A decoding that would take more than ``max_time_share`` of the wall time since the start of `fit` (loading and plain
    decoding included, which is done once) is left out, with a warning; ``decode/left_out`` counts them, and
    ``decode/time_share`` is the share so far. Where nothing was decoded ``decode/tau`` is NaN for `ModelCheckpoint`,
    which then keeps the best that it has.
    """

    def __init__(
        self,
        prompts: str,
        limit: int | None = 12,
        max_new_tokens: int = 128,
        thinking: bool | None = None,
        every_n_steps: int = 1,
        max_time_share: float = 1.0,
        target_on: Residence = "device",
        max_memory: dict[int | str, str] | None = None,
    ):
        """
        Args:
            prompts: JSONL file of prompts that aren't trained on, or another source of `evaluate`; of one turn each.
            limit: decode only its first prompts.
            max_new_tokens: length limit of each text.
            thinking: the chat template's thinking switch; as in prepare.
            every_n_steps: decode at the first validation after so many optimizer steps since the last decoding; 1: at
                every validation.
            max_time_share: greatest share of wall time that decoding may take, above 0 to 1.
            target_on: where the target lies while the drafter trains. device: each rank's. host: each rank's process,
                copied to the device for each decoding. device_map: spread over GPUs, memory and disk of each node; one
                rank a node decodes then.
            max_memory: what a device map may use at most, by device: {0: "20GiB", "cpu": "100GiB"}.
        """
        least = {"max_new_tokens": (max_new_tokens, 2), "limit": (limit, 1), "every_n_steps": (every_n_steps, 1)}
        for name, (value, minimum) in least.items():
            if value is not None and value < minimum:
                raise ConfigError(f"{name} of DecodedAcceptance is {value}; expected at least {minimum}.")
        if not 0 < max_time_share <= 1:
            raise ConfigError(f"max_time_share of DecodedAcceptance is {max_time_share}; expected above 0, up to 1.")
        if max_memory and target_on != "device_map":
            raise ConfigError("max_memory of DecodedAcceptance limits a device map; set target_on to device_map too.")
        self.prompts_path, self.limit = prompts, limit
        self.max_new_tokens, self.thinking = max_new_tokens, thinking
        self.every_n_steps, self.max_time_share = every_n_steps, max_time_share
        self.target_on, self.max_memory = target_on, max_memory
        self._last_step, self._left_out = -every_n_steps, 0

    def check(self) -> None:
        read_evaluation_prompts(self.prompts_path, self.limit, several_turns=False)

    def load_prompts(self, target: str) -> list[Prompt]:
        """The prompts as a target sees them.

        Raises:
            DataError: naming file and line.
            ConfigError: one leaves the target no position for an answer.
        """
        prompts = load_prompts(self.prompts_path, load_tokenizer(target), limit=self.limit, thinking=self.thinking)
        positions = target_text_config(target).max_position_embeddings
        length_limits(positions, [prompt.token_ids for prompt in prompts], self.max_new_tokens)
        return prompts

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self._last_step, "left_out": self._left_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last_step, self._left_out = state_dict["last_step"], state_dict["left_out"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:
        check_validates(trainer.datamodule)
        self._budget = TimeBudget(self.max_time_share)
        name = pl_module.target_name
        prompts = self.load_prompts(name)
        self._plain: list[Generation] | None = None
        self.limits = {
            "max_new_tokens": self.max_new_tokens,
            "stop_ids": stop_token_ids(load_generation_config(name), load_tokenizer(name)),
        }
        self._group = None
        if trainer.world_size > 1:
            self._timeout = trainer.strategy._timeout
            self._group = torch.distributed.new_group(backend="gloo", timeout=self._timeout)
        number, count = trainer.global_rank, trainer.world_size
        if self.target_on == "device_map":  # the first rank of each node decodes
            number, count = trainer.node_rank, trainer.num_nodes
        # Prompts of this rank by their place in the file, so that the report doesn't depend on who decoded which.
        self.prompts = dict(list(enumerate(prompts))[number::count])
        if self.target_on == "device_map" and trainer.local_rank > 0:
            self.prompts = {}

    def on_fit_end(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:  # noqa: ARG002
        self.target = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:
        # Not at the start of training, where others may still refuse a setting.
        if trainer.global_step == 0:
            values = self._decode(trainer, pl_module)
            for logger in trainer.loggers:
                logger.log_metrics(values, step=0)

    def _decode_plainly(self, pl_module: DFlashModule) -> None:
        """Load the target, and decode what the drafter's texts are compared with."""
        self._plain = []
        if self.prompts:
            with self._budget.spend(), isolate_rng():
                self.target = FrozenTarget(
                    pl_module.target_name,
                    dtype=pl_module.compute_dtype,
                    device=pl_module.device,
                    residence=self.target_on,
                    max_memory=self.max_memory,
                )
                shown = track(len(self.prompts), "plain decoding", "tokens")
                with self.target.at_hand() as target, shown as progress:
                    for prompt in self.prompts.values():
                        self._plain += decode_plainly(target, [prompt], **self.limits)
                        progress.advance(done=len(self._plain[-1].token_ids))
        self._everybodys({}, "plain decoding")

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:
        if trainer.sanity_checking:
            return
        # Else ModelCheckpoint would take an older one. Set here and not logged: the loggers would draw it.
        trainer.callback_metrics["decode/tau"] = torch.tensor(math.nan)
        if trainer.global_step - self._last_step >= self.every_n_steps and self._has_time(trainer):
            values = self._decode(trainer, pl_module)
        else:
            values = self._time()
        # Every rank has the same values, but for its clock.
        pl_module.log_dict(values, sync_dist=True)

    def _has_time(self, trainer: L.Trainer) -> bool:
        """Whether the budget allows another decoding, as rank 0's clock says."""
        share = trainer.strategy.broadcast(self._budget.share_after_another)
        if share <= self.max_time_share:
            return True
        self._left_out += 1
        rank_zero_warn(
            f"decoding at step {trainer.global_step} is left out: with it {share:.1%} of the wall time would have gone "
            f"into decoding, and max_time_share is {self.max_time_share:.1%}. Left out so far: {self._left_out}."
        )
        return False

    def _time(self) -> dict[str, float]:
        return {"decode/time_share": self._budget.share, "decode/left_out": float(self._left_out)}

    def _decode(self, trainer: L.Trainer, pl_module: DFlashModule) -> dict[str, float]:
        if self._plain is None:
            self._decode_plainly(pl_module)
        with self._budget.spend():
            results = self._results(trainer, pl_module)
        self._last_step = trainer.global_step
        report = summarize(results, pl_module.drafter_config.block_size)
        report = {"step": trainer.global_step, **report, "time_share": self._budget.share}
        # Asked on every rank: Lightning broadcasts it from the first.
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "decoding.jsonl").open("a") as file:
                file.write(json.dumps(report) + "\n")
        for observer in trainer.callbacks:
            if isinstance(observer, DecodingObserver):
                observer.on_decoded(trainer, report, results)
        lossless = report["lossless"]
        values = {f"decode/{name}": report[name] for name in LOGGED if report[name] is not None}
        values["decode/identical"] = lossless["identical"]
        values["decode/ties"] = lossless["ties"]
        values["decode/differences"] = lossless["differing"]
        return {name: float(value) for name, value in values.items()} | self._time()

    def _results(self, trainer: L.Trainer, pl_module: DFlashModule) -> list[PromptResult]:
        """Results of all prompts, on every rank."""
        drafter, mine = gather_drafter(pl_module.drafter), {}
        if self.prompts:
            training = drafter.training
            drafter.eval()
            shown = track(len(self.prompts), f"decoding at step {trainer.global_step}", "tokens")
            with isolate_rng(), self.target.at_hand() as target, shown as progress:
                for (number, prompt), plain in zip(self.prompts.items(), self._plain, strict=True):
                    mine[number] = evaluate_prompt(target, drafter, prompt, plain, **self.limits)
                    progress.advance(done=len(mine[number].token_ids))
            drafter.train(training)
        del drafter  # under ZeRO-3 a copy, whose memory is needed while others still decode
        return self._everybodys(mine, f"decoding at step {trainer.global_step}")

    def _everybodys(self, mine: dict[int, PromptResult], work: str) -> list[PromptResult]:
        """The results of all ranks, in the prompts' order."""
        parts = [mine]
        if self._group is not None:
            parts = gather_when_all_are_done(mine, self._group, self._timeout, work, IF_LOST)
        results = {number: result for part in parts for number, result in part.items()}
        return [results[number] for number in sorted(results)]


def check_validates(data: FeatureCacheDataModule) -> None:
    """Refuse a training without validations, which is when `DecodedAcceptance` decodes. Raises ConfigError."""
    if data.trainer.limit_val_batches == 0:
        raise ConfigError(
            "trainer.limit_val_batches is 0, and DecodedAcceptance decodes at validations; leave one of the two out."
        )
    if len(data.validation_samples) == 0:
        raise ConfigError(
            "no sample is held back for validation, and DecodedAcceptance decodes at validations; raise "
            "data.validation_fraction, or capture more samples."
        )
