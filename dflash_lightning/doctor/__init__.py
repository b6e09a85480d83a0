"""The command ``doctor``: whether packages, machine and the parts of a run would do, before hours go into them."""

from dflash_lightning.doctor.command import doctor

__all__ = ["doctor"]
