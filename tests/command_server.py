"""Runs commands in forks of a process that has imported everything already: they start in milliseconds.

A program for tests; its arguments are the modules to import. Lines of JSON on stdin: {"arguments": [...],
"environment": {...}} starts a command and answers with its process id; {"wait": pid} answers with its exit code
(negative: the signal that ended it). What commands print goes to stderr.
"""

import json
import os
import sys
from importlib import import_module
from typing import TextIO

from dflash_lightning.cli import main


def answer(answers: TextIO, value: int) -> None:
    answers.write(f"{value}\n")
    answers.flush()


def start(arguments: list[str], environment: dict[str, str]) -> int:
    process = os.fork()
    if process:
        return process
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    code = 1
    try:
        main()
        code = 0
    except SystemExit as exit:
        code = exit.code
    finally:
        os._exit(code)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in sys.argv[1:]:
        import_module(module)
    answer(answers, os.getpid())
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer(answers, os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]))
        else:
            answer(answers, start(**request))
