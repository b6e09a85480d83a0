"""Lightning callbacks of dflash_lightning."""

from callbacks.acceptance import DecodedAcceptance
from callbacks.export import ExportDrafter
from callbacks.preemption import SaveOnSignal
from callbacks.throughput import Throughput

__all__ = ["DecodedAcceptance", "ExportDrafter", "SaveOnSignal", "Throughput"]
