"""The report of an evaluation as a picture."""

from typing import Any

from matplotlib.figure import Figure


def draw_report(report: dict[str, Any]) -> Figure:
    """Rounds by tokens committed, and acceptance by slot."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    rounds, slots = figure.subplots(1, 2)
    lengths = [int(n) for n in report["histogram"]]
    rounds.bar(lengths, report["histogram"].values(), color="tab:blue")
    rounds.set(xlabel="tokens committed by a round", ylabel="rounds", xticks=lengths)
    if report["tau"] is not None:
        rounds.axvspan(report["tau_low"], report["tau_high"], color="tab:orange", alpha=0.3, label="95 %")
        rounds.axvline(report["tau"], color="tab:orange", label=f"tau {report['tau']:.2f}")
        rounds.legend()
    numbers = lengths[:-1]
    for key, label in (
        ("acceptance_by_slot", "of all rounds"),
        ("conditional_acceptance_by_slot", "of those that accepted the slots before"),
    ):
        shares = [float("nan") if share is None else share for share in report[key]]
        slots.plot(numbers, shares, marker="o", label=label)
    slots.set(xlabel="slot of the block", ylabel="accepted", xticks=numbers, ylim=(0, 1.02))
    slots.legend()
    figure.suptitle(f"{report['prompt_set']}: {report['prompts']} prompts, speed-up {report['speedup']:.2f}x")
    return figure
