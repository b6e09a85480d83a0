"""How prompts are asked: turn by turn, with random numbers of their own, decoded plainly and with the drafter."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_lightning.decoding.decode import plain_decode, speculative_decode
from dflash_lightning.decoding.sampling import Scheme, make_scheme
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import ConfigError
from dflash_lightning.evaluation.prompt_results import Prompt, PromptResult, evaluate_prompt
from dflash_lightning.prompts.rows import PromptRow
from dflash_lightning.wording import counted

# Decoded first and not measured: what a first forward sets up is no part of a text's time.
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Questioning:
    """How every prompt is asked, and how its texts are decoded.

    Attributes:
        limits: max_new_tokens and stop_ids.
        sampling: of `make_scheme`.
    """

    tokenizer: PreTrainedTokenizerBase
    thinking: bool | None
    limits: dict[str, Any]
    sampling: dict[str, Any]
    device: torch.device

    def prompt(self, row: PromptRow, turn: int = 0) -> Prompt:
        return Prompt.of_row(row, self.tokenizer, self.thinking, turn)

    def scheme(self, prompt: Prompt) -> Scheme:
        """Random numbers that follow from prompt and seed alone, whoever decodes it, and when."""
        key = f"{self.sampling['seed']}/{prompt.turn}/{prompt.id}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:8]) >> 1
        return make_scheme(**{**self.sampling, "seed": seed}, device=self.device)

    def texts(self, target: PreTrainedModel, drafter: Drafter, row: PromptRow) -> list[PromptResult]:
        """A text a turn, each decoded plainly and with the drafter, whose reply the next turn follows."""
        results: list[PromptResult] = []
        while True:
            prompt = self.prompt(row, turn=len(results))
            plain = plain_decode(target, prompt.token_ids, scheme=self.scheme(prompt), **self.limits)
            results.append(evaluate_prompt(target, drafter, prompt, plain, scheme=self.scheme(prompt), **self.limits))
            if not row.follow_ups:
                return results
            row = row.answered(self.tokenizer.decode(results[-1].token_ids, skip_special_tokens=True))

    def plain_speed(self, target: PreTrainedModel, rows: Sequence[PromptRow]) -> float:
        """Tokens a second of plain decoding."""
        prompts = [self.prompt(row) for row in rows]
        plain_decode(target, prompts[0].token_ids, **self._warm_up_limits)
        runs = [plain_decode(target, p.token_ids, scheme=self.scheme(p), **self.limits) for p in prompts]
        return sum(len(run.token_ids) for run in runs) / sum(run.prefill_seconds + run.decode_seconds for run in runs)

    def warm_up(self, target: PreTrainedModel, drafter: Drafter, row: PromptRow) -> None:
        prompt_ids = self.prompt(row).token_ids
        plain_decode(target, prompt_ids, **self._warm_up_limits)
        speculative_decode(target, drafter, prompt_ids, **self._warm_up_limits)

    @property
    def _warm_up_limits(self) -> dict[str, Any]:
        return {**self.limits, "max_new_tokens": min(WARM_UP_TOKENS, self.limits["max_new_tokens"])}

    def check_room(self, rows: Sequence[PromptRow], positions: int) -> None:
        """Refuse prompts that may leave the target no position for an answer, and turns that its template rejects.

        Raises:
            ConfigError: naming the prompt and how many tokens it may have before its last answer; or max_new_tokens is
                below 1.
            DataError: a prompt is malformed.
        """
        if self.limits["max_new_tokens"] < 1:
            raise ConfigError(f"max_new_tokens is {self.limits['max_new_tokens']}; expected at least 1.")
        for row in rows:
            last = row
            while last.follow_ups:
                last = last.answered("-")
            replies = len(row.follow_ups) * self.limits["max_new_tokens"]
            needed = len(self.prompt(last).token_ids) + replies
            if needed >= positions:
                raise ConfigError(
                    f"{row.place}: {counted(1 + len(row.follow_ups), 'turn')} with max_new_tokens "
                    f"{self.limits['max_new_tokens']} may have {needed} tokens before the last answer, and the target "
                    f"has {positions} positions. Lower max_new_tokens, or leave this prompt out."
                )
