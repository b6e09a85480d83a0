"""Real decoding of prompts, plainly and with a drafter, and how the two compare."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_lightning.decoding.decode import Generation, plain_decode, speculative_decode
from dflash_lightning.decoding.sampling import Greedy, Scheme
from dflash_lightning.decoding.ties import is_tie
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import DataError
from dflash_lightning.evaluation.teacher_forcing import teacher_forced_lengths
from dflash_lightning.prompts.rows import PromptRow, prompt_token_ids
from dflash_lightning.prompts.sets import read_evaluation_prompts


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
