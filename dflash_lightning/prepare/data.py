"""The data folder that `prepare` writes and `capture` reads: the target's answers as tokens with a loss mask."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_lightning.cache import TargetIdentity
from dflash_lightning.durable import write_whole
from dflash_lightning.errors import DataError

SAMPLES, SKIPPED, INFO, JOURNAL = "samples.jsonl", "skipped.jsonl", "data.json", "journal.jsonl"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class PreparedSample:
    """One prompt with its answer, as the target saw and wrote them.

    Attributes:
        id: Unique in its data set; anchors are drawn from it.
        question: {"prompt": str} or {"messages": [...]}.
        response: Text of the answer, without the stop token.
        finish_reason: "stop" if the answer ends with a stop id, "length" if it was cut.
        source: "given" with the prompt, or "generated" by this stage.
        input_ids: Prompt and answer, [S].
        response_start: Position of the answer's first token.
        extra: What else the row said, such as its family.
    """

    id: str
    question: dict[str, Any]
    response: str
    finish_reason: str
    source: str
    input_ids: list[int]
    response_start: int
    extra: dict[str, Any]

    @property
    def loss_mask(self) -> list[int]:
        """1 where a token is the target's own answer, 0 in the prompt; [S]."""
        return [0] * self.response_start + [1] * (len(self.input_ids) - self.response_start)


@dataclass(frozen=True)
class DataInfo:
    """What a data folder holds (`data.json`).

    Attributes:
        target: The target that gave the answers.
        generation: How it gave them: mode, thinking, max_new_tokens, max_prompt_tokens, decoding, dtype.
        input: Rows and fingerprint of the prompts.
        dataset_sha256: Fingerprint of the samples' ids and tokens.
        counts: samples, given, generated, skipped, tokens, response_tokens.
    """

    target: TargetIdentity
    generation: dict[str, Any]
    input: dict[str, Any]
    dataset_sha256: str
    counts: dict[str, int]


def load_data(folder: str | Path) -> tuple[DataInfo, list[PreparedSample]]:
    """Read a finished data folder.

    Raises:
        DataError: The folder isn't one, isn't finished, or was changed since it was written.
    """
    folder = Path(folder)
    info = read_info(folder)
    if info is None:
        state = (
            "is unfinished; run the same `prepare` again to complete it"
            if (folder / JOURNAL).exists()
            else ("holds no prepared data; make it with `prepare`")
        )
        raise DataError(f"{folder} {state}. Expected a {INFO} there.")
    path = folder / SAMPLES
    samples = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                question = {key: record.pop(key) for key in ("prompt", "messages") if key in record}
                samples.append(PreparedSample(question=question, **record))
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}). Remove {folder} and prepare the data again.") from error
    if (found := dataset_sha256(samples)) != info.dataset_sha256:
        raise DataError(
            f"{path} was changed: its fingerprint is {found}, {INFO} says {info.dataset_sha256}. "
            f"Restore the file, or remove {folder} and prepare the data again."
        )
    return info, samples


def read_info(folder: Path) -> DataInfo | None:
    """`data.json` of a finished folder, or None if there is none.

    Raises:
        DataError: The file isn't what `prepare` writes.
    """
    path = folder / INFO
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version = record.pop("format_version")
        if version != FORMAT_VERSION or record.pop("complete") is not True:
            raise DataError(f"{path}: format version {version}; this code reads version {FORMAT_VERSION}.")
        return DataInfo(target=TargetIdentity(**record.pop("target")), **record)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} isn't a data folder's description ({error!r}). Choose another folder.") from error


def write_data(folder: Path, info: DataInfo, samples: list[PreparedSample], skipped: list[dict[str, str]]) -> None:
    """Write a data folder; `data.json` comes last and says that the rest is whole."""
    records = []
    for sample in samples:
        record = asdict(sample)
        question = record.pop("question")
        records.append({"id": record.pop("id"), **question, **record})
    write_whole(folder / SAMPLES, "".join(dump_line(record) for record in records))
    write_whole(folder / SKIPPED, "".join(dump_line(record) for record in skipped))
    description = {"format_version": FORMAT_VERSION, "complete": True, **asdict(info)}
    write_whole(folder / INFO, json.dumps(description, indent=2, ensure_ascii=False) + "\n")


def dataset_sha256(samples: Iterable[PreparedSample]) -> str:
    """Fingerprint of what training sees: ids, tokens and where the answers start, in order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample.id, sample.response_start, sample.input_ids]).encode() + b"\n")
    return digest.hexdigest()


def dump_line(record: dict[str, Any]) -> str:
    """One line of a JSONL file."""
    return json.dumps(record, ensure_ascii=False) + "\n"
