"""Metrics of scored blocks, summed over batches and ranks before any division."""

import torch
from torch import Tensor
from torchmetrics import Metric

from dflash_lightning.training.losses import SlotResults


class BlockMetrics(Metric):
    """Loss, accuracy by slot, and teacher-forced acceptance length of the blocks seen since the last reset.

    ``compute`` returns a dict:

    - ``loss``: weighted loss per valid anchor, as in the objective.
    - ``cross_entropy``: mean over supervised slots, in nats, whatever the weighting.
    - ``accuracy``, ``accuracy_slot_<k>``: share of supervised slots whose most likely token is the label.
    - ``teacher_forced_tau``: mean over valid blocks of 1 + leading correct slots. It reads the text as given; decoding
      isn't involved, see ``decode/tau`` for that.

    Before any block was seen the values are NaN.
    """

    full_state_update = False

    def __init__(self, block_size: int):
        super().__init__()
        self.add_state("loss_sum", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("entropy_sum", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("correct", torch.zeros(block_size, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("supervised", torch.zeros(block_size, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("accepted", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("blocks", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, results: SlotResults, loss: Tensor) -> None:
        """Add a batch; ``loss`` is its weighted sum, not yet divided by the anchors."""
        self.loss_sum += loss.detach()
        self.entropy_sum += results.entropy.detach().sum()
        self.correct += results.correct.sum(dim=(0, 1))
        self.supervised += results.supervised.sum(dim=(0, 1))
        self.accepted += results.accepted_lengths.sum()
        self.blocks += results.valid.sum()

    def compute(self) -> dict[str, Tensor]:
        values = {
            "loss": self.loss_sum / self.blocks,
            "cross_entropy": self.entropy_sum / self.supervised.sum(),
            "accuracy": self.correct.sum() / self.supervised.sum(),
            "teacher_forced_tau": self.accepted / self.blocks,
        }
        for slot in range(1, len(self.correct)):
            values[f"accuracy_slot_{slot}"] = self.correct[slot] / self.supervised[slot]
        return values
