"""How fast training goes, how much of it is waiting for data, how much of the data is padding; and memory."""

import resource
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch._dynamo.utils import counters

from datamodules.loader import ResumableLoader
from dflash_lightning.training.module import ContextBatch

GIB = 2**30


class Throughput(Callback):
    """Logs label tokens/s over all ranks, seconds a step, the shares of waiting for data and of padding, and memory.

    A step's seconds are those that its micro-batches were waited for and those that they were computed in. Validation
    and checkpoints aren't counted. ``perf/label_tokens`` and ``perf/training_seconds`` are totals since the first step;
    after a resume they go on from the last log line before the checkpoint. Memory is the most that a rank has taken
    so far: ``perf/device_memory_gib`` by torch on its GPU (0 on CPU), ``perf/host_memory_gib`` by its process.
    """

    def __init__(self) -> None:
        self.label_tokens, self.training_seconds = 0, 0.0
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        return {"label_tokens": self.label_tokens, "training_seconds": self.training_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.label_tokens, self.training_seconds = state_dict["label_tokens"], state_dict["training_seconds"]

    def _reset(self) -> None:
        self._counts = torch.zeros(2, dtype=torch.long)  # label tokens, padding among the context tokens
        self._context = 0  # context tokens
        self._waited, self._computed, self._steps = 0.0, 0.0, 0  # seconds, seconds, optimizer steps

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        loader: ResumableLoader = trainer.train_dataloader
        self._waited += loader.last_wait
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: dict, batch: ContextBatch, batch_index: int
    ) -> None:
        documents = batch["document_ids"]
        counts = torch.stack([outputs["num_labels"], (documents < 0).sum()])
        self._counts = self._counts.to(counts.device) + counts
        self._context += documents.numel()
        ends_step = (batch_index + 1) % trainer.accumulate_grad_batches == 0
        if ends_step:
            self._counts = self._counts.cpu()  # waits until the device is done, as the seconds want it
        self._computed += time.perf_counter() - self._start
        if not ends_step:
            return
        self._steps += 1
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer, pl_module)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        counts = torch.tensor([*self._counts.tolist(), self._context], device=pl_module.device)
        labels, padding, context = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        self.label_tokens += labels
        memory = trainer.strategy.reduce(_peak_memory(pl_module.device), reduce_op="max").tolist()
        seconds = self._waited + self._computed
        self.training_seconds += seconds
        pl_module.log_dict(
            {
                "perf/label_tokens_per_second": labels / seconds,
                "perf/step_seconds": seconds / self._steps,
                "perf/data_wait_share": self._waited / seconds,
                "perf/padding_share": padding / context,
                "perf/label_tokens": float(self.label_tokens),
                "perf/training_seconds": self.training_seconds,
                "perf/device_memory_gib": memory[0],
                "perf/host_memory_gib": memory[1],
                "perf/compiled_graphs": float(counters["stats"]["unique_graphs"]),
            }
        )
        self._reset()


def _peak_memory(device: torch.device) -> torch.Tensor:
    """[2] GiB that this rank has taken at most: on its GPU, and of the machine's memory."""
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.tensor([on_device, on_host], device=device, dtype=torch.float32) / GIB
