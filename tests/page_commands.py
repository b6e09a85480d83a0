"""The commands that README and docs show, and the test file that runs each."""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dflash_lightning.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Beginning of a command -> the file that runs it, with smaller sizes and what it names in place; the first that fits.
RUN_BY = {
    "make quickstart": "test_quickstart.py",
    "make docs": "test_docs.py",
    "torchrun --nproc-per-node 8 -m dflash_lightning capture": "test_placement.py",
    "torchrun --standalone --nproc-per-node 8 -m dflash_lightning evaluate": "test_evaluation_command.py",
    "sbatch conf/cluster/slurm.sh": "test_preemption.py",
    "conf/cluster/torchrun.sh": "test_nodes.py",
    "dflash-lightning capture ... --cache s3://": "test_remote_cache.py",
    "dflash-lightning cache verify s3://": "test_remote_cache.py",
    "dflash-lightning ": "test_road.py",
    "tensorboard ": "test_road.py",
    "python benchmarks/linear_cross_entropy.py": "test_train_step.py",
    "python benchmarks/train_step.py fit": "test_benchmarks.py",
    "python benchmarks/train_step.py": "test_train_step.py",
    "python benchmarks/": "test_benchmarks.py",
}
# Beside those that a page marks.
NOT_RUN = {
    "make test": "runs the tests",
    '.venv/bin/python -m pytest -m "not slow and not real"': "runs the tests",
}

# A page says so where no test can run a command, out of a reader's sight: above a block, or right behind a command in a
# sentence.
MARK = r"<!-- not run by tests: (?P<reason>[^>]+) -->"
BLOCK = re.compile(rf"(?:{MARK}\n)?^```bash\n(?P<commands>.*?)^```$", re.DOTALL | re.MULTILINE)
OTHER_BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<lines>.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(rf"`(?P<command>[^`]+)`(?:{MARK})?")
PROGRAM = re.compile(
    r"\s*(\w+=\S+ )*(dflash-lightning|torchrun|python|make|tensorboard|sbatch|srun|bash|hf|pip|vllm|llama-server|cmake"
    r"|ssh|conf/cluster/\w+\.sh|benchmarks/\w+\.py|\.venv/bin/\w+) \S"
)
ENVIRONMENT = re.compile(r"^(\w+=\S+ )+")


@dataclass(frozen=True)
class PageCommand:
    """A command on a page.

    Attributes:
        page: The page's file name.
        text: On one line, without variables of the environment and comments.
        reason: Why no test runs it; None where one does.
    """

    page: str
    text: str
    reason: str | None

    @property
    def runner(self) -> str | None:
        """The test file that is to run it."""
        return next((file for start, file in RUN_BY.items() if self.text.startswith(start)), None)


def page_commands(page: Path) -> list[PageCommand]:
    """All commands of a page, in order: first those of its blocks, then those in its sentences."""
    text = page.read_text()
    found = [
        (line, block["reason"])
        for block in BLOCK.finditer(text)
        for line in re.sub(r"\s*\\\n\s*", " ", block["commands"]).splitlines()
    ]
    sentences = " ".join(OTHER_BLOCK.sub("", text).split())
    found += [
        (match["command"], match["reason"])
        for match in INLINE.finditer(sentences)
        if PROGRAM.match(match["command"]) and match["command"].removeprefix("dflash-lightning ") not in COMMANDS
    ]
    return [
        PageCommand(page.name, command, reason or NOT_RUN.get(command))
        for line, reason in found
        if (command := ENVIRONMENT.sub("", " ".join(line.split("  #")[0].split())))
    ]


def commands_run_by(test_file: str) -> list[str]:
    """The different commands that a test file (its ``__file__``) is to run, in the pages' order."""
    commands = [command for page in PAGES for command in page_commands(page)]
    mine = [one.text for one in commands if one.reason is None and one.runner == Path(test_file).name]
    return list(dict.fromkeys(mine))


def command_line(command: str, changes: dict[str, list[str]] | None = None) -> list[str]:
    """The words of a command, its program that of this environment.

    Args:
        changes: Words in whose place others stand.
    """
    words = [new for word in shlex.split(command) for new in (changes or {}).get(word, [word])]
    program = Path(sys.executable).parent / words[0]
    return [str(program), *words[1:]] if program.exists() else words


def recipe(target: str) -> list[str]:
    """The words of the last command that `make` would run for a target, its program that of this environment."""
    make = ["make", "--dry-run", "--no-print-directory", "--assume-old=.venv/installed", target]
    found = subprocess.run(make, check=True, capture_output=True, text=True, cwd=ROOT)
    return command_line(found.stdout.splitlines()[-1].removeprefix(".venv/bin/"))
