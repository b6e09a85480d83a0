"""The report of an evaluation as a picture."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dflash_lightning.evaluation.report import acceptance_by_slot


def draw_report(report: dict[str, Any], title: str) -> Figure:
    """How far blocks are accepted, decoded and by the training forward over the same texts; and rounds by length."""
    figure = Figure(figsize=(9, 3.6), dpi=90, layout="constrained")
    figure.suptitle(title)
    slots, rounds = figure.subplots(1, 2)
    forced = acceptance_by_slot(report["teacher_forced_histogram"].values())["acceptance_by_slot"]
    for label, shares, style in (
        ("decoded", report["acceptance_by_slot"], "o-"),
        ("teacher-forced, same texts", forced, "s-"),
        ("decoded, where the slots before were", report["conditional_acceptance_by_slot"], "o:"),
    ):
        known = [float("nan") if share is None else share for share in shares]
        slots.plot(range(1, len(shares) + 1), known, style, label=label)
    slots.set(xlabel="slot", ylabel="accepted", ylim=(0, 1.02))
    slots.legend(frameon=False, fontsize="small")
    rounds.bar([int(n) for n in report["histogram"]], report["histogram"].values())
    rounds.set(xlabel="tokens committed by a round, bonus included", ylabel="rounds")
    if report["tau"] is not None:
        rounds.axvspan(report["tau_low"], report["tau_high"], color="tab:orange", alpha=0.3, label="95 %")
        rounds.axvline(report["tau"], color="tab:orange", label=f"tau {report['tau']:.2f}")
        rounds.legend(frameon=False)
    for axes in (slots, rounds):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
