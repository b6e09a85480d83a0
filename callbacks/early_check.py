"""What a callback can refuse before processes are started and DeepSpeed is set up."""

from lightning.pytorch.callbacks import Callback


class CheckedEarly(Callback):
    """A callback that `fit` asks, on every rank, before it starts; what rank 0 alone does is for it alone to check."""

    def check(self) -> None:
        """Refuse settings with which training would end later. Raises DFlashError."""
