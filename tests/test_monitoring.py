"""What a run leaves in TensorBoard, read back from its event files, a resume included."""

import html
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from monitoring_helpers import events_of, train_resumed, write_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from callbacks.decoding_samples import plain_markdown, sample_page
from callbacks.run_record import git_state, typed_command
from dflash_lightning.evaluation.prompt_results import Prompt, PromptResult
from dflash_lightning.target import load_tokenizer


def texts_of(events: EventAccumulator, name: str) -> dict[int, str]:
    """Texts by step."""
    return {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(f"{name}/text_summary")}


@pytest.fixture(scope="module")
def config(llama_folder, tmp_path_factory) -> Path:
    return write_config(llama_folder, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def logs(config) -> Path:
    return train_resumed(config)


@pytest.mark.slow
def test_every_name_is_documented_and_every_documented_name_is_logged(logs):
    page = (Path(__file__).parent.parent / "docs" / "monitoring.md").read_text()
    tables = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    documented = set(re.findall(r"`([a-z]+/[^`]+)`", tables))
    tags = events_of(logs).Tags()
    texts = {name.removesuffix("/text_summary") for name in tags["tensors"] if name.endswith("/text_summary")}
    texts -= {name for name in texts if name.startswith("warnings/")}
    logged = {re.sub(r"slot_\d+$", "slot_<k>", name) for name in tags["scalars"]} - {"epoch"}
    logged |= texts | set(tags["images"]) | set(tags["histograms"])
    assert logged == documented - {"train/learning_rate_muon", "warnings/<name>"}


@pytest.mark.slow
def test_a_resume_takes_back_what_was_logged_after_its_checkpoint(logs):
    events = events_of(logs)
    for name, expected in (
        ("train/loss", [1, 3, 5, 7, 9, 11]),
        ("train/learning_rate", [1, 3, 5, 7, 9, 11]),
        ("perf/label_tokens", [1, 3, 5, 7, 9, 11]),
        ("val/loss", [2, 5, 8, 11]),
        ("decode/tau", [0, 2, 5, 8, 11]),
    ):
        assert [event.step for event in events.Scalars(name)] == expected, name
    for name in ("Histograms", "Images"):
        assert [[e.step for e in getattr(events, name)(tag)] for tag in events.Tags()[name.lower()]] == [
            [0, 2, 5, 8, 11]
        ]
    assert list(texts_of(events, "decode/samples")) == [0, 2, 5, 8, 11]
    assert list(texts_of(events, "run/settings")) == [0, 6]


@pytest.mark.slow
def test_the_layout_shows_names_that_are_logged(logs):
    events = events_of(logs)
    names = set(events.Tags()["scalars"])
    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    charts = {chart.title: chart for category in layout.category for chart in category.chart}
    for title, chart in charts.items():
        series = [name for s in chart.margin.series for name in (s.value, s.lower, s.upper)]
        assert set(series) <= names, title
        patterns = [pattern for pattern in chart.multiline.tag if "muon" not in pattern]
        assert all(any(re.match(pattern, name) for name in names) for pattern in patterns), title
        assert series or patterns
    (slots,) = (chart for title, chart in charts.items() if title.startswith("accuracy by slot"))
    assert [series.value for series in slots.margin.series] == [f"val/accuracy_slot_{slot}" for slot in (1, 2, 3)]
    (tau,) = (chart for title, chart in charts.items() if title.startswith("tau"))
    assert [(s.value, s.lower, s.upper) for s in tau.margin.series] == [
        ("decode/tau", "decode/tau_low", "decode/tau_high"),
        ("decode/teacher_forced_tau",) * 3,
    ]


@pytest.mark.slow
def test_the_table_of_runs_has_settings_beside_results(logs):
    events = events_of(logs)
    plugin_data = events.PluginTagToContent("hparams")
    session = plugin_data_pb2.HParamsPluginData.FromString(plugin_data["_hparams_/session_start_info"])
    settings = session.session_start_info.hparams
    assert settings["optimizer.lr"].number_value == 0.01
    assert settings["loss.weighting"].string_value == "decay"
    assert settings["data.num_anchors"].number_value == 8
    assert settings["trainer.max_steps"].number_value == 9  # of the first start: TensorBoard keeps the first it reads
    experiment = plugin_data_pb2.HParamsPluginData.FromString(plugin_data["_hparams_/experiment"]).experiment
    results = {metric.name.tag for metric in experiment.metric_infos}
    assert "decode/tau" in results
    assert results <= set(events.Tags()["scalars"])
    assert "_hparams_/session_end_info" in plugin_data


@pytest.mark.slow
def test_settings_and_versions_are_there_as_text(logs, config):
    events = events_of(logs)
    written = yaml.safe_load(texts_of(events, "run/settings")[6].removeprefix("```yaml").removesuffix("```"))
    assert written["model"]["target"] == yaml.safe_load(config.read_text())["model"]["target"]
    assert written["trainer"]["max_steps"] == 12
    assert "| torch | 2.13" in texts_of(events, "run/versions")[6]
    starts = [json.loads(line) for line in (logs / "starts.jsonl").read_text().splitlines()]
    assert [start["first_step"] for start in starts] == [0, 6]
    assert all(
        f"| {name} | " in texts_of(events, "run/versions")[6] for name in starts[1].keys() - {"time", "first_step"}
    )


def test_the_command_is_shown_as_it_was_typed():
    assert typed_command(["/venv/bin/dflash-lightning", "fit", "--config", "my run.yaml"]) == (
        "dflash-lightning fit --config 'my run.yaml'"
    )
    assert typed_command(["/src/dflash_lightning/__main__.py", "fit"]) == "python -m dflash_lightning fit"


def test_the_state_of_the_code_is_the_repositorys_that_holds_it(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    (tmp_path / ".gitignore").write_text("venv")
    (tmp_path / "venv").mkdir()
    for command in (["init", "-q"], ["add", "."], ["-c", "commit.gpgsign=false", "commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    assert re.fullmatch("[0-9a-f]{40}", git_state(tmp_path))
    assert git_state(tmp_path / "venv") == git_state(tmp_path / "nowhere") == "none"
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path).endswith(", with changes")


@pytest.mark.slow
def test_histogram_picture_and_samples_are_the_decodings(logs):
    events = events_of(logs)
    reports = [json.loads(line) for line in (logs / "decoding.jsonl").read_text().splitlines()]
    latest = {max(report["step"] - 1, 0): report for report in reports}  # of step 9 there are two
    for event in events.Histograms("decode/committed_by_round"):
        report, found = latest[event.step], event.histogram_value
        assert found.num == report["rounds"]
        assert found.sum == sum(int(n) * count for n, count in report["histogram"].items())
        counts = dict(zip((limit - 0.5 for limit in found.bucket_limit), found.bucket, strict=True))
        assert {str(int(n)): count for n, count in counts.items() if count} == {
            n: count for n, count in report["histogram"].items() if count
        }
    for event in events.Images("decode/acceptance_by_slot"):
        assert event.encoded_image_string.startswith(b"\x89PNG")
        assert event.width > 2 * event.height
    for step, page in texts_of(events, "decode/samples").items():
        assert page.startswith(f"**Step {latest[step]['step']}.**")
        shown = markdown_to_safe_html(page)
        assert shown.count("<table>") == 3
        assert "say *7* please" in html.unescape(shown)


def test_samples_mark_what_each_round_drafted_and_where_the_texts_part(llama_folder):
    tokenizer = load_tokenizer(str(llama_folder))

    def result(text: str, plain: str, committed: tuple[int, ...], tie: bool) -> PromptResult:
        own, reference = (tuple(tokenizer.encode(t, add_special_tokens=False)) for t in (text, plain))
        prompt = Prompt("a|b", tuple(tokenizer.encode("why?", add_special_tokens=False)))
        times = dict.fromkeys(("seconds", "plain_seconds", "prefill_seconds", "plain_prefill_seconds"), 1.0)
        return PromptResult(prompt, own, reference, committed, (), own == reference, tie, mask_tokens=0, **times)

    equal = result("to be or not", "to be or not", (4, 2, 3, 2), tie=False)
    other = result("to be or not", "to bat", (4, 2, 3, 2), tie=True)
    shown = markdown_to_safe_html(sample_page([equal, other], tokenizer, step=7))
    cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", shown)]
    marked = "t¦<strong>o b</strong>e¦<strong>␣</strong>o¦<strong>r </strong>n¦<strong>o</strong>t"
    assert cells == [marked, "to be or not", marked, "to b<em>at</em>"]
    headings = [html.unescape(heading) for heading in re.findall(r"<h3>(.*?)</h3>", shown)]
    assert headings == ["a|b: tau 2.75 in 4 rounds, equal to plain greedy", "a|b: tau 2.75 in 4 rounds, parts at a tie"]


def test_text_is_shown_as_it_is():
    text = "a *b* _c_ <i>d</i> | e\n# f `g` [h](i) &amp; 1. \\ ~~j~~ ä 字"
    shown = markdown_to_safe_html(f"| t |\n|---|\n| {plain_markdown(text)} |")
    cell = re.search(r"<td>(.*)</td>", shown, re.DOTALL)[1]
    assert "<" not in cell.replace("<br>", "")
    assert html.unescape(cell.replace("<br>", "\n")) == text
