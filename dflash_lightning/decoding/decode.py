"""Decoding: plain by the target alone, and lossless speculative decoding with a drafter.

One round drafts a block in one forward of the drafter, verifies it in one forward of the target, commits the leading
slots that verification accepts and the target's own next token (the bonus). This module knows nothing of training.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dflash_lightning.decoding.context import Context
from dflash_lightning.decoding.sampling import Greedy, Scheme
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import ConfigError
from dflash_lightning.features import FeatureTap, input_device
from dflash_lightning.wording import counted


@dataclass
class Generation:
    """New tokens of one prompt, and how they came about.

    Attributes:
        token_ids: new tokens, a stop token included if one was reached.
        committed: tokens committed by each verify round, bonus included; empty for plain decoding. The first token
            comes from the prefill and belongs to no round.
        prefill_seconds, decode_seconds: wall time up to and after the first token; of a batch, until this row ended.
        features: [L, K*H] context features of prompt and text where they were computed (all but the last token, or
            fewer); None where they weren't asked for.
        mask_tokens: how many of the new tokens are the drafter's mask token. The target said them itself; to the
            drafter they look like empty slots. Anything but 0 means that another mask token should be trained with.
    """

    token_ids: list[int]
    committed: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    features: Tensor | None = None
    mask_tokens: int = 0


def _sync(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def positions_of(target: PreTrainedModel) -> int:
    """How many tokens a text of this target may have, its prompt included."""
    return target.config.get_text_config().max_position_embeddings


def length_limits(positions: int, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[int]:
    """Most new tokens of each text: ``max_new_tokens``, or fewer where the target's ``positions`` end.

    Servers do the same: a prompt that leaves no position for an answer is refused, and a text ends with the last one.

    Raises:
        ConfigError: no room for a token, or an empty prompt.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; expected at least 1.")
    for number, prompt in enumerate(prompts, start=1):
        name = "the prompt" if len(prompts) == 1 else f"prompt {number} of {len(prompts)}"
        if not len(prompt):
            raise ConfigError(f"{name} has no tokens; decoding needs at least one.")
        if len(prompt) >= positions:
            raise ConfigError(
                f"{name} has {counted(len(prompt), 'token')}, and the target has {positions} positions "
                "(max_position_embeddings) for prompt and answer together. Shorten the prompt."
            )
    return [min(max_new_tokens, positions - len(prompt)) for prompt in prompts]


@torch.inference_mode()
def plain_decode(
    target: PreTrainedModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    scheme: Scheme = Greedy(),  # noqa: B008
) -> Generation:
    """Decoding by the target alone, one token a forward: the reference for text and speed.

    Args:
        prompt_ids: [P] tokens of one prompt.
        stop_ids: the text ends with the first of these.
        max_new_tokens: length limit; see `length_limits`.
        scheme: how tokens are chosen.
    """
    (limit,) = length_limits(positions_of(target), [prompt_ids], max_new_tokens)
    device = input_device(target)
    start = _sync(device)
    cache = DynamicCache(config=target.config)
    input_ids = torch.tensor([list(prompt_ids)], device=device)
    token = int(scheme.choose(target(input_ids, cache=cache, logits_to_keep=1).logits[0, -1]))
    prefilled = _sync(device)
    token_ids = [token]
    while token not in stop_ids and len(token_ids) < limit:
        logits = target(torch.tensor([[token]], device=device), cache=cache, logits_to_keep=1).logits
        token = int(scheme.choose(logits[0, -1]))
        token_ids.append(token)
    return Generation(token_ids, prefill_seconds=prefilled - start, decode_seconds=_sync(device) - prefilled)


def speculative_decode(
    target: PreTrainedModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    scheme: Scheme = Greedy(),  # noqa: B008
    keep_features: bool = False,
    on_commit: Callable[[list[int]], None] | None = None,
) -> Generation:
    """``speculative_decode_batch`` of one prompt; ``on_commit`` is called with the tokens alone."""
    (generation,) = speculative_decode_batch(
        target,
        drafter,
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        scheme=scheme,
        keep_features=keep_features,
        on_commit=on_commit and (lambda _prompt, tokens: on_commit(tokens)),
    )
    return generation


@torch.inference_mode()
def speculative_decode_batch(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    scheme: Scheme = Greedy(),  # noqa: B008
    keep_features: bool = False,
    on_commit: Callable[[int, list[int]], None] | None = None,
) -> list[Generation]:
    """Speculative decoding: the texts that plain decoding would give, in fewer forwards of the target.

    Each row advances by its own acceptance, and leaves the batch when it ends. Every block is whole, as in training;
    tokens that the length limit or a stop token cuts off are not counted as committed.

    Args:
        prompts: token ids; lengths may differ.
        max_new_tokens: length limit of each text; see `length_limits`. A block may stand beyond the last position:
            what it holds there isn't committed, and what is committed doesn't see it.
        stop_ids: a text ends with the first of these.
        scheme: how tokens are chosen and blocks verified.
        keep_features: return the context features of prompts and texts.
        on_commit: called with the number of a prompt and the tokens of each of its rounds as they are committed (first
            with the prefill's token).

    Returns:
        One generation a prompt, in order.

    Raises:
        ConfigError: an empty prompt, no room for a token, or a batch for a target that can't take one.
    """
    limits = length_limits(positions_of(target), prompts, max_new_tokens)
    device = drafter.device  # a target under a device map lies on several
    texts = [Generation([]) for _ in prompts]
    kept: list[list[Tensor]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # row of the context -> number of its prompt

    def commit(prompt: int, tokens: list[int]) -> bool:
        """Whether the text goes on."""
        texts[prompt].token_ids += tokens
        if on_commit:
            on_commit(prompt, tokens)
        return tokens[-1] not in stop_ids and len(texts[prompt].token_ids) < limits[prompt]

    with FeatureTap(target, drafter.config.target_layer_ids) as tap:
        start = _sync(device)
        context = Context(target, drafter, prompts)
        anchors = scheme.choose(context.prefill())
        goes_on = [commit(prompt, [token]) for prompt, token in zip(rows, anchors.tolist(), strict=True)]
        prefilled = _sync(device)
        features = tap.features().to(device)
        if keep_features:
            for prompt, tokens in enumerate(prompts):
                kept[prompt].append(features[prompt, -len(tokens) :])
        while True:
            live = [row for row, more in enumerate(goes_on) if more]
            if len(live) < len(rows):
                ended = _sync(device)
                for prompt in (prompt for prompt, more in zip(rows, goes_on, strict=True) if not more):
                    texts[prompt].prefill_seconds = prefilled - start
                    texts[prompt].decode_seconds = ended - prefilled
                if not live:
                    break
                context.select(live)
                anchors, features, rows = anchors[live], features[live], [rows[row] for row in live]

            context.extend_drafter(features)
            context.squeeze()
            proposals = scheme.propose(context.draft(anchors))
            block = torch.cat((anchors[:, None], proposals), dim=1)
            tokens, accepted = scheme.verify(proposals, context.verify(block))
            # Of a row that goes on all accepted tokens are committed, and its bonus is the next anchor.
            anchors = tokens.gather(1, accepted[:, None]).squeeze(1)
            goes_on, counts = [], []
            # A GPU is waited for here, once a round.
            for prompt, (count, *new) in zip(
                rows, torch.cat((accepted[:, None] + 1, tokens), dim=1).tolist(), strict=True
            ):
                new = new[: min(count, limits[prompt] - len(texts[prompt].token_ids))]
                stop = next((i for i, token in enumerate(new) if token in stop_ids), len(new))
                new = new[: stop + 1]
                texts[prompt].committed.append(len(new))
                counts.append(len(new))
                goes_on.append(commit(prompt, new))
            context.keep(counts, block.shape[1])
            features = tap.features()[:, : max(counts)].to(device)
            if keep_features:
                for row, prompt in enumerate(rows):
                    kept[prompt].append(features[row, : counts[row]])

    for text in texts:
        text.mask_tokens = text.token_ids.count(drafter.config.mask_token_id)
    if keep_features:
        for text, parts in zip(texts, kept, strict=True):
            text.features = torch.cat(parts)
    return texts
