"""Real decoding of prompts, plainly and with a drafter, and what follows for the acceptance length.

``tau`` is tokens committed by verify rounds / verify rounds. It counts the bonus token and not what a stop token or the
length limit cut off (1 to block size).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_lightning.decoding.decode import Generation, plain_decode, speculative_decode
from dflash_lightning.decoding.sampling import Greedy, Scheme
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import DataError
from dflash_lightning.evaluation.teacher_forcing import teacher_forced_lengths
from dflash_lightning.features import input_device
from dflash_lightning.prompts.rows import PromptRow, prompt_token_ids
from dflash_lightning.prompts.sets import read_evaluation_prompts

BOOTSTRAP_DRAWS = 2000
# Where two texts part, the target's two logits may differ by so many units in the last place of its dtype.
TIE_UNITS = 4


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens. ``family`` groups prompts in the report; ``turn`` is 0 for the first of a conversation."""

    id: str
    token_ids: tuple[int, ...]
    family: str | None = None
    turn: int = 0

    @classmethod
    def of_row(
        cls, row: PromptRow, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None, turn: int = 0
    ) -> "Prompt":
        """The prompt as the target sees it; the row's ``family`` is kept, an answer isn't needed.

        Raises:
            DataError: naming file and line.
        """
        family = row.extra.get("family")
        if family is not None and not isinstance(family, str):
            raise DataError(f"{row.place}: `family` is {family!r}, expected text.")
        return cls(row.id, tuple(prompt_token_ids(row, tokenizer, thinking)), family, turn)


def load_prompts(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, *, limit: int | None = None, thinking: bool | None = None
) -> list[Prompt]:
    """Prompts of one turn each as the target sees them; ``path`` is a source of `read_evaluation_prompts`.

    Raises:
        DataError: naming file and line.
    """
    _, rows = read_evaluation_prompts(str(path), limit, several_turns=False)
    return [Prompt.of_row(row, tokenizer, thinking) for row in rows]


@dataclass(frozen=True)
class PromptResult:
    """One text: a prompt, decoded plainly and speculatively.

    Attributes:
        committed: tokens committed by each verify round.
        accepted_teacher_forced: accepted length of blocks laid at anchors of the same text, without decoding.
        identical: the two texts are equal, token for token; None of sampled texts, which needn't be.
        tie: they part where the target's logits of both tokens are equal up to rounding; False when identical.
        mask_tokens: how many of the text's tokens are the mask token, said by the target itself.
        token_ids, seconds, prefill_seconds: new tokens and time of the speculative run, prefill included, and the
            time to the first token; ``plain_*`` of the plain run.
    """

    prompt: Prompt
    token_ids: tuple[int, ...]
    plain_token_ids: tuple[int, ...]
    committed: tuple[int, ...]
    accepted_teacher_forced: tuple[int, ...]
    identical: bool | None
    tie: bool
    mask_tokens: int
    seconds: float
    plain_seconds: float
    prefill_seconds: float
    plain_prefill_seconds: float


def is_tie(target: PreTrainedModel, prompt_ids: Sequence[int], text: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two greedy texts part at a tie.

    A third forward, of the common prefix in one piece, gives the logits of both tokens where the texts part. They must
    be no further apart than a few roundings in the target's dtype.
    """
    parting = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), None)
    if parting is None:  # one text goes on where the other ended: no rounding explains that
        return False
    prefix = torch.tensor([[*prompt_ids, *text[:parting]]], device=input_device(target))
    with torch.inference_mode():
        logits = target(prefix, use_cache=False, logits_to_keep=1).logits[0, -1]
    first, second = logits[text[parting]].double(), logits[other[parting]].double()
    unit = torch.finfo(logits.dtype).eps * 2 ** torch.floor(torch.log2(torch.maximum(first.abs(), second.abs())))
    return bool((first - second).abs() <= TIE_UNITS * unit)


def evaluate_prompt(
    target: PreTrainedModel,
    drafter: Drafter,
    prompt: Prompt,
    plain: Generation,
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    scheme: Scheme = Greedy(),  # noqa: B008
) -> PromptResult:
    """Decode one prompt with the drafter and compare with its ``plain`` run.

    Args:
        plain: decoded with the same settings; with random numbers of its own, where ``scheme`` has some.
    """
    run = speculative_decode(
        target,
        drafter,
        prompt.token_ids,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        scheme=scheme,
        keep_features=True,
    )
    identical = run.token_ids == plain.token_ids if isinstance(scheme, Greedy) else None
    return PromptResult(
        prompt=prompt,
        token_ids=tuple(run.token_ids),
        plain_token_ids=tuple(plain.token_ids),
        committed=tuple(run.committed),
        accepted_teacher_forced=teacher_forced_lengths(
            target, drafter, prompt.token_ids, run.token_ids, run.features, sample_id=prompt.id
        ),
        identical=identical,
        tie=identical is False and is_tie(target, prompt.token_ids, plain.token_ids, run.token_ids),
        mask_tokens=run.mask_tokens,
        seconds=run.prefill_seconds + run.decode_seconds,
        plain_seconds=plain.prefill_seconds + plain.decode_seconds,
        prefill_seconds=run.prefill_seconds,
        plain_prefill_seconds=plain.prefill_seconds,
    )


def decode_plainly(
    target: PreTrainedModel, prompts: Iterable[Prompt], *, max_new_tokens: int, stop_ids: Sequence[int]
) -> list[Generation]:
    """Plain greedy runs, the reference for text and speed."""
    return [
        plain_decode(target, prompt.token_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids) for prompt in prompts
    ]


def pooled_tau(committed: Iterable[Sequence[int]]) -> float | None:
    """Tokens committed / rounds over several prompts; None without any round."""
    lengths = [n for rounds in committed for n in rounds]
    return sum(lengths) / len(lengths) if lengths else None


def tau_interval(committed: Sequence[Sequence[int]], seed: int = 0) -> tuple[float | None, float | None]:
    """95 % bootstrap interval of the pooled tau, prompts drawn with replacement."""
    return ratio_interval([sum(rounds) for rounds in committed], [len(rounds) for rounds in committed], seed)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0
) -> tuple[float | None, float | None]:
    """95 % bootstrap interval of sum / sum, pairs drawn with replacement; None where all denominators are 0."""
    above, below = np.array(numerators, dtype=float), np.array(denominators, dtype=float)
    if below.sum() == 0:
        return None, None
    draws = np.random.default_rng(seed).integers(len(above), size=(BOOTSTRAP_DRAWS, len(above)))
    drawn = below[draws].sum(axis=1)
    ratios = above[draws].sum(axis=1)[drawn > 0] / drawn[drawn > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
