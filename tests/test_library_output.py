"""Libraries print on stderr, in whole lines, and not about what nobody could act on."""

import logging
import re
import sys
import warnings

import pytest

from dflash_lightning import library_output
from dflash_lightning.library_output import format_warning, tame_libraries
from dflash_lightning.progress import track


@pytest.fixture
def deepspeed(monkeypatch):
    """A logger as DeepSpeed makes it when it is imported, which may be later than its output is tamed."""
    monkeypatch.setattr(library_output, "LOGGERS", ("DeepSpeed",))
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    logger = logging.getLogger("DeepSpeed")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "filters", [])
    tame_libraries()
    logger.addHandler(logging.StreamHandler(sys.stdout))
    return logger


def test_what_deepspeed_says_goes_to_stderr_and_its_chatter_nowhere(deepspeed, capsys):
    deepspeed.warning("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.")
    deepspeed.warning("the loss is odd")
    assert capsys.readouterr() == ("", "the loss is odd\n")


def test_a_warning_is_one_line_without_code():
    own = format_warning("odd", UserWarning, f"{library_output.__file__}", 7, "rank_zero_warn('odd')")
    assert own == "warning: odd\n"
    assert format_warning("odd", UserWarning, "/lib/x.py", 7, "warn('odd')") == "/lib/x.py:7: UserWarning: odd\n"


def test_on_a_terminal_a_line_leaves_the_bar_in_one_piece(deepspeed, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if stderr were a terminal
    with track(2, "fit", "steps") as progress:
        with track(1, "decoding", "tokens") as inner:
            deepspeed.warning("the loss is odd")
            inner.advance()
        progress.advance(2)
    out, err = capsys.readouterr()
    assert out == ""
    moved = re.sub(r"\x1b\[[\d;?]*[A-LSTf]|\r", "\n", err)  # the cursor, to write there
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", moved).splitlines()]
    assert "the loss is odd" in lines
    assert re.match(r"fit .*2/2 .*steps/s", [line for line in lines if line][-1])


def test_in_a_log_a_stage_inside_another_has_its_own_lines(capsys):
    with track(1, "fit", "steps") as progress:
        with track(1, "decoding", "tokens") as inner:
            inner.advance(done=4)
        progress.advance()
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["decoding", "fit"]
