"""The command ``doctor``."""

import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dflash_lightning.doctor.packages import check_packages, check_quickstart
from dflash_lightning.doctor.verdict import Verdict
from dflash_lightning.wording import counted

STYLES = {"ok": "green", "doubtful": "yellow", "fails": "bold red"}
WIDTH = len("held-out prompts")


def doctor(
    target: str | None = None,
    data: Path | None = None,
    cache: str | None = None,
    training: Path | None = None,
    folder: Path = Path("runs"),
) -> None:
    """Look at packages, machine, and the parts of a run that are given, and say what would go wrong and what to do.

    A line for each check: ok; doubtful, where it may work, but slowly or not for long; fails, where a run would end.
    The exit code is 1 if anything fails, else 0. Nothing is written; a target from the hub is downloaded.

    Args:
        target: folder, hub name or .gguf file of a target: is it loaded, and does it answer?
        data: folder that `prepare` wrote: is it whole, and of this target?
        cache: folder or URL of a feature cache: is it complete, and of this target and data?
        training: configuration of a training (YAML for `fit`): are its settings known, do they go together, and do
            cache, prompts and disk do for it?
        folder: where runs are to be written, for the free disk.
    """
    failed = 0
    for verdict in _checks(target, data, cache, training, folder):
        Console().print(_line(verdict), soft_wrap=True)
        failed += verdict.state == "fails"
    if failed:
        Console().print(Text(f"{counted(failed, 'check')} failed", style=STYLES["fails"]))
        sys.exit(1)


def _checks(
    target: str | None, data: Path | None, cache: str | None, training: Path | None, folder: Path
) -> Iterator[Verdict]:
    yield from check_packages()
    yield check_quickstart()
    parts = any(part is not None for part in (target, data, cache, training))
    try:
        from dflash_lightning.doctor.machine import check_machine
        from dflash_lightning.doctor.ranks import check_ranks

        if parts:
            from dflash_lightning.doctor.parts import Parts
    except ImportError as error:  # a package is missing, or too old for another one
        yield Verdict("other checks", "fails", f"not made: {error}", "Mend the packages first.")
        return
    yield from check_machine(folder)
    yield from check_ranks()
    if parts:
        yield from Parts(target, data, cache, training).check()


def _line(verdict: Verdict) -> Text:
    line = Text(f"{verdict.state:<8} ", style=STYLES[verdict.state])
    line.append(f"{verdict.subject:<{WIDTH}} ", style="bold")
    line.append(verdict.found, style="default")
    if verdict.advice:
        line.append(f"\n{'':<{len('doubtful') + WIDTH + 2}}{verdict.advice}", style="default")
    return line
