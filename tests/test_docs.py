"""README and docs agree with the code: commands parse, links lead somewhere, the reference is up to date."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from dflash_lightning.cli import COMMANDS, command_parser
from dflash_lightning.training.fit import fit

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = re.compile(r"^\s*(?:torchrun .* -m dflash_lightning|dflash-lightning|srun .* dflash-lightning)\s+(.+)$")
BENCHMARK = re.compile(r"python (benchmarks/\w+\.py)([^`)\n]*)")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def joined_lines(page: Path) -> list[str]:
    """Lines, with those that end in a backslash joined to the next."""
    return re.sub(r"\\\n\s*", "", page.read_text()).splitlines()


def commands() -> list[tuple[str, str]]:
    """Page and arguments of each of our commands that stands on a line of its own."""
    return [
        (page.name, match[1].split("  #")[0])
        for page in PAGES
        for line in joined_lines(page)
        if (match := OURS.match(line)) and "..." not in line and "COMMAND" not in line
    ]


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_are_ones_that_the_code_takes(page, command, monkeypatch, capsys):  # noqa: ARG001
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    name = next(name for name in COMMANDS if words[: len(name.split())] == name.split())
    arguments = words[len(name.split()) :]
    if name == "fit":
        with pytest.raises(SystemExit) as stop:
            fit([*arguments, "--print_config"])
        assert stop.value.code == 0
    else:
        command_parser(name).parse_args(arguments)


def test_there_are_commands_to_check():
    named = {next(name for name in COMMANDS if command.startswith(name)) for _, command in commands()}
    assert {"prepare", "capture", "fit", "evaluate", "export", "generate"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_benchmarks_have_the_options_that_pages_name(page):
    for script, options in BENCHMARK.findall("\n".join(joined_lines(page))):
        source = (ROOT / script).read_text()
        for option in re.findall(r"--[\w-]+", options):
            assert f'"{option}"' in source, f"{script} has no {option}"


def anchors(page: Path) -> set[str]:
    """The anchors that headings get."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), f"{target}#{anchor}"


def test_every_page_is_linked_from_another():
    linked = {(page.parent / target).resolve() for page in PAGES for target, _ in LINK.findall(page.read_text())}
    assert set(PAGES[1:]) <= linked


def test_the_reference_is_what_the_code_says():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "make docs"
