"""The command ``generate``: one prompt, or a chat, answered with accepted spans in colour."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from dflash_lightning.decoding.decode import Generation, length_limits, plain_decode, positions_of, speculative_decode
from dflash_lightning.decoding.sampling import make_scheme
from dflash_lightning.decoding.streaming import SpanPrinter
from dflash_lightning.decoding.tau import pooled_tau
from dflash_lightning.decoding.ties import is_tie
from dflash_lightning.devices import Dtype, resolve_device
from dflash_lightning.export import load_drafter
from dflash_lightning.prompts.rows import PromptRow, prompt_token_ids
from dflash_lightning.target import load_target, load_tokenizer, stop_token_ids
from dflash_lightning.wording import counted


def generate(
    target: str,
    drafter: Path,
    prompt: str | None = None,
    chat: bool = False,
    max_new_tokens: int = 256,
    dtype: Dtype = "bfloat16",
    device: str = "auto",
    thinking: bool | None = None,
    skip_plain: bool = False,
    **sampling: Any,
) -> None:
    """Answer a prompt, or chat, and show which tokens each verify round committed, a colour a round.

    The last token of each span is the target's own (the bonus), underlined; the others were drafted and accepted. The
    answer goes to stdout, without colour where that is no terminal; acceptance length and speed go to stderr.

    Args:
        target: folder, hub name or .gguf file of the target.
        drafter: exported folder, or a training checkpoint.
        prompt: text of the user's turn. Without one, turns are read from stdin as in a chat.
        chat: after the prompt, read further turns from stdin, a line each; an empty line or Ctrl-D ends the chat.
        max_new_tokens: length limit of an answer.
        dtype: what target and drafter compute in.
        device: where both run; auto takes a GPU if there is one.
        thinking: the chat template's thinking switch.
        skip_plain: leave out the plain decoding of the last answer, which the speed-up and the equality of the texts
            come from.
        sampling: temperature and the rest of `make_scheme`; greedy without.
    """
    where = resolve_device(device)
    scheme = make_scheme(device=where, **sampling)
    tokenizer = load_tokenizer(target)
    model = load_target(target, dtype=getattr(torch, dtype), device=where)
    draft_model = load_drafter(drafter, dtype=getattr(torch, dtype), device=where, target=target)
    limits = {"max_new_tokens": max_new_tokens, "stop_ids": stop_token_ids(model, tokenizer), "scheme": scheme}
    chat = chat or prompt is None
    stdout, stderr = Console(), Console(stderr=True, highlight=False, soft_wrap=True)
    messages: list[dict[str, str]] = []
    runs: list[Generation] = []
    answered: list[int] = []  # the prompt of the latest run
    try:
        for turn in _turns(prompt, chat, stderr):
            messages.append({"role": "user", "content": turn})
            row = PromptRow("chat", messages, bare=not chat, response=None, finish_reason="stop", place="the chat")
            token_ids = prompt_token_ids(row, tokenizer, thinking)
            printer = SpanPrinter(tokenizer, stdout)
            runs.append(speculative_decode(model, draft_model, token_ids, on_commit=printer.add, **limits))
            answered = token_ids
            messages.append({"role": "assistant", "content": printer.end()})
            stdout.print()
            _tell_cut(model, token_ids, runs[-1], limits, stderr)
    except KeyboardInterrupt:  # Ctrl-C ends an answer, and the chat
        stdout.print()
    finally:
        if runs:
            _report(runs, stderr)
    if runs and not skip_plain:
        plain = plain_decode(model, answered, **limits)
        _compare(model, answered, runs[-1], plain, greedy=not sampling.get("temperature"), console=stderr)


def _turns(prompt: str | None, chat: bool, console: Console) -> Iterator[str]:
    """What the user says, turn by turn."""
    if prompt is not None:
        yield prompt
    if not chat:
        return
    typed = sys.stdin.isatty()
    if typed:
        console.print("An empty line or Ctrl-D ends the chat.", style="dim")
    while True:
        try:
            turn = console.input("> ") if typed else input()
        except EOFError:
            return
        if not turn.strip():
            return
        yield turn


def _speed(run: Generation) -> float:
    return len(run.token_ids) / (run.prefill_seconds + run.decode_seconds)


def _tell_cut(
    target: PreTrainedModel, prompt_ids: Sequence[int], run: Generation, limits: dict[str, Any], console: Console
) -> None:
    """Say so where a length limit ended the answer."""
    if run.token_ids[-1] in limits["stop_ids"]:
        return
    (limit,) = length_limits(positions_of(target), [prompt_ids], limits["max_new_tokens"])
    reason = "--max-new-tokens" if limit == limits["max_new_tokens"] else "the target has no more positions"
    console.print(f"cut off after {counted(limit, 'token')}: {reason}", style="dim")


def _report(runs: Sequence[Generation], console: Console) -> None:
    """Acceptance length and speed of all answers."""
    tokens, rounds = sum(len(run.token_ids) for run in runs), sum(len(run.committed) for run in runs)
    seconds = sum(run.prefill_seconds + run.decode_seconds for run in runs)
    tau = pooled_tau(run.committed for run in runs)
    answers = f" in {len(runs)} answers" if len(runs) > 1 else ""
    console.print(
        f"{counted(tokens, 'token')}{answers}, {counted(rounds, 'verify round')}, acceptance length tau "
        f"{'-' if tau is None else f'{tau:.2f}'}; {tokens / seconds:.1f} tokens/s"
    )
    if mask_tokens := sum(run.mask_tokens for run in runs):
        console.print(
            f"warning: the target itself said the drafter's mask token {counted(mask_tokens, 'time')}. The drafter "
            "takes it for an empty slot; train with another mask_token_id.",
            style="yellow",
        )


def _compare(
    target: PreTrainedModel,
    prompt_ids: Sequence[int],
    run: Generation,
    plain: Generation,
    *,
    greedy: bool,
    console: Console,
) -> None:
    """Speed and text of the last answer beside plain decoding."""
    equality = ""
    if greedy:  # a sampled text has no one text to be equal to
        if run.token_ids == plain.token_ids:
            equality = "; text equal to plain greedy"
        elif is_tie(target, prompt_ids, plain.token_ids, run.token_ids):
            equality = "; text parts from plain greedy at a tie"
        else:
            equality = "; text differs from plain greedy"
    console.print(
        f"last answer: {_speed(run):.1f} tokens/s, plain {_speed(plain):.1f}: {_speed(run) / _speed(plain):.2f}x"
        f"{equality}"
    )
