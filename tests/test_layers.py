"""Folders build on each other in one direction, and a command imports none of the packages for training.

By the source, ours only: what other packages import isn't looked at.
"""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest

from dflash_lightning.cli import COMMANDS

ROOT = Path(__file__).parents[1]
OURS = ("dflash_lightning", "callbacks", "datamodules")
# Seconds each, which only training has a use for, or pictures.
SLOW = {"lightning", "deepspeed", "torchmetrics", "matplotlib", "tensorboard", "speculators"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for folder in OURS for path in (ROOT / folder).rglob("*.py")}
# They stand on top of everything, whichever folder they are in.
TOP = {place.split(":")[0] for place, _ in COMMANDS.values()} | {"dflash_lightning.quickstart.__main__"}


def imports(name: str, *, when_loaded: bool) -> Iterator[str]:
    """Modules that the source of a module of ours imports: anywhere, or at its top level alone."""
    tree = ast.parse(MODULES[name].read_text())
    for node in tree.body if when_loaded else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (inner if inner in MODULES else node.module for inner in whole)


def folder_of(module: str) -> str:
    """The part of the road that a module belongs to; one that is in no folder is a part of its own."""
    first, *inner = module.split(".")
    return inner[0] if first == "dflash_lightning" and inner else first


def test_no_folders_import_each_other():
    graph: dict[str, set[str]] = {}
    for name in MODULES.keys() - TOP:
        below = {folder_of(found) for found in imports(name, when_loaded=False) if found in MODULES}
        graph.setdefault(folder_of(name), set()).update(below - {folder_of(name)})
    order = list(TopologicalSorter(graph).static_order())  # CycleError names the cycle
    assert order.index("decoding") < order.index("export") < order.index("callbacks")


@cache
def loaded(name: str) -> frozenset[str]:
    """Packages that a module of ours imports at its top level, or another of ours that it imports so."""
    found: set[str] = set()
    seen, waiting = set(), [name]
    while waiting:
        for module in accumulate(waiting.pop().split("."), "{}.{}".format):  # and the packages that it is in
            if module not in MODULES:
                found.add(module.split(".")[0])
            elif module not in seen:
                seen.add(module)
                waiting += imports(module, when_loaded=True)
    return frozenset(found)


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"fit", "report"}))
def test_a_command_starts_without_the_packages_of_training(command):
    assert not loaded(COMMANDS[command][0].split(":")[0]) & SLOW


def test_packages_are_found_through_other_modules():
    assert {"torch", "lightning", "tensorboard"} <= loaded("dflash_lightning.training.fit")
