"""What the benchmarks that decode have in common: a target, a drafter for it, and prompts."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dflash_lightning.devices import resolve_device
from dflash_lightning.drafter import Drafter
from dflash_lightning.evaluation.prompt_results import load_prompts
from dflash_lightning.export import load_drafter
from dflash_lightning.target import load_target, load_tokenizer, stop_token_ids


@dataclass(frozen=True)
class DecodingSetup:
    """Everything that decoding a text takes.

    Attributes:
        limits: max_new_tokens and stop_ids.
    """

    target: PreTrainedModel
    drafter: Drafter
    prompts: list[tuple[int, ...]]
    limits: dict[str, Any]
    device: torch.device
    dtype: torch.dtype


def setup_parser(description: str, *, limit: int | None, max_new_tokens: int, dtype: str) -> argparse.ArgumentParser:
    """A parser of the options that `load_setup` reads, with these defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", type=Path, required=True, help="exported folder or checkpoint")
    parser.add_argument("--prompts", required=True, help="JSONL file of prompts")
    parser.add_argument("--limit", type=int, default=limit, help="only so many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=dtype)
    parser.add_argument("--device", default="auto")
    return parser


def load_setup(options: argparse.Namespace) -> DecodingSetup:
    """Load what the options of `setup_parser` name."""
    device, dtype = resolve_device(options.device), getattr(torch, options.dtype)
    tokenizer = load_tokenizer(options.target)
    target = load_target(options.target, dtype=dtype, device=device)
    return DecodingSetup(
        target,
        load_drafter(options.drafter, dtype=dtype, device=device, target=options.target),
        [prompt.token_ids for prompt in load_prompts(options.prompts, tokenizer, limit=options.limit)],
        {"max_new_tokens": options.max_new_tokens, "stop_ids": stop_token_ids(target, tokenizer)},
        device,
        dtype,
    )
