"""The page about a training: the figures that were logged, without anything from elsewhere."""

import csv
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch.utils.tensorboard import SummaryWriter

from dflash_lightning.cli import run
from dflash_lightning.errors import DataError
from dflash_lightning.run_log import read_run_log

TAUS = {0: 1.0, 119: 2.25, 239: 2.75, 359: 2.5}


@pytest.fixture
def logged(tmp_path):
    """A folder of a run with logs below it."""
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        for step, tau in TAUS.items():
            for name, value in (("tau", tau), ("tau_low", tau - 0.25), ("tau_high", tau + 0.5), ("speedup", tau / 2)):
                writer.add_scalar(f"decode/{name}", value, step)
            writer.add_scalar("val/accuracy_slot_1", tau / 4, step)
            writer.add_scalar("train/loss", 8 - tau, step)
        writer.add_text("decode/samples", "early", 0)
        writer.add_text("decode/samples", "**late** text <script>alert(1)</script>", 359)
        writer.add_text("warnings/nothing_accepted", "no token was accepted", 119)
        writer.add_text("run/settings", "```yaml\nmodel: {target: t}\n```", 0)
        writer.add_image("decode/acceptance_by_slot", np.zeros((3, 4, 4)), 359)
    return tmp_path


class Page(HTMLParser):
    """The text of a page, its tags, and what it would load."""

    def __init__(self, html: str):
        super().__init__()
        self.text, self.tags, self.sources = "", [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]

    def handle_data(self, data):
        self.text += data


def test_the_page_tells_what_was_logged_and_loads_nothing(logged, capsys):
    run(["report", str(logged)])
    assert capsys.readouterr().out.strip() == str(logged / "logs" / "report.html")
    page = Page((logged / "logs" / "report.html").read_text())
    text = " ".join(page.text.split())
    assert "acceptance length tau, best2.75 (step 240, 95 % 2.50 to 3.25)" in text
    assert "acceptance length tau, latest2.50 (step 360, 95 % 2.25 to 3.00)" in text
    assert "before training1.00" in text
    assert "latest1.25x" in text
    assert "late text" in text
    assert "early" not in text
    assert "no token was accepted" in text
    assert "model: {target: t}" in text
    # tau, speed-up, accuracy by slot, loss
    assert page.tags.count("svg") == 4
    assert page.tags.count("img") == 1
    assert "script" not in page.tags
    assert all(source.startswith(("data:", "#")) for source in page.sources)
    assert not re.search(r"url\((?!#)", (logged / "logs" / "report.html").read_text())


def test_the_table_beside_it_holds_every_scalar(logged):
    run(["report", str(logged), "--output", str(logged / "out" / "page.html")])
    rows = list(csv.DictReader(io.StringIO((logged / "out" / "page.csv").read_text())))
    assert len(rows) == 6 * len(TAUS)
    assert {int(row["step"]): float(row["value"]) for row in rows if row["name"] == "decode/tau"} == TAUS


def test_a_start_anew_in_the_same_folder_takes_back_what_was_told_before(logged, caplog):
    with SummaryWriter(str(logged / "logs"), filename_suffix=".later") as writer:
        writer.file_writer.add_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))
        for value in (2.0, 1.5):  # once more at the same step, as after a resume
            writer.add_scalar("train/loss", value, 4)
    log = read_run_log(logged)
    assert log.scalars["train/loss"] == [(4, 1.5)]
    assert (log.scalars["decode/tau"], log.texts, log.images) == ([], {}, {})
    run(["report", str(logged)])
    assert "no token was accepted" not in (logged / "logs" / "report.html").read_text()
    assert caplog.records == []  # TensorBoard takes it for a mistake


def test_a_run_without_any_decoding_has_a_page(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("train/loss", 3.0, 4)
    run(["report", str(tmp_path)])
    assert "Nothing was logged." in (tmp_path / "report.html").read_text()


def test_what_cannot_be_read_of_a_log_is_told(logged, capsys):
    whole = read_run_log(logged)
    [file] = (logged / "logs").glob("events.out.tfevents.*")
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
    damaged = read_run_log(logged)
    assert 0 < sum(map(len, damaged.scalars.values())) < sum(map(len, whole.scalars.values()))
    assert f"of its {len(content):,} bytes can't be read: it is cut off or damaged there" in capsys.readouterr().err
    file.write_bytes(b"hello world" * 100)
    with pytest.raises(DataError, match="nothing can be read of its event files"):
        read_run_log(logged)


def test_a_folder_of_no_run_or_of_several_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds none"):
        run(["report", str(tmp_path)])
    for name in "ab":
        SummaryWriter(str(tmp_path / name)).close()
    with pytest.raises(DataError, match=r"holds those of .*/a, .*/b; give one of them"):
        run(["report", str(tmp_path)])
    assert read_run_log(tmp_path / "a").scalars == {}
