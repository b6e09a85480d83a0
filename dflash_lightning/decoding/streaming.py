"""Text on the screen while it is decoded: the span that each round committed, in a colour of its own."""

from itertools import cycle

from rich.console import Console
from rich.text import Text
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dflash_lightning.errors import TargetError

SPAN_STYLES = ("black on bright_green", "black on bright_cyan", "black on bright_yellow", "black on bright_magenta")


class SpanPrinter:
    """Prints one answer as it is committed: a colour a span on a terminal, the bare text elsewhere.

    The last token of a span is the target's own (the bonus), underlined; the others were drafted and accepted. A
    character that tokens or spans share is printed once it is whole, with the token that completes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console):
        """
        Raises:
            TargetError: a tokenizer that can't be read token by token.
        """
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise TargetError(
                f"the target's tokenizer is a {type(tokenizer).__name__}; showing an answer as it arrives needs one "
                "with a tokenizer.json. `evaluate` works without."
            )
        self._tokenizer, self._console = tokenizer.backend_tokenizer, console
        self._stream, self._styles = DecodeStream(skip_special_tokens=True), cycle(SPAN_STYLES)
        self._token_ids: list[int] = []
        self._text = ""

    def add(self, span: list[int]) -> None:
        """Print the tokens of a round."""
        style = next(self._styles)
        self._token_ids += span
        for tokens, shown in ((span[:-1], style), (span[-1:], f"{style} underline")):
            self._print("".join(self._stream.step(self._tokenizer, token) or "" for token in tokens), shown)

    def end(self) -> str:
        """Print what remains (bytes of a character that never became whole, as one sign); gives the whole text."""
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        self._print(whole[len(self._text) :], next(self._styles))
        return whole

    def _print(self, text: str, style: str) -> None:
        self._text += text
        if self._console.is_terminal:
            self._console.print(Text(text, style), end="", soft_wrap=True)
        else:  # rich would replace tabs
            self._console.file.write(text)
            self._console.file.flush()
