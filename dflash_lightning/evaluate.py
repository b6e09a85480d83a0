"""The command ``evaluate``: a report over many prompts, from real decoding."""

import json as json_format
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel

from dflash_lightning.decoding import plain_decode
from dflash_lightning.devices import resolve_device
from dflash_lightning.durable import write_whole
from dflash_lightning.evaluation import Prompt, PromptResult, evaluate_prompt, load_prompts, summarize
from dflash_lightning.export import load_drafter
from dflash_lightning.progress import track
from dflash_lightning.target import (
    load_generation_config,
    load_target,
    load_tokenizer,
    stop_token_ids,
)

Dtype = Literal["bfloat16", "float32"]
# Prompts on which the other dtype's plain speed is tried.
PROBE_PROMPTS = 2


def decode_prompts(
    target: PreTrainedModel, drafter: torch.nn.Module, prompts: list[Prompt], limits: dict[str, Any]
) -> list[PromptResult]:
    """Decode each prompt plainly and with the drafter, with progress on stderr."""
    results = []
    with track(len(prompts), "evaluate", "tokens") as progress:
        for prompt in prompts:
            plain = plain_decode(target, prompt.token_ids, **limits)
            results.append(evaluate_prompt(target, drafter, prompt, plain, **limits))
            progress.advance(1, done=len(plain.token_ids) + len(results[-1].token_ids))
    return results


def plain_speed(target: PreTrainedModel, prompts: list[Prompt], limits: dict[str, Any]) -> float:
    """Tokens a second of plain greedy decoding."""
    runs = [plain_decode(target, prompt.token_ids, **limits) for prompt in prompts]
    return sum(len(run.token_ids) for run in runs) / sum(run.prefill_seconds + run.decode_seconds for run in runs)


def evaluate(
    target: str,
    drafter: Path,
    prompts: str,
    limit: int | None = None,
    max_new_tokens: int = 512,
    dtype: Dtype = "bfloat16",
    device: str = "auto",
    thinking: bool | None = None,
    json: Path | None = None,
) -> dict[str, Any]:
    """Decode prompts for real, with and without the drafter, and report acceptance length, speed and losslessness.

    The speed-up is quoted against the fastest plain decoding of the same target here, whichever dtype that is.

    Args:
        target: folder, hub name or .gguf file of the target.
        drafter: exported folder, or a training checkpoint.
        prompts: JSONL file of prompts, or a data set; as in prepare.
        limit: take only its first prompts.
        max_new_tokens: length limit of each text.
        dtype: what target and drafter compute in. Texts are provably equal in float32 only.
        device: where both run; auto takes a GPU if there is one.
        thinking: the chat template's thinking switch; as in prepare.
        json: write the report to this file.
    """
    if json is not None:  # found out now, not after hours of decoding
        json.parent.mkdir(parents=True, exist_ok=True)
        json.open("a").close()
    where = resolve_device(device)
    tokenizer = load_tokenizer(target)
    chosen = load_prompts(prompts, tokenizer, limit=limit, thinking=thinking)
    limits = {
        "max_new_tokens": max_new_tokens,
        "stop_ids": stop_token_ids(load_generation_config(target), tokenizer),
    }
    draft_model = load_drafter(drafter, dtype=getattr(torch, dtype), device=where, target=target)
    # The other dtype first and alone, so that two targets never share the memory.
    other = torch.float32 if dtype == "bfloat16" else torch.bfloat16
    probe = plain_speed(load_target(target, dtype=other, device=where), chosen[:PROBE_PROMPTS], limits)
    model = load_target(target, dtype=getattr(torch, dtype), device=where)

    results = decode_prompts(model, draft_model, chosen, limits)
    report = summarize(results, draft_model.config.block_size, baseline_tokens_per_second=probe)
    # Known where the drafter was trained, not here; the key keeps reports of both places alike.
    report["tau_before"] = None
    if json is not None:
        write_whole(json, json_format.dumps(report, indent=2) + "\n")
    print_report(report)
    return report


def print_report(report: dict[str, Any]) -> None:
    """The report as a table on stdout."""
    lossless = report["lossless"]
    differing = lossless["prompts"] - lossless["identical"] - lossless["ties"]
    rows = {
        "acceptance length tau": f"{show_number(report['tau'])}  (95 %: {show_number(report['tau_low'])} to "
        f"{show_number(report['tau_high'])}; {report['rounds']} rounds, {report['prompts']} prompts)",
        "teacher-forced tau": show_number(report["teacher_forced_tau"]),
        "tokens a second": f"{report['tokens_per_second']:.1f}  (plain: {report['baseline_tokens_per_second']:.1f}, "
        f"speed-up {report['speedup']:.2f}x)",
        "texts": f"{lossless['identical']} equal to plain greedy, {lossless['ties']} part at a tie, {differing} differ",
        "accepted lengths": "  ".join(f"{n}: {count}" for n, count in report["histogram"].items()),
    }
    rows |= {f"tau, {family}": show_number(tau) for family, tau in report["by_family"].items()}
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(escape(name), escape(value))
    Console().print(table)


def show_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
