"""What to tell when a package isn't installed. Imports nothing but Python's own, so that it always can be told."""

import re
from importlib import metadata
from importlib.util import find_spec

PROJECT = "dflash-lightning"
OURS = ("dflash_lightning", "callbacks", "datamodules")
# Where the name that is imported isn't the name that is installed.
PACKAGES = {"yaml": "pyyaml", "PIL": "pillow"}


def missing_package(error: ImportError) -> str | None:
    """Which package isn't there, and the command that installs it; None where it isn't that."""
    module = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not module or module in OURS or find_spec(module):
        return None
    name = PACKAGES.get(module, module.replace("_", "-"))
    try:
        required = metadata.requires(PROJECT) or ()
    except metadata.PackageNotFoundError:
        required = ()
    wanted = next((line for line in required if re.match(r"[\w.-]+", line)[0].lower() == name.lower()), None)
    how = f"Install it by `pip install '{wanted}'`, or everything by `make setup`." if wanted else "Run `make setup`."
    return f"the package {name} isn't installed. {how}"
