"""The command ``generate``: one prompt, accepted spans in colour."""

from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from dflash_lightning.decoding import plain_decode, speculative_decode
from dflash_lightning.devices import resolve_device
from dflash_lightning.evaluate import Dtype, show_number
from dflash_lightning.evaluation import pooled_tau
from dflash_lightning.export import load_drafter
from dflash_lightning.prompts import PromptRow, prompt_token_ids
from dflash_lightning.sampling import make_scheme
from dflash_lightning.target import load_target, load_tokenizer, stop_token_ids

SPAN_STYLES = ("black on bright_green", "black on bright_cyan", "black on bright_yellow", "black on bright_magenta")


def generate(
    target: str,
    drafter: Path,
    prompt: str,
    max_new_tokens: int = 256,
    dtype: Dtype = "bfloat16",
    device: str = "auto",
    thinking: bool | None = None,
    **sampling: Any,
) -> None:
    """Answer one prompt and show which tokens each verify round committed, a colour a round.

    The last token of each span is the target's own (the bonus), underlined; the others were drafted and accepted.

    Args:
        target: folder, hub name or .gguf file of the target.
        drafter: exported folder, or a training checkpoint.
        prompt: text of the user's turn.
        max_new_tokens: length limit of the answer.
        dtype: what target and drafter compute in.
        device: where both run; auto takes a GPU if there is one.
        thinking: the chat template's thinking switch.
        sampling: temperature and the rest of `make_scheme`; greedy without.
    """
    where = resolve_device(device)
    scheme = make_scheme(device=where, **sampling)
    tokenizer = load_tokenizer(target)
    model = load_target(target, dtype=getattr(torch, dtype), device=where)
    draft_model = load_drafter(drafter, dtype=getattr(torch, dtype), device=where, target=target)
    row = PromptRow("prompt", [{"role": "user", "content": prompt}], bare=True, response=None, finish_reason="stop")
    token_ids = prompt_token_ids(row, tokenizer, thinking)
    limits = {"max_new_tokens": max_new_tokens, "stop_ids": stop_token_ids(model, tokenizer), "scheme": scheme}
    console, styles = Console(), cycle(SPAN_STYLES)

    def show(span: list[int]) -> None:
        style = next(styles)
        # A span that ends inside a character is shown with a placeholder; the text itself isn't affected.
        drafted, bonus = tokenizer.decode(span[:-1]), tokenizer.decode(span[-1:])
        console.print(Text(drafted, style=style) + Text(bonus, style=f"{style} underline"), end="")

    run = speculative_decode(model, draft_model, token_ids, on_commit=show, **limits)
    console.print()
    plain = plain_decode(model, token_ids, **limits)
    seconds, plain_seconds = (r.prefill_seconds + r.decode_seconds for r in (run, plain))
    speed, plain_speed = len(run.token_ids) / seconds, len(plain.token_ids) / plain_seconds
    equality = ""
    if not sampling.get("temperature"):  # a sampled text has no one text to be equal to
        equality = f"; text {'equal to' if run.token_ids == plain.token_ids else 'differs from'} plain greedy"
    console.print(
        f"{len(run.token_ids)} tokens in {len(run.committed)} rounds, acceptance length tau "
        f"{show_number(pooled_tau([run.committed]))}; {speed:.1f} tokens/s, plain {plain_speed:.1f}: "
        f"{speed / plain_speed:.2f}x{equality}",
        highlight=False,
    )
