"""Runs commands and programs in forks of a process that has imported everything already: they start in milliseconds.

A program for tests; its arguments are the modules to import. Lines of JSON on stdin: {"arguments": [...],
"environment": {...}, "folder": path or null, "program": file or null, "log": file or null, "errors": file or null}
starts one and answers with its process id; {"wait": pid} answers with its exit code (negative: the signal that ended
it), or null while it runs. Its environment is the given one alone. What it prints goes to stderr, or to its log, and to
the file of errors. The server ends with its stdin.
"""

import json
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import TextIO

from dflash_lightning.cli import main


def answer(answers: TextIO, value: int | None) -> None:
    answers.write(f"{json.dumps(value)}\n")
    answers.flush()


def exit_code(process: int) -> int | None:
    ended, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def start(
    arguments: list[str],
    environment: dict[str, str],
    folder: str | None,
    program: str | None,
    log: str | None,
    errors: str | None,
) -> int:
    """Process id of the fork; the fork itself ends here, as a process of its own would."""
    process = os.fork()
    if process:
        return process
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    for path, descriptors in ((log, (1, 2)), (errors, (2,))):
        for descriptor in descriptors if path else ():
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(folder or os.curdir)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    if program:
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        main()
    sys.exit()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in sys.argv[1:]:
        import_module(module)
    answer(answers, os.getpid())
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer(answers, exit_code(request["wait"]))
        else:
            answer(answers, start(**request))
