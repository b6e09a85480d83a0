"""The export gate: transformers itself generates with the exported drafter, and must give the same texts and tau."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from dflash_lightning.errors import ExportError
from dflash_lightning.export import read_drafter
from dflash_lightning.export.loading import check_shape
from dflash_lightning.export.muse_assistant import TRANSFORMERS
from dflash_lightning.target.files import quiet_transformers


@dataclass(frozen=True)
class TransformersCheck:
    """What transformers made of an exported drafter.

    Attributes:
        tau: tokens committed by verify rounds / verify rounds, over all prompts; None without any round.
        identical: texts equal to ours, token for token.
        prompts: texts compared.
    """

    tau: float | None
    identical: int
    prompts: int


class CountRounds(BaseStreamer):
    """Keeps what generation hands out: the prompt, the prefill's token, then the tokens of each verify round."""

    def __init__(self):
        self._pieces: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self._pieces.append(value.flatten().tolist())

    def end(self) -> None:
        pass

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return [token for piece in self._pieces[1:] for token in piece]

    @property
    def committed(self) -> list[int]:
        """Tokens committed by each verify round."""
        return [len(piece) for piece in self._pieces[2:]]


@contextmanager
def _plain_defaults(target: PreTrainedModel) -> Iterator[None]:
    """Put the target's generation defaults aside: they fill in whatever a call leaves out, penalties included."""
    defaults, target.generation_config = target.generation_config, GenerationConfig()
    try:
        yield
    finally:
        target.generation_config = defaults


def generate_with_transformers(
    target: PreTrainedModel,
    assistant: PreTrainedModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> tuple[list[int], list[int]]:
    """New tokens of one prompt and tokens committed by each verify round, by transformers' own assisted decoding.

    Args:
        assistant: a drafter of the exported `transformers` format.
        prompt_ids: [P] tokens of one prompt.
        stop_ids: the text ends with the first of these.
    """
    rounds = CountRounds()
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,  # never used: there is one row
        speculation_type="dflash",
    )
    ids = torch.tensor([list(prompt_ids)], device=target.device)
    with _plain_defaults(target), torch.inference_mode():
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            assistant_model=assistant,
            streamer=rounds,
        )
    return rounds.token_ids, rounds.committed


def check_with_transformers(
    target: PreTrainedModel,
    folder: str | Path,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> TransformersCheck:
    """Generate greedily with transformers and the exported drafter, and compare with texts of our own decoder.

    Both decoders draft whole blocks to the very end and count a round in the same way, so in float32 texts and tau are
    equal. In bf16 transformers rotates in bf16 and we in float32: the proposals, hence tau, may differ slightly.

    Args:
        target: in the dtype that our texts were decoded in; the drafter is loaded in the same.
        folder: exported folder of the format `transformers`.
        prompts: tokens of each prompt.
        texts: new tokens that our decoder gave for each prompt, with the same limits.
        max_new_tokens: length limit of each text.
        stop_ids: a text ends with the first of these.

    Raises:
        ExportError: there is no such drafter, or it was made for another target.
    """
    source = read_drafter(folder)
    if source.form is not TRANSFORMERS:
        found = source.form.name if source.form else "a training checkpoint"
        raise ExportError(f"{folder} is {found}; transformers generates with a folder of the format transformers only.")
    check_shape(source.config, target.config.get_text_config())
    with quiet_transformers():
        assistant = AutoModel.from_pretrained(folder, dtype=target.dtype)
    assistant = assistant.eval().to(target.device)
    identical, committed = 0, []
    for prompt, text in zip(prompts, texts, strict=True):
        new, rounds = generate_with_transformers(
            target, assistant, prompt, max_new_tokens=max_new_tokens, stop_ids=stop_ids
        )
        identical += new == list(text)
        committed += rounds
    return TransformersCheck(
        tau=sum(committed) / len(committed) if committed else None, identical=identical, prompts=len(prompts)
    )
