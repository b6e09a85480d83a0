"""The command ``report``: one page about a training, that can be read, kept and sent without anything else."""

import base64
import csv
import io
import math
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from tensorboard.plugin_util import markdown_to_safe_html

from dflash_lightning.charts import CHARTS, SLOT, ChartPlan
from dflash_lightning.durable import write_whole
from dflash_lightning.errors import ConfigError
from dflash_lightning.progress import say
from dflash_lightning.run_log import RunLog, read_run_log
from dflash_lightning.writable import check_writable

REPORT_FILE = "report.html"
WARNINGS = "warnings/"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd }
table { border-collapse: collapse } td, th { padding: .25rem .8rem; border-bottom: 1px solid #eee; text-align: left }
td, th { vertical-align: top } pre { background: #f6f6f6; padding: 1rem; overflow: auto }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(360px, 1fr)); gap: 1rem }
.charts figure { margin: 0 } figcaption { font-size: .9rem; color: #555 } svg, img { max-width: 100%; height: auto }
.warning { background: #fff4d6; border-left: 4px solid #e0a800; padding: .2rem 1rem; margin: .6rem 0 }
"""


def report(run: Path, output: Path | None = None) -> Path:
    """Make a page about a training from its logs: figures, curves, acceptance by slot, texts, settings.

    The page needs no network and no other file. Beside it goes a table of all scalars, of the same name with .csv.
    `fit` makes both when it ends, in its log folder.

    Args:
        run: folder of the run, or of its logs.
        output: where the page goes. Default: report.html in the log folder.

    Returns:
        The page.

    Raises:
        DataError: the folder doesn't hold the logs of one run.
        ConfigError: the page's name doesn't end in .html, or it can't be written.
    """
    if output is not None and output.suffix != ".html":
        raise ConfigError(f"output is {output}; expected a name that ends in .html. Beside it goes the table, as .csv.")
    if output is not None:
        check_writable("output", output, folder=False)
    log = read_run_log(run)
    page = output or log.folder / REPORT_FILE
    page.parent.mkdir(parents=True, exist_ok=True)
    write_whole(page, report_page(log))
    write_whole(page.with_suffix(".csv"), scalars_csv(log))
    say(str(page))
    return page


def scalars_csv(log: RunLog) -> str:
    """All scalars as rows of step, name and value."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("step", "name", "value"))
    rows.writerows((step, name, value) for name in sorted(log.scalars) for step, value in log.scalars[name])
    return text.getvalue()


def report_page(log: RunLog) -> str:
    """The page as HTML."""
    warnings = [text for name, text in sorted(log.texts.items()) if name.startswith(WARNINGS)]
    parts = [
        *(f'<div class="warning">{markdown_to_safe_html(text)}</div>' for text in warnings),
        _table(_summary(log)),
        *(f"<h2>{escape(title)}</h2>{_charts(log, charts)}" for title, charts in CHARTS.items()),
        *(f"<h2>latest decoding</h2>{_picture(png)}" for png in [log.images.get("decode/acceptance_by_slot")] if png),
        *(
            f"<h2>{title}</h2>{markdown_to_safe_html(log.texts[name])}"
            for name, title in (
                ("decode/samples", "texts"),
                ("run/versions", "versions"),
                ("run/settings", "settings"),
            )
            if name in log.texts
        ),
    ]
    title = escape(f"Training in {log.folder}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"</head>\n<body><h1>{title}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _summary(log: RunLog) -> dict[str, str]:
    """The figures that one asks for first."""
    rows = {}
    decoded = [(step, tau) for step, tau in log.scalars.get("decode/tau", []) if math.isfinite(tau)]
    if decoded:
        low, high = (dict(log.scalars.get(f"decode/tau_{end}", [])) for end in ("low", "high"))
        for title, (step, tau) in {"best": max(decoded, key=lambda point: point[1]), "latest": decoded[-1]}.items():
            interval = f", 95 % {low[step]:.2f} to {high[step]:.2f}" if step in low and step in high else ""
            rows[f"acceptance length tau, {title}"] = f"{tau:.2f} (step {step + 1 if step else 0}{interval})"
        rows["before training"] = f"{decoded[0][1]:.2f}" if decoded[0][0] == 0 else "not decoded"
    for title, name, form in (
        ("speed-up over plain decoding, latest", "decode/speedup", "{:.2f}x"),
        ("texts that differ from plain decoding", "decode/differences", "{:.0f}"),
        ("validation loss, latest", "val/loss", "{:.4g}"),
        ("label tokens a second, latest", "perf/label_tokens_per_second", "{:,.0f}"),
        ("training, validations left out", "perf/training_seconds", "{:,.0f} s"),
        ("steps left out as not finite", "train/skipped_steps", "{:.0f}"),
    ):
        if (value := log.latest(name)) is not None:
            rows[title] = form.format(value)
    return rows


def _table(rows: dict[str, str]) -> str:
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{cells}</table>"


def _picture(png: bytes) -> str:
    return f'<img alt="acceptance by slot" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _charts(log: RunLog, charts: Iterable[ChartPlan]) -> str:
    figures = []
    for chart in charts:
        patterns = [re.escape(name).replace(re.escape(SLOT), r"\d+") for name in chart.names]
        names = [name for pattern in patterns for name in sorted(log.scalars) if re.fullmatch(pattern, name)]
        curves = {name: log.scalars[name] for name in names}
        band = tuple(log.scalars.get(name, []) for name in chart.interval) if chart.interval else None
        if any(curves.values()):
            figures.append(f"<figure>{_chart(curves, band)}<figcaption>{escape(chart.title)}</figcaption></figure>")
    return f'<div class="charts">{"".join(figures)}</div>' if figures else "<p>Nothing was logged.</p>"


def _chart(curves: dict[str, list], band: tuple[list, list] | None) -> str:
    """Curves over steps as SVG."""
    figure = Figure(figsize=(4.6, 2.7), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 20 else None)
    if band and all(band):
        (steps, low), (_, high) = (zip(*points, strict=True) for points in band)
        axes.fill_between(steps, low, high, alpha=0.2)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        place = "outside right center" if len(curves) > 3 else "outside upper left"
        figure.legend(frameon=False, fontsize="x-small", loc=place, ncols=1 if len(curves) > 3 else len(curves))
    drawing = io.StringIO()
    # Text stays text; the same page comes out each time.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}):
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    return drawing.getvalue().partition("<svg")[1] + drawing.getvalue().partition("<svg")[2]
