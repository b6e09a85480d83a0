"""Texts of a decoding for TensorBoard: the accepted spans marked, and plain greedy decoding beside."""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from transformers import PreTrainedTokenizerBase

from dflash_lightning.decoding.tau import pooled_tau
from dflash_lightning.evaluation.prompt_results import PromptResult
from dflash_lightning.wording import counted

ROUND = "¦"
PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")


def sample_page(results: Sequence[PromptResult], tokenizer: PreTrainedTokenizerBase, step: int) -> str:
    """Markdown: texts of a few prompts as the rounds committed them, and plain greedy decoding beside."""
    parts = [
        f"**Step {step}.** A verify round begins at {ROUND}. **Bold** was drafted and accepted; the rest of a round is "
        "the target's own token (the bonus). *Slanted* is the plain text from where the two part."
    ]
    for result in results:
        tau, rounds = pooled_tau([result.committed]), len(result.committed)
        tau = "no round" if tau is None else f"tau {tau:.2f} in {counted(rounds, 'round')}"
        equality = "equal to plain greedy" if result.identical else "parts at a tie" if result.tie else "**DIFFERS**"
        parts.append(
            f"### {plain_markdown(result.prompt.id)}: {tau}, {equality}\n\n"
            f"{plain_markdown(tokenizer.decode(result.prompt.token_ids, skip_special_tokens=True).strip())}\n\n"
            "| with the drafter | plain greedy |\n|---|---|\n"
            f"| {_marked(result, tokenizer)} | {_plain(result, tokenizer)} |"
        )
    return "\n\n".join(parts)


def _marked(result: PromptResult, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text round by round. The last token of a round counts as the target's, also where the text was cut there."""

    def shown(start: int, end: int) -> str:
        text = plain_markdown(tokenizer.decode(result.token_ids[start:end]))
        return text.replace("<br>", "↵<br>")  # else an accepted end of a line couldn't be seen

    text = shown(0, 1)  # from the prefill
    for start, end in pairwise(accumulate(result.committed, initial=1)):
        drafted = shown(start, end - 1)
        if drafted.isspace():  # bold or not, it couldn't be seen
            drafted = drafted.replace(" ", "␣")
        text += ROUND + (f"<strong>{drafted}</strong>" if drafted else "") + shown(end - 1, end)
    return text


def _plain(result: PromptResult, tokenizer: PreTrainedTokenizerBase) -> str:
    own, plain = result.token_ids, result.plain_token_ids
    shorter = min(len(own), len(plain))
    parting = next((i for i in range(shorter) if own[i] != plain[i]), shorter)
    same, other = (plain_markdown(tokenizer.decode(ids)) for ids in (plain[:parting], plain[parting:]))
    return same + (f"<em>{other}</em>" if other else "")


def plain_markdown(text: str) -> str:
    """Markdown, of one line, that shows the text as it is."""
    return PUNCTUATION.sub(lambda found: f"&#{ord(found[0])};", text).replace("\n", "<br>")
