"""What an evaluation is to do, and the doing of it: one process's prompts, decoded and kept one by one."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_lightning import __version__
from dflash_lightning.distributed import Place
from dflash_lightning.drafter import Drafter
from dflash_lightning.evaluation.journal import EvaluationJournal, drafter_identity
from dflash_lightning.evaluation.prompt_results import PromptResult
from dflash_lightning.evaluation.questioning import Questioning
from dflash_lightning.progress import inform, track
from dflash_lightning.prompts.rows import PromptRow, rows_record
from dflash_lightning.target import load_target, target_identity
from dflash_lightning.wording import counted

# Prompts on which the other dtype's plain speed is tried.
PROBE_PROMPTS = 2


@dataclass(frozen=True)
class EvaluationJob:
    """What is evaluated and how, and this process's part in it.

    Attributes:
        target: name of the target.
        rows: all prompts; process n of N takes every N-th, from the n-th on.
    """

    target: str
    drafter: Drafter
    dtype: str
    rows: list[PromptRow]
    questioning: Questioning
    place: Place

    @property
    def settings(self) -> dict[str, Any]:
        questioning = self.questioning
        settings = {"dtype": self.dtype, "device": questioning.device.type, "thinking": questioning.thinking}
        return settings | questioning.limits | questioning.sampling

    def work(self) -> dict[str, Any]:
        """What makes it this work and no other."""
        return {
            "target": asdict(target_identity(self.target)),
            "drafter": drafter_identity(self.drafter),
            "prompts": rows_record(self.rows),
            "settings": self.settings,
            "code_version": __version__,
        }

    def results(self, folder: Path | None) -> tuple[dict[int, list[PromptResult]], float | None]:
        """Texts of this process's prompts, by number, and what `plain_speed` has found.

        Args:
            folder: of the journal; what is finished there isn't decoded again.
        """
        mine = range(self.place.rank, len(self.rows), self.place.world_size)
        with EvaluationJournal(folder, self.place.rank, self.work()) as journal:
            missing = [number for number in mine if number not in journal.results]
            if folder and len(missing) < len(mine):
                inform(f"{len(mine) - len(missing)} of {counted(len(mine), 'prompt')} finished before, see {folder}")
            if missing:
                if journal.plain_speed is None and (speed := self.plain_speed()):
                    journal.add_plain_speed(speed)
                self.decode(missing, journal)
        return {number: journal.results[number] for number in mine}, journal.plain_speed

    def plain_speed(self) -> float | None:
        """Tokens a second of plain decoding in the other dtype; None where it needn't be tried.

        The first process tries it. On a GPU float32 has twice the bytes to read and can't be the faster one.
        """
        if self.place.rank > 0 or (self.dtype == "bfloat16" and self.questioning.device.type != "cpu"):
            return None
        # Before the other one is loaded, so that two targets never share the memory.
        other = torch.float32 if self.dtype == "bfloat16" else torch.bfloat16
        model = load_target(self.target, dtype=other, device=self.questioning.device)
        return self.questioning.plain_speed(model, self.rows[:PROBE_PROMPTS])

    def decode(self, numbers: Sequence[int], journal: EvaluationJournal) -> None:
        """Decode the prompts of these numbers, with progress on stderr; each is in the journal once it is finished."""
        model = load_target(self.target, dtype=getattr(torch, self.dtype), device=self.questioning.device)
        self.questioning.warm_up(model, self.drafter, self.rows[numbers[0]])
        rank = f", rank {self.place.rank + 1} of {self.place.world_size}" if self.place.world_size > 1 else ""
        with track(len(numbers), f"evaluate{rank}", "tokens") as progress:
            for number in numbers:
                texts = self.questioning.texts(model, self.drafter, self.rows[number])
                journal.add(number, texts)
                progress.advance(1, done=sum(len(text.token_ids) + len(text.plain_token_ids) for text in texts))
