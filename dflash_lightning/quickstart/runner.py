"""Runs stages once: a finished stage is recorded with its command and its seconds, and isn't run again."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from dflash_lightning.durable import write_whole
from dflash_lightning.errors import DFlashError

RECORD = "stages.json"
# Programs as modules of this interpreter, so that the scripts needn't be on the path.
MODULES = {"dflash-lightning": "dflash_lightning", "torchrun": "torch.distributed.run"}


class StageFailed(DFlashError):
    """A stage's command failed; it has said why on stderr."""

    def __init__(self, name: str, code: int):
        super().__init__(
            f"stage {name} failed with exit code {code}; run the same command again to go on from there, or give "
            "another --output to start anew"
        )


class StageRunner:
    """Runs named stages in order, each as commands that a user could type.

    A stage is skipped while its record says that the same commands finished. Once a stage runs, those after it run too.
    """

    def __init__(self, folder: Path):
        """
        Args:
            folder: the run's folder, where the record is kept.
        """
        self._file = folder / RECORD
        self._record = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._console = Console()
        self._ran = False

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each finished stage took."""
        return {name: entry["seconds"] for name, entry in self._record.items()}

    def commands(
        self,
        name: str,
        *commands: Sequence[str],
        key: object = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        """Run ``commands`` one after the other.

        Args:
            key: what the stage is known by, if not the commands themselves.
            before: called first, only if the stage runs; to clear what an earlier run with other settings left.
        """

        def run() -> None:
            if before:
                before()
            for command in commands:
                self._console.print(f"$ {shlex.join(command)}", style="dim", highlight=False, soft_wrap=True)
                program, *arguments = command
                code = subprocess.run([sys.executable, "-m", MODULES[program], *arguments], check=False).returncode
                if code:
                    raise StageFailed(name, code)

        self.call(name, key or [list(command) for command in commands], run)

    def call(self, name: str, key: object, function: Callable[[], object]) -> None:
        """Call ``function`` unless the stage finished before with the same ``key`` (anything JSON can hold)."""
        key = json.loads(json.dumps(key))
        entry = self._record.get(name)
        if entry and entry["key"] == key and not self._ran:
            self._console.print(f"{name}: done before, in {entry['seconds']:.0f} s", style="dim", highlight=False)
            return
        self._ran = True
        self._record.pop(name, None)
        self._save()
        self._console.rule(f"[bold]{name}", align="left")
        start = time.monotonic()
        function()
        self._record[name] = {"key": key, "seconds": round(time.monotonic() - start, 1)}
        self._save()

    def _save(self) -> None:
        write_whole(self._file, json.dumps(self._record, indent=2) + "\n")
