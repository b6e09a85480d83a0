"""What to tell when a package isn't installed. Imports nothing but Python's own, so that it always can be told."""

import re
from importlib import metadata

PROJECT = "dflash-lightning"
OURS = ("dflash_lightning", "callbacks", "datamodules")
# Where the name that is imported isn't the name that is installed.
PACKAGES = {"yaml": "pyyaml", "docstring_parser": "docstring-parser"}


def missing_package(error: ImportError) -> str | None:
    """Which package isn't there, and the command that installs it; None where it isn't that."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None or error.name.partition(".")[0] in OURS:
        return None
    module = error.name.partition(".")[0]
    name = PACKAGES.get(module, module)
    try:
        required = metadata.requires(PROJECT) or ()
    except metadata.PackageNotFoundError:
        required = ()
    wanted = next((line for line in required if re.match(r"[\w.-]+", line)[0].lower() == name), name)
    return f"the package {name} isn't installed. Install it by `pip install '{wanted}'`, or everything by `make setup`."
