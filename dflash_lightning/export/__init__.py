"""A trained drafter as folders that serve: one format a file, read back by the same code that writes them.

`export` is the command; `load_drafter` loads a drafter for decoding from any exported folder or training checkpoint.
"""

from dflash_lightning.export.card import Provenance
from dflash_lightning.export.command import export
from dflash_lightning.export.folder import check_free, export_drafter, parse_formats
from dflash_lightning.export.format import TokenIds, Verifier
from dflash_lightning.export.layout import tensor_shapes
from dflash_lightning.export.loading import FORMATS, DrafterSource, check_fits_target, load_drafter, read_drafter

__all__ = [
    "FORMATS",
    "DrafterSource",
    "Provenance",
    "TokenIds",
    "Verifier",
    "check_fits_target",
    "check_free",
    "export",
    "export_drafter",
    "load_drafter",
    "parse_formats",
    "read_drafter",
    "tensor_shapes",
]
