"""README and docs agree with the code: commands are run, links lead somewhere, the reference is up to date."""

import importlib.util
import re
from pathlib import Path

import pytest
from page_commands import NOT_RUN, OTHER_BLOCK, PAGES, PROGRAM, ROOT, commands_run_by, page_commands, recipe

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
# Test files that run every block of Python of a page.
PYTHON_RUN_BY = {"cache-format.md": "test_cache_format.py", "serving.md": "test_serving.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_test_runs_every_command_or_the_page_says_why_not(page):
    for command in page_commands(page):
        assert command.reason or command.runner, f"no test runs `{command.text}`"
        if command.reason is None:
            assert "commands_run_by(__file__)" in (Path(__file__).parent / command.runner).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_stand_in_blocks_of_their_own(page):
    """Nothing that looks like a command is missed, as it stands among something else."""
    text = page.read_text()
    languages = {block["language"] for block in OTHER_BLOCK.finditer(text)}
    assert languages <= {"", "bash", "python", "yaml"}
    assert "python" not in languages or page.name in PYTHON_RUN_BY
    lines = re.sub(r"^```bash\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    assert [line for line in lines if PROGRAM.match(line)] == []


def test_what_is_not_run_is_still_on_a_page():
    assert set(NOT_RUN) <= {command.text for page in PAGES for command in page_commands(page)}


def source_of_benchmark(script: Path) -> str:
    """Its own, and that of the modules beside it which it imports."""
    source = script.read_text()
    beside = (script.with_name(f"{name}.py") for name in re.findall(r"^from (\w+) import", source, re.MULTILINE))
    return "\n".join([source, *(module.read_text() for module in beside if module.exists())])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_benchmarks_that_are_not_run_have_the_options_that_pages_name(page):
    for command in page_commands(page):
        if command.reason and (script := re.search(r"benchmarks/\w+\.py", command.text)):
            source = source_of_benchmark(ROOT / script[0])
            for option in re.findall(r"--[\w-]+", command.text):
                assert f'"{option}"' in source, f"{script[0]} has no {option}"


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
    assert commands_run_by(__file__) == ["make docs"]
    _, script = recipe("docs")
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "make docs"
