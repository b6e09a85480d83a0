"""The prompts file: one JSON object a line, checked whole before any work begins."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from dflash_lightning.errors import ConfigError, DataError

HUB_PREFIX = "hf:"
FINISH_REASONS = ("stop", "length")
QUESTION_KEYS = ("prompt", "messages", "turns")
KNOWN_KEYS = {"id", *QUESTION_KEYS, "response", "finish_reason"}


@dataclass(frozen=True)
class PromptRow:
    """One row of a prompts file.

    Attributes:
        id: Given, or derived from the row's content, so that reordering a file keeps it.
        messages: The conversation up to the user's turn that is to be answered; a bare `prompt` is one user's turn.
        bare: The row gave `prompt`, not `messages` or `turns`.
        response: An answer that the same target gave before, or None.
        finish_reason: How that answer ended: "stop" at a stop token, "length" at a limit.
        extra: All other keys, passed through.
        place: "file, line N", for messages about this row.
        follow_ups: The user's further turns, each to be asked once the one before it is answered.
    """

    id: str
    messages: list[dict[str, str]]
    bare: bool
    response: str | None
    finish_reason: str
    extra: dict[str, Any] = field(default_factory=dict)
    place: str = ""
    follow_ups: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """Text of the user's last turn."""
        return self.messages[-1]["content"]

    def question(self) -> dict[str, Any]:
        """The question in the form that it was given in, or in one that says the same."""
        if self.bare:
            return {"prompt": self.prompt}
        return {"messages": self.messages} | ({"follow_ups": list(self.follow_ups)} if self.follow_ups else {})

    def answered(self, reply: str) -> "PromptRow":
        """The conversation with a reply to the latest turn, and the next turn asked."""
        reply_and_next = [{"role": "assistant", "content": reply}, {"role": "user", "content": self.follow_ups[0]}]
        return replace(self, messages=[*self.messages, *reply_and_next], follow_ups=self.follow_ups[1:])


def read_prompts(source: str | Path, limit: int | None = None, *, several_turns: bool = False) -> list[PromptRow]:
    """Read and check a prompts file, or a data set named as in `hub_prompts`; `limit` takes its first rows.

    Args:
        source: As for `check_rows`, a row a line; blank lines are skipped.
        limit: Take only so many rows.
        several_turns: Whether the reader can ask one turn after the other; else rows with several `turns` are refused.

    Raises:
        DataError: The file is missing or empty, or a row is malformed or its id not unique; file and line are named.
        ConfigError: `limit` is below 1.
    """
    return check_rows(_raw_rows(str(source)), str(source), limit, several_turns=several_turns)


def check_rows(
    raw: Iterable[tuple[str, dict[str, Any]]], source: str, limit: int | None = None, *, several_turns: bool = False
) -> list[PromptRow]:
    """Rows of prompts from pairs of place and content.

    A row is `{"prompt": str}`, `{"messages": [{"role", "content"}, ..., the last one the user's]}` or `{"turns": [str,
    ...]}`, the user's turns alone, with an optional `"id"`, and an optional answer `"response"` with `"finish_reason"`
    ("stop" if absent).

    Args, Raises: see `read_prompts`.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; expected 1 or more, or none to take every row.")
    rows: list[PromptRow] = []
    first_place: dict[str, str] = {}
    contents: Counter[str] = Counter()
    for place, value in raw:
        row = _row(value, place, contents)
        if row.follow_ups and not several_turns:
            raise DataError(
                f"{place}: {1 + len(row.follow_ups)} `turns`, which only `evaluate` can ask one after the other. Give "
                "one turn, or `messages` with the replies."
            )
        if row.id in first_place:
            raise DataError(f"{row.place}: id {row.id!r} stands on {first_place[row.id]} already; make ids unique.")
        first_place[row.id] = row.place
        rows.append(row)
        if len(rows) == limit:
            break
    if not rows:
        raise DataError(f"{source}: the file is empty. Expected a prompt on every line.")
    return rows


def rows_record(rows: Sequence[PromptRow]) -> dict[str, Any]:
    """How many rows, and the fingerprint of all that they say."""
    digest = hashlib.sha256()
    for row in rows:
        content = [row.id, row.question(), row.response, row.finish_reason, row.extra]
        digest.update(json.dumps(content, sort_keys=True).encode() + b"\n")
    return {"rows": len(rows), "sha256": digest.hexdigest()}


def _raw_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and content of each row, not checked yet."""
    if source.startswith(HUB_PREFIX):
        # Here, as `datasets` takes a second to import.
        from dflash_lightning.prompts.hub import read_hub_rows

        yield from read_hub_rows(source)
        return
    path = Path(source)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {found}. Expected a JSONL file with a prompt on every line.")
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
            raise DataError(f"{row.place}: turns need a chat template, and this target has none; give `prompt`.")
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
    keys = [key for key in QUESTION_KEYS if key in value]
    if len(keys) != 1:
        raise DataError(f"{place}: found {' and '.join(keys) or 'none'} of {', '.join(QUESTION_KEYS)}; expected one.")
    (key,) = keys
    messages, follow_ups = value[key], ()
    if key == "prompt":
        messages = [{"role": "user", "content": value["prompt"]}]
    elif key == "turns":
        messages, follow_ups = _turns(value["turns"], place)
    _check_messages(messages, place, key)
    response, reason = value.get("response"), value.get("finish_reason", "stop")
    if response is not None and not isinstance(response, str):
        raise DataError(f"{place}: `response` is a {type(response).__name__}, expected text.")
    if reason not in FINISH_REASONS:
        raise DataError(f"{place}: `finish_reason` is {reason!r}, expected one of {', '.join(FINISH_REASONS)}.")
    row_id = value.get("id")
    if row_id is None:
        content = [messages, follow_ups] if follow_ups else messages
        sha256 = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        contents[sha256] += 1
        row_id = sha256 if contents[sha256] == 1 else f"{sha256}-{contents[sha256]}"
    elif not isinstance(row_id, str) or not row_id:
        raise DataError(f"{place}: `id` is {row_id!r}, expected text that isn't empty.")
    extra = {key: item for key, item in value.items() if key not in KNOWN_KEYS}
    return PromptRow(row_id, messages, key == "prompt", response, reason, extra, place, follow_ups)


def _turns(turns: Any, place: str) -> tuple[list[dict[str, str]], tuple[str, ...]]:
    """The first of the user's turns as messages, and the others."""
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{place}: `turns` is {turns!r}, expected a list of the user's turns that isn't empty.")
    for turn in turns:
        _check_messages([{"role": "user", "content": turn}], place, "turns")
    return [{"role": "user", "content": turns[0]}], tuple(turns[1:])


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
