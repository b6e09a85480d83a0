"""What a drafter is worth: decoded acceptance length, speed and losslessness over a set of prompts.

Every figure comes from real decoding. ``tau`` is tokens committed by verify rounds / verify rounds, pooled over all
prompts; it counts the bonus token and not what a stop token or the length limit cut off (1 to block size).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_lightning.blocks import build_blocks, sample_anchors
from dflash_lightning.decoding import Generation, plain_decode, speculative_decode
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import DataError
from dflash_lightning.features import input_device
from dflash_lightning.losses import score_slots
from dflash_lightning.prompts import PromptRow, prompt_token_ids, read_prompts
from dflash_lightning.visibility import attention_mask

BOOTSTRAP_DRAWS = 2000
TEACHER_FORCED_ANCHORS = 64
# Where two texts part, the target's two logits may differ by so many units in the last place of its dtype.
TIE_UNITS = 4


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens. ``family`` groups prompts in the report."""

    id: str
    token_ids: tuple[int, ...]
    family: str | None = None


def load_prompts(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, *, limit: int | None = None, thinking: bool | None = None
) -> list[Prompt]:
    """Prompts of a JSONL file as the target sees them; a row's ``family`` is kept, an answer isn't needed.

    Raises:
        DataError: naming file and line.
    """
    return [
        Prompt(row.id, tuple(prompt_token_ids(row, tokenizer, thinking)), _family(row))
        for row in read_prompts(path, limit)
    ]


def _family(row: PromptRow) -> str | None:
    family = row.extra.get("family")
    if family is not None and not isinstance(family, str):
        raise DataError(f"{row.place}: `family` is {family!r}, expected text.")
    return family


@dataclass(frozen=True)
class PromptResult:
    """One prompt, decoded plainly and speculatively.

    Attributes:
        committed: tokens committed by each verify round.
        accepted_teacher_forced: accepted length of blocks laid at anchors of the same text, without decoding.
        identical: the two texts are equal, token for token.
        tie: they part where the target's logits of both tokens are equal up to rounding; False when identical.
        token_ids, seconds: new tokens and time of the speculative run, prefill included; ``plain_*`` of the plain run.
    """

    prompt: Prompt
    token_ids: tuple[int, ...]
    plain_token_ids: tuple[int, ...]
    committed: tuple[int, ...]
    accepted_teacher_forced: tuple[int, ...]
    identical: bool
    tie: bool
    seconds: float
    plain_seconds: float


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


@torch.inference_mode()
def teacher_forced_lengths(
    target: PreTrainedModel, drafter: Drafter, prompt: Prompt, text: Sequence[int], features: Tensor
) -> tuple[int, ...]:
    """Accepted lengths of blocks laid at random anchors of a decoded text, by the training forward.

    Args:
        text: new tokens of ``prompt``.
        features: [L, K*H] of prompt and text, at least up to the last anchor.
    """
    token_ids = [*prompt.token_ids, *text]
    supervised = np.array([0] * len(prompt.token_ids) + [1] * len(text))
    anchors = sample_anchors(supervised, TEACHER_FORCED_ANCHORS, seed=0, sample_id=prompt.id, epoch=None)
    if len(anchors) == 0:
        return ()
    device, length = features.device, len(features)
    rows = torch.tensor(token_ids, device=device)[None]
    blocks = build_blocks(
        input_ids=rows,
        loss_mask=torch.from_numpy(supervised).to(device)[None],
        document_ids=torch.zeros_like(rows),
        anchors=torch.from_numpy(anchors).to(device)[None],
        valid=torch.ones(1, len(anchors), dtype=torch.bool, device=device),
        block_size=drafter.config.block_size,
        mask_token_id=drafter.config.mask_token_id,
    )
    # The features of the last tokens are never computed, and never visible: no anchor comes after them.
    padded = torch.nn.functional.pad(features, (0, 0, 0, len(token_ids) - length))
    positions = torch.arange(len(token_ids), device=device)[None]
    hidden = drafter(
        target.get_input_embeddings()(blocks.input_ids.flatten(1)).to(device),
        blocks.positions.flatten(1),
        drafter.context_key_values(padded[None], positions),
        attention_mask(blocks.layout),
    )
    head = target.get_output_embeddings()
    with align_module_device(head, device):  # under a device map its weight may be kept elsewhere
        results = score_slots(hidden, head.weight, blocks)
    return tuple(results.accepted_lengths.tolist())


def evaluate_prompt(
    target: PreTrainedModel,
    drafter: Drafter,
    prompt: Prompt,
    plain: Generation,
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> PromptResult:
    """Decode one prompt with the drafter and compare with its ``plain`` greedy run."""
    run = speculative_decode(
        target, drafter, prompt.token_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids, keep_features=True
    )
    identical = run.token_ids == plain.token_ids
    return PromptResult(
        prompt=prompt,
        token_ids=tuple(run.token_ids),
        plain_token_ids=tuple(plain.token_ids),
        committed=tuple(run.committed),
        accepted_teacher_forced=teacher_forced_lengths(target, drafter, prompt, run.token_ids, run.features),
        identical=identical,
        tie=not identical and is_tie(target, prompt.token_ids, plain.token_ids, run.token_ids),
        seconds=run.prefill_seconds + run.decode_seconds,
        plain_seconds=plain.prefill_seconds + plain.decode_seconds,
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
    tokens = np.array([sum(rounds) for rounds in committed], dtype=float)
    rounds = np.array([len(rounds) for rounds in committed], dtype=float)
    if rounds.sum() == 0:
        return None, None
    draws = np.random.default_rng(seed).integers(len(tokens), size=(BOOTSTRAP_DRAWS, len(tokens)))
    drawn_rounds = rounds[draws].sum(axis=1)
    taus = tokens[draws].sum(axis=1)[drawn_rounds > 0] / drawn_rounds[drawn_rounds > 0]
    low, high = np.quantile(taus, [0.025, 0.975])
    return float(low), float(high)


def summarize(
    results: Sequence[PromptResult], block_size: int, baseline_tokens_per_second: float | None = None
) -> dict[str, Any]:
    """The report of an evaluation; see docs/metrics.md for each key.

    Args:
        baseline_tokens_per_second: the fastest plain decoding known for this target on this machine; default: the plain
            runs of the same prompts.
    """
    committed = [result.committed for result in results]
    lengths = Counter(n for rounds in committed for n in rounds)
    forced = [n for result in results for n in result.accepted_teacher_forced]
    low, high = tau_interval(committed)
    seconds = sum(result.seconds for result in results)
    plain_seconds = sum(result.plain_seconds for result in results)
    speed = sum(len(result.token_ids) for result in results) / seconds
    plain_speed = sum(len(result.plain_token_ids) for result in results) / plain_seconds
    baseline = max(plain_speed, baseline_tokens_per_second or 0.0)
    families = sorted({result.prompt.family for result in results if result.prompt.family is not None})
    return {
        "tau": pooled_tau(committed),
        "tau_low": low,
        "tau_high": high,
        "teacher_forced_tau": sum(forced) / len(forced) if forced else None,
        "rounds": sum(lengths.values()),
        "prompts": len(results),
        "by_family": {
            family: pooled_tau(r.committed for r in results if r.prompt.family == family) for family in families
        },
        "tokens_per_second": speed,
        "baseline_tokens_per_second": baseline,
        "speedup": speed / baseline,
        "histogram": {str(n): lengths.get(n, 0) for n in range(1, block_size + 1)},
        "lossless": {
            "prompts": len(results),
            "identical": sum(result.identical for result in results),
            "ties": sum(result.tie for result in results),
        },
    }
