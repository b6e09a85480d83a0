"""Errors that a user can cause. Each message says what was found, what was expected and what to do.

The command line prints them as one message, without a traceback. Everything else that goes wrong is a fault of ours
and keeps its traceback.
"""


class DFlashError(ValueError):
    """Base of all errors that a user can cause."""


class ConfigError(DFlashError):
    """A setting is out of its range, or two settings contradict each other."""


class TargetError(DFlashError):
    """The target can't be loaded, or isn't the one that the data was made with."""


class DataError(DFlashError):
    """A prompts or answers file is malformed; the message names the file and the line."""


class CacheError(DFlashError):
    """A feature cache is incomplete, damaged, or belongs to another target or other layers."""


class CheckpointError(DFlashError):
    """A training checkpoint can't be written, is incomplete, or doesn't fit the run that would go on from it."""


class TrainingError(DFlashError):
    """Training can't go on with the numbers that it computes."""


class LostRankError(DFlashError):
    """Another process of the run ended, or its machine can't be reached any more."""


class ExportError(DFlashError):
    """A drafter folder can't be written or read."""
