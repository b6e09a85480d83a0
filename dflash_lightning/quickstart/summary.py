"""What the quickstart measured, for programs (``summary.json``) and for people."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from dflash_lightning.cache import describe
from dflash_lightning.export.card import METADATA_FILE
from dflash_lightning.run_log import read_run_log


def training_figures(logs: Path) -> dict[str, Any]:
    """Steps, speed and loss of a training run, from its log: it survives a resume."""
    log = read_run_log(logs)
    losses = log.scalars["train/loss"]
    waits = [value for _, value in log.scalars["perf/data_wait_share"]]
    seconds = log.latest("perf/training_seconds")
    return {
        # Lightning numbers steps from 0.
        "steps": losses[-1][0] + 1,
        "label_tokens_per_second": log.latest("perf/label_tokens") / seconds,
        "seconds": seconds,
        "loss_first": losses[0][1],
        "loss_last": losses[-1][1],
        "data_wait_share": sum(waits) / len(waits),
    }


def make_summary(run: Path, seconds: dict[str, float]) -> dict[str, Any]:
    """Collect the figures of a finished run folder."""
    validation = json.loads((run / "evaluation.json").read_text())
    first = json.loads((run / "logs" / "decoding.jsonl").read_text().splitlines()[0])
    validation["tau_before"] = first["tau"]
    verified = json.loads((run / "export" / "zlab" / METADATA_FILE).read_text())["verification"]
    identical = verified["prompts"] - verified["ties"]
    equal = {"prompts": verified["prompts"], "identical": identical}
    validation["lossless_float32"] = {**equal, "ties": verified["ties"], "differing": 0}
    cache = describe(run / "cache")
    return {
        "target": str(run / "target"),
        "seconds": seconds,
        "cache": {key: cache[key] for key in ("tokens", "bytes", "bytes_per_token")},
        "train": training_figures(run / "logs"),
        "validation": validation,
        "transformers_check": {**equal, "tau": verified["transformers_tau"], "tau_ours": verified["tau"]},
    }


def print_summary(run: Path, summary: dict[str, Any]) -> None:
    """The summary as a reader wants it: what was measured, where things are, what to do next."""
    validation, train, check = summary["validation"], summary["train"], summary["transformers_check"]
    lossless, exact = validation["lossless"], validation["lossless_float32"]
    measured = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (
        (
            "acceptance length tau",
            f"{validation['tau']:.2f} (95 % {validation['tau_low']:.2f} to {validation['tau_high']:.2f}) on "
            f"{validation['prompts']} held-out prompts; {validation['tau_before']:.2f} before training",
        ),
        (
            "speed",
            f"{validation['tokens_per_second']:.1f} tokens/s against {validation['baseline_tokens_per_second']:.1f} "
            f"plain: {validation['speedup']:.2f}x",
        ),
        (
            f"lossless, {validation['settings']['dtype']}",
            f"{lossless['identical']} of {lossless['prompts']} texts equal to plain greedy, {lossless['ties']} part at "
            "a tie",
        ),
        (
            "lossless, as exported",
            f"{exact['identical']} of {exact['prompts']} texts equal to plain greedy, in float32",
        ),
        (
            "served by transformers",
            f"{check['identical']} of {check['prompts']} texts equal to ours, tau {check['tau']:.2f} (ours on these: "
            f"{check['tau_ours']:.2f})",
        ),
        (
            "training",
            f"{train['steps']} steps in {train['seconds']:.0f} s, {train['label_tokens_per_second']:,.0f} label "
            f"tokens/s, loss {train['loss_first']:.2f} -> {train['loss_last']:.2f}",
        ),
        (
            "cache",
            f"{summary['cache']['tokens']:,} tokens, {summary['cache']['bytes'] / 1e6:,.0f} MB, "
            f"{summary['cache']['bytes_per_token']:,.0f} bytes a token",
        ),
        ("seconds", ", ".join(f"{name} {value:.0f}" for name, value in summary["seconds"].items())),
    ):
        measured.add_row(name, value)
    console = Console()
    console.print(Panel(measured, title="measured", title_align="left"))
    places = Table(show_header=False, box=None, pad_edge=False)
    places.add_row("drafter for vLLM, SGLang, llama.cpp", str(run / "export" / "zlab"))
    places.add_row("drafter for transformers", str(run / "export" / "transformers"))
    places.add_row("best and last checkpoint", str(run / "checkpoints"))
    places.add_row("all figures", str(run / "summary.json"))
    places.add_row("to type commands", f"source {os.path.relpath(Path(sys.prefix) / 'bin' / 'activate')}")
    places.add_row("the training on one page", str(run / "logs" / "report.html"))
    places.add_row("curves", f"tensorboard --logdir {run / 'logs'}")
    places.add_row(
        "another prompt",
        f"dflash-lightning generate --target {run / 'target'} --drafter {run / 'export' / 'zlab'} "
        '--prompt "Write the multiplication table of 12 from 1 to 10."',
    )
    places.add_row("your own target and prompts", 'README.md, "Your own drafter"')
    console.print(Panel(places, title="where things are, and what next", title_align="left"))
