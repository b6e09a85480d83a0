"""What an evaluation has finished, prompt by prompt, so that one that was killed goes on where it was."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dflash_lightning.drafter import Drafter
from dflash_lightning.evaluation.prompt_results import Prompt, PromptResult
from dflash_lightning.journal import Journal, read_journal, refuse_other_work


class EvaluationJournal:
    """Results of finished prompts, by their number. Each rank writes a file of its own in one folder and reads all.

    Attributes:
        results: the texts of each finished prompt, one a turn.
        plain_speed: tokens a second of plain decoding in the other dtype; None until it is tried.
    """

    def __init__(self, folder: Path | None, rank: int, work: dict[str, Any]):
        """
        Args:
            folder: of the files; it is made if missing. None: nothing is kept.
            work: what is evaluated and how.

        Raises:
            DataError: the folder holds other work (each field that differs is named), is damaged, or is in use.
        """
        self.results: dict[int, list[PromptResult]] = {}
        self.plain_speed: float | None = None
        self._journal = None
        if folder is None:
            return
        work = json.loads(json.dumps(work))  # as it is read back
        for path in sorted(folder.glob("rank-*.jsonl")):
            header, entries = read_journal(path)
            if header is not None:
                refuse_other_work(path, header, work)
            for entry in entries:
                self._take(entry)
        folder.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(folder / f"rank-{rank}.jsonl", work)

    def _take(self, entry: dict[str, Any]) -> None:
        if "plain_speed" in entry:
            self.plain_speed = entry["plain_speed"]
        else:
            self.results[entry["prompt"]] = [_result(text) for text in entry["texts"]]

    def _add(self, entry: dict[str, Any]) -> None:
        if self._journal:
            self._journal.append(entry)

    def add_plain_speed(self, tokens_per_second: float) -> None:
        self.plain_speed = tokens_per_second
        self._add({"plain_speed": tokens_per_second})

    def add(self, number: int, texts: list[PromptResult]) -> None:
        """Keep the texts of a finished prompt; they are on disk when this returns."""
        self.results[number] = texts
        self._add({"prompt": number, "texts": [asdict(text) for text in texts]})

    def __enter__(self) -> "EvaluationJournal":
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal:
            self._journal.close()


def _result(text: dict[str, Any]) -> PromptResult:
    prompt = Prompt(**_tuples(text.pop("prompt")))
    return PromptResult(prompt=prompt, **_tuples(text))


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def drafter_identity(drafter: Drafter) -> dict[str, Any]:
    """What makes a drafter this drafter, wherever it stands: its configuration and its weights as they are used."""
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return {**drafter.config.to_dict(), "weights_sha256": digest.hexdigest()}
