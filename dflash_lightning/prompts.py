"""The prompts file: one JSON object a line, checked whole before any work begins."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from dflash_lightning.errors import ConfigError, DataError

HUB_PREFIX = "hf:"
FINISH_REASONS = ("stop", "length")
KNOWN_KEYS = {"id", "prompt", "messages", "response", "finish_reason"}


@dataclass(frozen=True)
class PromptRow:
    """One row of a prompts file.

    Attributes:
        id: Given, or derived from the row's content, so that reordering a file keeps it.
        messages: The conversation up to the user's turn that is to be answered; a bare `prompt` is one user's turn.
        bare: The row gave `prompt`, not `messages`.
        response: An answer that the same target gave before, or None.
        finish_reason: How that answer ended: "stop" at a stop token, "length" at a limit.
        extra: All other keys, passed through.
        place: "file, line N", for messages about this row.
    """

    id: str
    messages: list[dict[str, str]]
    bare: bool
    response: str | None
    finish_reason: str
    extra: dict[str, Any] = field(default_factory=dict)
    place: str = ""

    @property
    def prompt(self) -> str:
        """Text of the user's last turn."""
        return self.messages[-1]["content"]

    def question(self) -> dict[str, Any]:
        """The question in the form that it was given in."""
        return {"prompt": self.prompt} if self.bare else {"messages": self.messages}


def read_prompts(source: str | Path, limit: int | None = None) -> list[PromptRow]:
    """Read and check a prompts file, or a data set named as in `hub_prompts`; `limit` takes its first rows.

    A row is `{"prompt": str}` or `{"messages": [{"role", "content"}, ..., the last one the user's]}`, with an optional
    `"id"`, and an optional answer `"response"` with `"finish_reason"` ("stop" if absent). Blank lines are skipped.

    Raises:
        DataError: The file is missing or empty, or a row is malformed or its id not unique; file and line are named.
        ConfigError: `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; expected 1 or more, or none to take every row.")
    rows: list[PromptRow] = []
    first_place: dict[str, str] = {}
    contents: Counter[str] = Counter()
    for place, value in _raw_rows(str(source)):
        row = _row(value, place, contents)
        if row.id in first_place:
            raise DataError(f"{row.place}: id {row.id!r} stands on {first_place[row.id]} already; make ids unique.")
        first_place[row.id] = row.place
        rows.append(row)
        if len(rows) == limit:
            break
    if not rows:
        raise DataError(f"{source}: the file is empty. Expected a prompt on every line.")
    return rows


def _raw_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and content of each row, not checked yet."""
    if source.startswith(HUB_PREFIX):
        # Here, as `datasets` takes a second to import.
        from dflash_lightning.hub_prompts import read_hub_rows

        yield from read_hub_rows(source)
        return
    path = Path(source)
    if not path.is_file():
        raise DataError(f"{path}: no such file. Expected a JSONL file with a prompt on every line.")
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _json(line, place)


def prompt_token_ids(row: PromptRow, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None) -> list[int]:
    """The ids that the target continues: the chat template with the answer's opening, or the bare text without one.

    Args:
        row: The row.
        tokenizer: The target's tokenizer; without a chat template it is a plain language model.
        thinking: The template's `enable_thinking` switch; None leaves it at its default.

    Raises:
        DataError: The template rejects the conversation, or there is none for a conversation; or nothing is left.
        ConfigError: `thinking` is set and the template has no such switch.
    """
    template = tokenizer.chat_template
    if thinking is not None and "enable_thinking" not in str(template):
        raise ConfigError(f"thinking is {thinking}, but the target's chat template has no `enable_thinking` switch.")
    if not template:
        if not row.bare:
            raise DataError(f"{row.place}: `messages` need a chat template, and this target has none; give `prompt`.")
        ids = tokenizer(row.prompt).input_ids
    else:
        switches = {} if thinking is None else {"enable_thinking": thinking}
        try:
            text = tokenizer.apply_chat_template(row.messages, tokenize=False, add_generation_prompt=True, **switches)
        except TemplateError as error:
            raise DataError(f"{row.place}: the target's chat template rejects the messages: {error}") from error
        ids = tokenizer(text, add_special_tokens=False).input_ids
    if not ids:
        raise DataError(f"{row.place}: the prompt has no tokens.")
    return ids


def _json(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or beyond what Python reads
        raise DataError(f"{place}: not JSON ({error}). Expected one JSON object a line.") from error
    if not isinstance(value, dict):
        raise DataError(f"{place}: found a {type(value).__name__}, expected a JSON object.")
    return value


def _row(value: dict[str, Any], place: str, contents: Counter[str]) -> PromptRow:
    if ("prompt" in value) == ("messages" in value):
        found = "both" if "prompt" in value else "neither"
        raise DataError(f"{place}: found {found} of `prompt` and `messages`, expected one of them.")
    bare = "prompt" in value
    messages = [{"role": "user", "content": value["prompt"]}] if bare else value["messages"]
    _check_messages(messages, place, "prompt" if bare else "messages")
    response, reason = value.get("response"), value.get("finish_reason", "stop")
    if response is not None and not isinstance(response, str):
        raise DataError(f"{place}: `response` is a {type(response).__name__}, expected text.")
    if reason not in FINISH_REASONS:
        raise DataError(f"{place}: `finish_reason` is {reason!r}, expected one of {', '.join(FINISH_REASONS)}.")
    row_id = value.get("id")
    if row_id is None:
        key = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]
        contents[key] += 1
        row_id = key if contents[key] == 1 else f"{key}-{contents[key]}"
    elif not isinstance(row_id, str) or not row_id:
        raise DataError(f"{place}: `id` is {row_id!r}, expected text that isn't empty.")
    extra = {key: item for key, item in value.items() if key not in KNOWN_KEYS}
    return PromptRow(row_id, messages, bare, response, reason, extra, place)


def _check_messages(messages: Any, place: str, key: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: `messages` is {messages!r}, expected a list of turns that isn't empty.")
    for turn in messages:
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise DataError(f'{place}: a turn is {turn!r}, expected {{"role": ..., "content": ...}}.')
        if not isinstance(turn.get("content"), str):
            found = type(turn.get("content")).__name__
            raise DataError(f"{place}: {'`prompt`' if key == 'prompt' else 'a turn'} is a {found}, expected text.")
        try:
            turn["content"].encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{place}: the text isn't valid Unicode ({error.reason}).") from error
    if messages[-1]["role"] != "user":
        raise DataError(f"{place}: the last turn is of role {messages[-1]['role']!r}, expected the user's.")
    if not messages[-1]["content"].strip():
        raise DataError(f"{place}: the prompt is empty.")
