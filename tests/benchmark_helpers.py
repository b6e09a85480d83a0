"""Runs benchmarks."""

import sys
from contextlib import chdir, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from page_commands import ROOT, command_line

BENCHMARKS = ROOT / "benchmarks"


def name_of(command: str) -> str:
    """The benchmark that a command starts."""
    return Path(command.split()[1]).stem


def benchmark(command: str, folder: Path, *more: str) -> str:
    """What a benchmark's command prints, run in this process: importing everything anew would take longest.

    Args:
        folder: Where it is run.
        more: Arguments that are added.
    """
    _, script, *arguments = command_line(command)
    with (
        patch.object(sys, "path", [str(BENCHMARKS), *sys.path]),
        patch.object(sys, "argv", [script, *arguments, *more]),
        chdir(folder),
        redirect_stdout(StringIO()) as printed,
    ):
        import_module(name_of(command)).main()
    return printed.getvalue()
