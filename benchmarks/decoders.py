"""What the benchmarks that decode have in common: a target, a drafter for it, and prompts."""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from dflash_lightning.devices import resolve_device
from dflash_lightning.drafter import Drafter
from dflash_lightning.evaluation.prompt_results import load_prompts
from dflash_lightning.export import load_drafter
from dflash_lightning.target import load_target, load_tokenizer, stop_token_ids


@dataclass(frozen=True)
class Decoders:
    """Everything that a text takes.

    Attributes:
        limits: max_new_tokens and stop_ids.
    """

    target: PreTrainedModel
    drafter: Drafter
    prompts: list[tuple[int, ...]]
    limits: dict[str, Any]
    device: torch.device
    dtype: torch.dtype


def load(options: argparse.Namespace) -> Decoders:
    """Load what the options target, drafter, prompts, limit, max_new_tokens, dtype and device name."""
    device, dtype = resolve_device(options.device), getattr(torch, options.dtype)
    tokenizer = load_tokenizer(options.target)
    target = load_target(options.target, dtype=dtype, device=device)
    return Decoders(
        target,
        load_drafter(options.drafter, dtype=dtype, device=device, target=options.target),
        [prompt.token_ids for prompt in load_prompts(options.prompts, tokenizer, limit=options.limit)],
        {"max_new_tokens": options.max_new_tokens, "stop_ids": stop_token_ids(target, tokenizer)},
        device,
        dtype,
    )
