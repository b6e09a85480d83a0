"""The report of an evaluation as tables for people, in 80 columns."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_lightning.wording import counted

BAR_WIDTH = 18


def show_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def print_report(report: dict[str, Any]) -> None:
    """The report on stdout: the figures, tau by family, and rounds and acceptance by length."""
    console = Console()
    console.print(_listed(_figures(report)))
    if report["by_family"]:
        console.print(_listed({f"tau, {family}": show_number(tau) for family, tau in report["by_family"].items()}))
    console.print()
    console.print(_by_length(report))


def _listed(figures: dict[str, str]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in figures.items():
        table.add_row(escape(name), escape(value))
    return table


def _figures(report: dict[str, Any]) -> dict[str, str]:
    lossless = report["lossless"]
    if lossless is None:
        equality = "not counted: sampled texts needn't be equal"
    else:
        equality = (
            f"{lossless['identical']} equal to plain greedy, {lossless['ties']} part at a tie, "
            f"{lossless['differing']} differ"
        )
    turns = f", {report['texts']} turns" if report["texts"] > report["prompts"] else ""
    return {
        "prompts": f"{report['prompt_set']}: {report['prompts']}{turns}",
        "acceptance length tau": f"{_with_interval(report, 'tau')}, all {counted(report['rounds'], 'round')}",
        "  mean of each text's": f"{_with_interval(report, 'tau_mean')}, as in the paper",
        "teacher-forced tau": show_number(report["teacher_forced_tau"]),
        "tokens a second": f"{report['tokens_per_second']:.1f}  (plain: {report['baseline_tokens_per_second']:.1f}, "
        f"speed-up {report['speedup']:.2f}x)",
        "first token after": f"{report['seconds_to_first_token']:.3f} s  "
        f"(plain: {report['plain_seconds_to_first_token']:.3f} s)",
        "texts": equality,
        "mask token": f"said by the target itself in answer to {counted(report['mask_token_prompts'], 'prompt')}",
    }


def _with_interval(report: dict[str, Any], key: str) -> str:
    value, low, high = (show_number(report[name]) for name in (key, f"{key}_low", f"{key}_high"))
    return f"{value}  (95 %: {low} to {high})"


def _by_length(report: dict[str, Any]) -> Table:
    """A row for each n: rounds that committed n tokens; and how often slot n was accepted."""
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "rounds", "share"):
        table.add_column(name, justify="right")
    table.add_column("", no_wrap=True, min_width=BAR_WIDTH)
    for name in ("slot", "accepted", "if slots before are"):
        table.add_column(name, justify="right")
    largest = max(1, *report["histogram"].values())
    slots = [*zip(report["acceptance_by_slot"], report["conditional_acceptance_by_slot"], strict=True), None]
    for (n, count), slot in zip(report["histogram"].items(), slots, strict=True):
        bar = "█" * round(BAR_WIDTH * count / largest)
        share = _percent(count / report["rounds"] if report["rounds"] else None)
        accepted = ("", "", "") if slot is None else (n, *map(_percent, slot))
        table.add_row(n, str(count), share, f"{bar:<{BAR_WIDTH}}", *accepted)
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
