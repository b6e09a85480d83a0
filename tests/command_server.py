"""Runs commands in forks of a process that has imported everything already: they start in milliseconds.

A program for tests. Lines of JSON on stdin: {"arguments": [...], "environment": {...}} starts a command and answers
with its process id; {"wait": pid} answers with its exit code (negative: the signal that ended it).
"""

import json
import os
import sys

import transformers.models.llama.modeling_llama  # noqa: F401

import dflash_lightning.capture  # noqa: F401
from dflash_lightning.cli import command_parser, main


def answer(value: int) -> None:
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


def start(arguments: list[str], environment: dict[str, str]) -> int:
    process = os.fork()
    if process:
        return process
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
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
    command_parser("capture")
    answer(os.getpid())
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]))
        else:
            answer(start(**request))
