"""Prompts from a data set of the Hugging Face hub, or from a local folder in one of its layouts."""

from collections.abc import Iterator
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetNotFoundError

from dflash_lightning.errors import DataError
from dflash_lightning.prompts.rows import HUB_PREFIX

FORM = "hf:NAME[,config=NAME][,split=train][,column=prompt]"


def load_split(name: str, config: str | None, split: str) -> Dataset:
    """A split of a data set.

    Args:
        name: of the hub, or a local folder.

    Raises:
        DataError: it can't be loaded; the message says why.
    """
    try:
        return load_dataset(name, config, split=split)
    except (DatasetNotFoundError, FileNotFoundError, ConnectionError, ValueError) as error:
        raise DataError(f"the data set can't be loaded: {error}") from error


def read_hub_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows as a prompts file would hold them, each with its place for messages.

    Args:
        source: for example ``hf:openai/gsm8k,config=main,column=question``. A column of text gives prompts, one of
            message lists gives conversations.

    Raises:
        DataError: the description is malformed, or there is no such data set, split or column.
    """
    name, *options = source.removeprefix(HUB_PREFIX).split(",")
    settings = {"config": None, "split": "train", "column": "prompt"}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in settings or not equals or not value:
            raise DataError(f"{source}: option {option!r} found; expected {FORM}.")
        settings[key] = value
    try:
        rows = load_split(name, settings["config"], settings["split"])
    except DataError as error:
        raise DataError(f"{source}: {error}. Expected {FORM}.") from error
    if (column := settings["column"]) not in rows.column_names:
        raise DataError(f"{source}: no column {column!r}; the columns are {', '.join(rows.column_names)}.")
    for number, value in enumerate(rows[column], start=1):
        yield f"{source}, row {number}", {"messages" if isinstance(value, list) else "prompt": value}
