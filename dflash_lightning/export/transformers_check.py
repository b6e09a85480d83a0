"""transformers' own assisted decoding with an exported drafter: what our decoder is checked against."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from dflash_lightning.errors import ExportError
from dflash_lightning.target.files import quiet_transformers


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


def load_assistant(folder: str | Path, target: PreTrainedModel) -> PreTrainedModel:
    """The drafter of a folder of format `transformers`, in the dtype of the target and where that is.

    Raises:
        ExportError: transformers misses weights in the folder, or finds others.
    """
    with quiet_transformers():
        assistant, report = AutoModel.from_pretrained(folder, dtype=target.dtype, output_loading_info=True)
    if problems := {kind: names for kind, names in report.items() if names}:
        raise ExportError(f"transformers doesn't read {folder} as it was written: {problems}.")
    return assistant.eval().to(target.device)


def generate_with_transformers(
    target: PreTrainedModel,
    assistant: PreTrainedModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> tuple[list[int], list[int]]:
    """New tokens of one prompt and tokens committed by each verify round, by transformers' own assisted decoding.

    It drafts whole blocks to the very end and counts a round as we do, so in float32 texts and committed tokens are
    ours. In bf16 it rotates in bf16 and we in float32: the proposals may differ slightly.

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
