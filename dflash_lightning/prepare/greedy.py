"""Batched greedy decoding by a target alone: how prompts get the answers that a drafter learns from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

KEEP_FRACTION = 0.75


@dataclass(frozen=True)
class GreedyAnswer:
    """The ids that a target generated after one prompt.

    Attributes:
        token_ids: Exactly as generated, the stop id included.
        finish_reason: "stop" after a stop id, "length" at the limit of new tokens.
    """

    token_ids: list[int]
    finish_reason: str


@torch.inference_mode()
def greedy_answers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, stop_ids: Sequence[int], max_new_tokens: int
) -> list[GreedyAnswer]:
    """Continue each prompt with the target's most likely token, all prompts in one left-padded batch.

    Plain argmax over the raw logits: whatever sampling or repetition penalty the target's generation defaults ask
    for plays no part. A row that has reached a stop id is dropped from the batch once enough of them have, so that a
    few long answers don't hold the whole batch.

    Args:
        model: The target, in evaluation mode.
        prompts: Token ids, at least one a prompt; lengths may differ.
        stop_ids: Ids that end an answer.
        max_new_tokens: Most tokens to generate after a prompt, the stop id included.

    Returns:
        One answer a prompt, in order.
    """
    device = model.device
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    attention = torch.zeros(len(prompts), width + max_new_tokens, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        attention[row, width - len(prompt) :] = 1
    tokens, attention = tokens.to(device), attention.to(device)
    positions = (attention[:, :width].cumsum(-1) - 1).clamp(min=0)
    stops = torch.tensor(list(stop_ids), device=device)
    cache = DynamicCache(config=model.config)

    generated: list[list[int]] = [[] for _ in prompts]
    stopped = [False] * len(prompts)
    rows = list(range(len(prompts)))  # row of the batch -> index of its prompt
    for step in range(max_new_tokens):
        # An index, not the number 1: the slice that 1 makes isn't contiguous, and the matmul would copy the LM head
        # once a row (7 GB and 25 s for 128 rows of SmolLM2).
        last = torch.tensor([tokens.shape[1] - 1], device=device)
        logits = model(
            input_ids=tokens,
            attention_mask=attention[:, : width + step],
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=last,
        ).logits[:, -1]
        tokens = logits.argmax(-1, keepdim=True)
        is_stop = torch.isin(tokens[:, 0], stops).tolist()
        for row, token in enumerate(tokens[:, 0].tolist()):
            index = rows[row]
            if not stopped[index]:
                generated[index].append(token)
                stopped[index] = is_stop[row]
        live = [row for row, index in enumerate(rows) if not stopped[index]]
        if not live:
            break
        positions = positions[:, -1:] + 1
        if len(live) <= KEEP_FRACTION * len(rows):
            keep = torch.tensor(live, device=device)
            cache.batch_select_indices(keep)
            tokens, positions, attention = tokens[keep], positions[keep], attention[keep]
            rows = [rows[row] for row in live]
    return [GreedyAnswer(ids, "stop" if ended else "length") for ids, ended in zip(generated, stopped, strict=True)]
