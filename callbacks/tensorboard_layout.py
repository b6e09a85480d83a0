"""The charts of a run on TensorBoard's page "Custom Scalars"."""

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MarginChartContent,
    MultilineChartContent,
)
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG, PLUGIN_NAME

from dflash_lightning.charts import CHARTS, SLOT, ChartPlan


def layout(block_size: int) -> Layout:
    """`CHARTS` for TensorBoard."""
    return Layout(
        category=[
            Category(
                title=title,
                # TensorBoard shows those that aren't smoothed in reverse order.
                chart=[
                    *(_chart(plan, block_size) for plan in plans if plan.smoothed),
                    *(_chart(plan, block_size) for plan in reversed(plans) if not plan.smoothed),
                ],
            )
            for title, plans in CHARTS.items()
        ]
    )


def _chart(plan: ChartPlan, block_size: int) -> Chart:
    names = [name.replace(SLOT, str(k)) for name in plan.names for k in range(1, block_size if SLOT in name else 2)]
    if plan.smoothed:
        # Patterns, matched from the start of a name.
        return Chart(title=plan.title, multiline=MultilineChartContent(tag=[f"{name}$" for name in names]))
    # The kind of chart that has margins is drawn as it is; a curve without an interval is its own.
    bounds = {names[0]: plan.interval} if plan.interval else {}
    series = [MarginChartContent.Series(value=name) for name in names]
    for curve in series:
        curve.lower, curve.upper = bounds.get(curve.value, (curve.value, curve.value))
    return Chart(title=plan.title, margin=MarginChartContent(series=series))


def layout_summary(block_size: int) -> Summary:
    """The layout as TensorBoard reads it. Its own function for that wants TensorFlow, and torch's has no series."""
    content = TensorProto(
        dtype="DT_STRING",
        string_val=[layout(block_size).SerializeToString()],
        tensor_shape=TensorShapeProto(),
    )
    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME))
    return Summary(value=[Summary.Value(tag=CONFIG_SUMMARY_TAG, tensor=content, metadata=kind)])
