"""Decoding: plain greedy by the target, and lossless speculative decoding with a drafter.

One round drafts a block in one forward of the drafter, verifies it in one forward of the target, commits the leading
slots that equal the target's own choice and the target's next token (the bonus). This module knows nothing of training.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dflash_lightning.drafter import Drafter, KeyValue
from dflash_lightning.errors import ConfigError
from dflash_lightning.features import FeatureTap, input_device


@dataclass
class Generation:
    """New tokens of one prompt, and how they came about.

    Attributes:
        token_ids: new tokens, a stop token included if one was reached.
        committed: tokens committed by each verify round, bonus included; empty for plain decoding. The first token
            comes from the prefill and belongs to no round.
        prefill_seconds, decode_seconds: wall time up to and after the first token.
        features: [L, K*H] context features of prompt and text where they were computed (all but the last token, or
            fewer); None for plain decoding.
    """

    token_ids: list[int]
    committed: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    features: Tensor | None = None


class DrafterCache:
    """Keys and values of the context in each drafter layer, kept from round to round."""

    def __init__(self, drafter: Drafter):
        self._drafter = drafter
        self._layers: list[KeyValue] | None = None
        self.length = 0

    def extend(self, features: Tensor) -> list[KeyValue]:
        """Append the ``features`` [1, n, K*H] of the next n positions; returns the whole context."""
        count = features.shape[1]
        positions = torch.arange(self.length, self.length + count, device=features.device)[None]
        new = self._drafter.context_key_values(features, positions)
        if self._layers is None:
            self._layers = new
        else:
            self._layers = [
                (torch.cat((key, new_key), dim=2), torch.cat((value, new_value), dim=2))
                for (key, value), (new_key, new_value) in zip(self._layers, new, strict=True)
            ]
        self.length += count
        return self._layers


def _sync(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _check(prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    if len(prompt_ids) == 0:
        raise ConfigError("the prompt has no tokens; decoding needs at least one.")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; expected at least 1.")


@torch.inference_mode()
def greedy_decode(
    target: PreTrainedModel, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Sequence[int]
) -> Generation:
    """Plain greedy decoding, one token a forward: the reference for text and speed.

    Args:
        prompt_ids: [P] tokens of one prompt.
        stop_ids: the text ends with the first of these.
    """
    _check(prompt_ids, max_new_tokens)
    device = input_device(target)
    start = _sync(device)
    cache = DynamicCache(config=target.config)
    input_ids = torch.tensor([list(prompt_ids)], device=device)
    token = int(target(input_ids, cache=cache, logits_to_keep=1).logits[0, -1].argmax())
    prefilled = _sync(device)
    token_ids = [token]
    while token not in stop_ids and len(token_ids) < max_new_tokens:
        logits = target(torch.tensor([[token]], device=device), cache=cache, logits_to_keep=1).logits
        token = int(logits[0, -1].argmax())
        token_ids.append(token)
    return Generation(token_ids, prefill_seconds=prefilled - start, decode_seconds=_sync(device) - prefilled)


def draft(target: PreTrainedModel, drafter: Drafter, context: list[KeyValue], anchor: int) -> Tensor:
    """Logits [B - 1, V] for the tokens after ``anchor``, which stands at the position that follows the context."""
    block_size, device = drafter.config.block_size, context[0][0].device
    position = context[0][0].shape[2]
    block = torch.full((1, block_size), drafter.config.mask_token_id, device=device)
    block[0, 0] = anchor
    positions = torch.arange(position, position + block_size, device=device)[None]
    hidden = drafter(target.get_input_embeddings()(block).to(device), positions, context)
    return target.get_output_embeddings()(hidden[0, 1:]).to(device)


@torch.inference_mode()
def speculative_decode(
    target: PreTrainedModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    keep_features: bool = False,
    on_commit: Callable[[list[int]], None] | None = None,
) -> Generation:
    """Greedy speculative decoding of one prompt: the same text as ``greedy_decode``, in fewer target forwards.

    Every block is whole, as in training; tokens that the length limit or a stop token cuts off are not counted as
    committed.

    Args:
        keep_features: return the context features of prompt and text.
        on_commit: called with the tokens of each round as they are committed (first with the prefill's token).
    """
    _check(prompt_ids, max_new_tokens)
    device = drafter.device  # a target under a device map lies on several
    target_cache = DynamicCache(config=target.config)
    target_cache.activate_past_recording()
    drafter_cache = DrafterCache(drafter)
    kept: list[Tensor] = []

    with FeatureTap(target, drafter.config.target_layer_ids) as tap:
        start = _sync(device)
        input_ids = torch.tensor([list(prompt_ids)], device=device)
        anchor = int(target(input_ids, cache=target_cache, logits_to_keep=1).logits[0, -1].argmax())
        features = tap.features().to(device)
        prefilled = _sync(device)
        token_ids, committed = [anchor], []
        if on_commit:
            on_commit([anchor])

        while token_ids[-1] not in stop_ids and len(token_ids) < max_new_tokens:
            kept.append(features[0])
            context = drafter_cache.extend(features)
            proposals = draft(target, drafter, context, token_ids[-1]).argmax(dim=-1)
            block = torch.cat((proposals.new_tensor([token_ids[-1]]), proposals))
            choices = target(block[None], cache=target_cache).logits[0].argmax(dim=-1)
            accepted = int((proposals == choices[:-1]).cumprod(dim=0).sum())
            new = choices[: accepted + 1].tolist()
            new = new[: max_new_tokens - len(token_ids)]
            stops = [i for i, token in enumerate(new) if token in stop_ids]
            new = new[: stops[0] + 1] if stops else new
            features = tap.features()[:, : len(new)].to(device)
            target_cache.crop(len(new) - len(block))
            token_ids += new
            committed.append(len(new))
            if on_commit:
                on_commit(new)

    if keep_features:
        kept.append(features[0])
    return Generation(
        token_ids,
        committed,
        prefill_seconds=prefilled - start,
        decode_seconds=_sync(device) - prefilled,
        features=torch.cat(kept) if keep_features else None,
    )
