"""A browser looks at a running TensorBoard: the pages show what a run has logged."""

from collections.abc import Iterator

import pytest
from browser import CARDS, Browser, browser, missing, tensorboard
from monitoring_helpers import train_resumed, write_config

from callbacks.tensorboard_layout import layout

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def page(llama_folder, tmp_path_factory) -> Iterator[tuple[Browser, str]]:
    """A browser, and the address of the TensorBoard of a run that was resumed."""
    logs = train_resumed(write_config(llama_folder, tmp_path_factory.mktemp("run")))
    with tensorboard(logs) as address, browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened, address


def test_all_charts_are_there_with_their_curves_and_fit_on_one_screen(page):
    opened, address = page
    opened.open(f"{address}#custom_scalars")
    charts = {chart.title: chart for category in layout(4).category for chart in category.chart}
    opened.wait_for(f"{CARDS}.length == {len(charts)}")
    for title, chart in charts.items():
        card = f"{CARDS}.find(card => card.title == {title!r})"
        curves = len(chart.margin.series) or sum("muon" not in tag for tag in chart.multiline.tag)
        # What the legend lists has been fetched and drawn.
        opened.wait_for(f"{card} && Object.keys({card}._nameToDataSeries).length == {curves}")
    # The first row begins with tau; a category's charts of this kind are shown in reverse order.
    places = opened.ask(f"Object.fromEntries({CARDS}.map(card => [card.title, card.getBoundingClientRect()]))")
    first = min(places, key=lambda title: (places[title]["top"], places[title]["left"]))
    assert first.startswith("tau: decoded")
    assert max(place["top"] for place in places.values()) < 900


def test_text_shows_samples_settings_and_versions(page):
    opened, address = page
    opened.open(f"{address}#text")
    shown = opened.wait_for("find(document, 'tf-text-loader').map(card => card.tag + ' ').join('')")
    assert {"decode/samples", "run/settings", "run/versions"} <= {
        tag.removesuffix("/text_summary") for tag in shown.split()
    }
