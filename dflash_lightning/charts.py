"""The few charts that tell how a training goes, the same in every run: on TensorBoard's page and in the report."""

from dataclasses import dataclass

SLOT = "<k>"


@dataclass(frozen=True)
class ChartPlan:
    """Curves in one chart.

    Attributes:
        names: of the scalars; `SLOT` stands for each slot.
        interval: lower and upper bound of the first.
        smoothed: drawn with a moving average in TensorBoard, which makes a curve of few points unrecognisable.
    """

    title: str
    names: tuple[str, ...]
    interval: tuple[str, str] | None = None
    smoothed: bool = False


CHARTS = {
    "acceptance and loss": (
        ChartPlan(
            "tau: decoded with its 95 % interval, teacher-forced",
            ("decode/tau", "decode/teacher_forced_tau"),
            interval=("decode/tau_low", "decode/tau_high"),
        ),
        ChartPlan("speed-up over plain decoding", ("decode/speedup",)),
        ChartPlan("accuracy by slot, validation", (f"val/accuracy_slot_{SLOT}",)),
        ChartPlan("loss: training, validation", ("train/loss", "val/loss")),
    ),
    "speed and steps": (
        ChartPlan("label tokens a second", ("perf/label_tokens_per_second",), smoothed=True),
        ChartPlan(
            "shares: data wait, padding, decoding",
            ("perf/data_wait_share", "perf/padding_share", "decode/time_share"),
            smoothed=True,
        ),
        ChartPlan("gradient norm before clipping", ("train/grad_norm",), smoothed=True),
        ChartPlan("learning rate", ("train/learning_rate", "train/learning_rate_muon"), smoothed=True),
        ChartPlan("memory at most, GiB", ("perf/device_memory_gib", "perf/host_memory_gib"), smoothed=True),
    ),
}
"""Category -> its charts, those that matter most first: two rows on a wide screen."""
