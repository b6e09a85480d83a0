"""The command `generate`: what is printed where, for one prompt, in a pipe, and in a chat on a real terminal."""

import io
import itertools
import os
import pty
import subprocess
import sys

import pytest
import torch
from conftest import byte_tokenizer
from export_helpers import TOKENS
from helpers import load_tiny, make_drafter
from rich.console import Console
from rich.style import Style
from rich.text import Text

from dflash_lightning.cli import run
from dflash_lightning.decoding import generate as generate_module
from dflash_lightning.decoding.decode import plain_decode
from dflash_lightning.decoding.streaming import SPAN_STYLES, SpanPrinter
from dflash_lightning.errors import ConfigError, TargetError
from dflash_lightning.export import export_drafter
from dflash_lightning.target import load_tokenizer

LIMIT = 12


def decoded(spans) -> str:
    return byte_tokenizer().decode(list(itertools.chain(*spans)), skip_special_tokens=True)


def printed(spans, **console) -> str:
    """What a printer makes of spans."""
    file = io.StringIO()
    printer = SpanPrinter(byte_tokenizer(), Console(file=file, width=20, **console))
    for span in spans:
        printer.add(span)
    assert printer.end() == decoded(spans)
    return file.getvalue()


def test_each_span_has_its_colour_and_the_bonus_is_underlined():
    tokenizer = byte_tokenizer()
    spans = [tokenizer(text).input_ids for text in ("a", "bcd\n ", "a line that is longer than twenty columns", "e")]
    shown = Text.from_ansi(printed(spans, force_terminal=True, color_system="truecolor"))
    place = 0
    for number, span in enumerate(spans):
        text = tokenizer.decode(span)
        assert shown.plain[place : place + len(text)] == text  # nothing is wrapped
        for offset in (i for i, character in enumerate(text) if character != "\n"):
            style = shown.get_style_at_offset(Console(), place + offset)
            expected = Style.parse(SPAN_STYLES[number % len(SPAN_STYLES)])
            assert style.bgcolor.number == expected.bgcolor.number
            assert bool(style.underline) == (offset == len(text) - 1)
        place += len(text)


def test_a_character_that_spans_share_is_printed_once_it_is_whole():
    tokens = byte_tokenizer()("é😀!").input_ids
    assert len(tokens) == 7
    for cuts in ((1, 4), (3, 5), (2, 6)):
        first, second = cuts
        spans = [tokens[:first], tokens[first:second], tokens[second:]]
        assert printed(spans) == "é😀!"
        shown = printed(spans, force_terminal=True, color_system="truecolor")
        assert Text.from_ansi(shown).plain == "é😀!"
    # The answer ends inside one: a sign for it, at the end only.
    assert printed([tokens[:1], tokens[1:4]]) == "é�"


def test_without_a_terminal_the_text_is_bare_and_whole():
    """Tabs, control characters, bytes that are no text, special tokens: as the tokenizer decodes all at once."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(1, 6, (10,), generator=generator).tolist()
        spans = [torch.randint(260, (length,), generator=generator).tolist() for length in lengths]
        assert printed(spans) == decoded(spans)


def test_a_tokenizer_without_a_file_is_refused():
    with pytest.raises(TargetError, match=r"tokenizer is a str; .* tokenizer\.json"):
        SpanPrinter("slow", Console())


@pytest.fixture(scope="module")
def drafter_folder(qwen3_folder, tmp_path_factory):
    drafter = make_drafter(load_tiny(qwen3_folder), scale=3.0)
    folder = tmp_path_factory.mktemp("generate") / "zlab"
    return export_drafter(drafter.state_dict(), drafter.config, folder, "zlab", tokens=TOKENS, dtype=torch.float32)


@pytest.fixture
def command(qwen3_folder, drafter_folder):
    arguments = ["generate", "--target", str(qwen3_folder), "--drafter", str(drafter_folder), "--dtype", "float32"]
    return [*arguments, "--max-new-tokens", str(LIMIT)]


def answers(folder, turns) -> list[str]:
    """What the target says to each turn, by plain decoding of the whole conversation."""
    target, tokenizer, messages, texts = load_tiny(folder), load_tokenizer(str(folder)), [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        run = plain_decode(target, ids, max_new_tokens=LIMIT, stop_ids=(2,))
        texts.append(tokenizer.decode(run.token_ids, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": texts[-1]})
    return texts


def test_one_prompt_leaves_the_answer_on_stdout_and_figures_on_stderr(command, qwen3_folder, capsys):
    run([*command, "--prompt", "say 7"])
    out, err = capsys.readouterr()
    assert out == answers(qwen3_folder, ["say 7"])[0] + "\n"
    assert f"{LIMIT} tokens, " in err
    assert "acceptance length tau" in err
    assert "text equal to plain greedy" in err
    assert f"cut off after {LIMIT} tokens: --max-new-tokens" in err


def test_a_sampled_answer_has_no_plain_text_to_be_equal_to(command, capsys):
    run([*command, "--prompt", "say 7", "--temperature", "0.8", "--seed", "3"])
    sampled, err = capsys.readouterr()
    assert "x" in err.splitlines()[-1]
    assert "plain greedy" not in err
    run([*command, "--prompt", "say 7", "--temperature", "0.8", "--seed", "3", "--skip-plain"])
    out, err = capsys.readouterr()
    assert out == sampled
    assert "plain" not in err


@pytest.mark.parametrize("first", [["--prompt", "say 7", "--chat"], []])
def test_a_chat_keeps_its_history_and_ends_at_an_empty_line(command, qwen3_folder, capsys, monkeypatch, first):
    turns = ["say 7", "and é?", "thanks"]
    typed = turns[1:] if first else turns
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*typed, "", "not said any more"])))
    run([*command, *first])
    out, err = capsys.readouterr()
    assert out == "".join(f"{text}\n" for text in answers(qwen3_folder, turns))
    assert f"{3 * LIMIT} tokens in 3 answers" in err
    assert "last answer" in err


def test_a_conversation_beyond_the_targets_positions_is_one_message_after_the_figures(command, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("say 7\n" + 500 * "x" + "\nmore\n"))
    with pytest.raises(ConfigError, match=r"the prompt has 5\d\d tokens, and the target has 512 positions"):
        run(command)
    assert f"{LIMIT} tokens, " in capsys.readouterr().err


def test_an_answer_at_the_targets_last_position_says_why_it_ends(command, capsys):
    run([*command, "--prompt", 490 * "x"])
    assert "the target has no more positions" in capsys.readouterr().err


def test_ctrl_c_ends_the_chat_with_its_figures(command, capsys, monkeypatch):
    decode, calls = generate_module.speculative_decode, []

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode(*arguments, **options)

    monkeypatch.setattr(generate_module, "speculative_decode", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\n"))
    run(command)
    assert len(calls) == 2
    told = capsys.readouterr().err
    assert f"{LIMIT} tokens, " in told
    assert "text equal to plain greedy" in told  # of the answer that came to its end


@pytest.mark.slow
def test_a_chat_on_a_terminal(command, qwen3_folder):
    """Prompts, colours, Ctrl-D: through a pseudo-terminal, as a user sees it."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash_lightning", *command],
        **{"stdin": theirs, "stdout": theirs, "stderr": theirs, "env": environment, "start_new_session": True},
    )
    os.close(theirs)
    unread = b""

    def read_until(text: bytes) -> bytes:
        """What comes up to ``text``; what comes after it is left for the next call."""
        nonlocal unread
        while text not in unread:
            unread += os.read(ours, 4096)
        before, unread = unread.split(text, 1)
        return before

    read_until(b"ends the chat.")
    read_until(b"> ")
    os.write(ours, b"say 7\n")
    answer = read_until(b"cut off after")
    read_until(b"> ")
    os.write(ours, b"\x04")
    read_until(b"plain greedy")
    assert process.wait(timeout=60) == 0
    os.close(ours)
    assert b"\x1b[" in answer
    shown = Text.from_ansi(answer.decode(errors="replace").replace("\r\n", "\n")).plain
    expected = letters(answers(qwen3_folder, ["say 7"])[0])
    assert len(expected) > 2
    assert expected in letters(shown)


def letters(text: str) -> str:
    """What a terminal shows as it is: no control characters, no tabs."""
    return "".join(character for character in text if character.isascii() and character.isalnum())
