"""Real speculative decoding of held-out prompts while training: the number that a server will see."""

import json
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from dflash_lightning.errors import ConfigError
from dflash_lightning.evaluation import decode_plainly, evaluate_prompt, load_prompts, summarize
from dflash_lightning.module import DFlashModule
from dflash_lightning.target import load_target, load_tokenizer, stop_token_ids

LOGGED = ("tau", "tau_low", "tau_high", "teacher_forced_tau", "tokens_per_second", "speedup")


class DecodedAcceptance(Callback):
    """Decodes prompts with the drafter in training: before the first step, and at every validation.

    Logs ``decode/tau`` (committed tokens / verify rounds, bonus included) with its 95 % interval,
    ``decode/teacher_forced_tau`` on the same texts, speed against plain decoding, and how many texts equal plain
    greedy decoding, differ at a tie, or differ. Full reports go to ``decoding.jsonl`` in the run's log folder.

    Prompts are dealt over ranks; the only collective is the one that collects the results.
    """

    def __init__(self, prompts: str, limit: int | None = 12, max_new_tokens: int = 128, thinking: bool | None = None):
        """
        Args:
            prompts: JSONL file of prompts that aren't trained on.
            limit: decode only its first prompts.
            max_new_tokens: length limit of each text.
            thinking: the chat template's thinking switch; as in prepare.
        """
        if max_new_tokens < 2:
            raise ConfigError(f"max_new_tokens of DecodedAcceptance is {max_new_tokens}; a round needs at least 2.")
        self.prompts_path, self.limit = prompts, limit
        self.max_new_tokens, self.thinking = max_new_tokens, thinking

    def on_fit_start(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:
        if getattr(trainer.strategy, "zero_stage_3", False):
            raise ConfigError(
                "DecodedAcceptance can't decode with the sharded weights of ZeRO stage 3; use stage 2 (a drafter is "
                "small), or leave the callback out."
            )
        tokenizer = load_tokenizer(pl_module.target_name)
        prompts = load_prompts(self.prompts_path, tokenizer, limit=self.limit, thinking=self.thinking)
        self.target = load_target(pl_module.target_name, dtype=pl_module.compute_dtype, device=pl_module.device)
        self.limits = {
            "max_new_tokens": self.max_new_tokens,
            "stop_ids": stop_token_ids(self.target, tokenizer),
        }
        self.prompts = prompts[trainer.global_rank :: trainer.world_size]
        self.plain = decode_plainly(self.target, self.prompts, **self.limits)

    def on_fit_end(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:  # noqa: ARG002
        del self.target, self.plain

    def on_train_start(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:
        if sum(trainer.num_val_batches) == 0:
            raise ConfigError(
                "there is no validation batch, and DecodedAcceptance decodes at validations; raise "
                "data.validation_fraction, or capture more samples."
            )
        if trainer.global_step == 0:
            values = self._decode(trainer, pl_module)
            for logger in trainer.loggers:
                logger.log_metrics(values, step=0)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:
        if not trainer.sanity_checking:
            # Every rank has the same values; sync_dist only tells Lightning so.
            pl_module.log_dict(self._decode(trainer, pl_module), sync_dist=True)

    def _decode(self, trainer: L.Trainer, pl_module: DFlashModule) -> dict[str, float]:
        mine = [
            evaluate_prompt(self.target, pl_module.drafter, prompt, plain, **self.limits)
            for prompt, plain in zip(self.prompts, self.plain, strict=True)
        ]
        gathered = [mine]
        if trainer.world_size > 1:
            gathered = [None] * trainer.world_size
            torch.distributed.all_gather_object(gathered, mine)
        report = summarize([result for part in gathered for result in part], pl_module.drafter_config.block_size)
        report = {"step": trainer.global_step, **report}
        # Asked on every rank: Lightning broadcasts it from the first.
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "decoding.jsonl").open("a") as file:
                file.write(json.dumps(report) + "\n")
        lossless = report["lossless"]
        values = {f"decode/{name}": report[name] for name in LOGGED if report[name] is not None}
        values["decode/identical"] = lossless["identical"]
        values["decode/ties"] = lossless["ties"]
        values["decode/differences"] = lossless["prompts"] - lossless["identical"] - lossless["ties"]
        return {name: float(value) for name, value in values.items()}
