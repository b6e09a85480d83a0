"""The training steps that train_step.py measures: ours and a straightforward one, on random samples of one cache."""

import argparse
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import lightning as L
import numpy as np
import torch
from reference_drafter import ReferenceDrafter

from datamodules.loader import MicroBatchDataset
from datamodules.sampler import MicroBatch
from dflash_lightning import __version__
from dflash_lightning.blocks import sample_anchors
from dflash_lightning.cache import CacheManifest, FeatureCache, Sample, TargetIdentity, create_or_join
from dflash_lightning.config import DrafterConfig
from dflash_lightning.drafter import Drafter
from dflash_lightning.training.losses import LossSettings, weighted_loss
from dflash_lightning.training.module import score_batch
from dflash_lightning.visibility import dense_mask

MASK_TOKEN_ID, PROMPT_SHARE, STEPS_IN_CACHE = 3, 0.25, 4


@dataclass(frozen=True)
class Shape:
    """A drafter and a step: ``rows`` samples of about ``tokens`` tokens, ``anchors`` blocks each."""

    hidden: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    intermediate: int = 1536
    vocab: int = 49152
    taps: int = 5
    layers: int = 2
    block_size: int = 8
    anchors: int = 24
    tokens: int = 120
    rows: int = 4

    def config(self) -> DrafterConfig:
        return DrafterConfig(
            num_layers=self.layers,
            block_size=self.block_size,
            mask_token_id=MASK_TOKEN_ID,
            target_layer_ids=tuple(range(self.taps)),
            num_target_layers=self.taps + 2,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        )


QWEN3_4B_SCALED = Shape(
    hidden=2560,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=9728,
    vocab=151936,
    block_size=16,
    anchors=32,
    tokens=384,
    rows=2,
)
SHAPES = {
    "tiny": Shape(
        hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=64, vocab=272, taps=2, anchors=3, tokens=24, rows=2
    ),
    "quickstart": Shape(),
    "qwen3-4b-scaled": QWEN3_4B_SCALED,
    # A micro-batch of the paper's recipe; for a GPU.
    "qwen3-4b": replace(QWEN3_4B_SCALED, layers=5, anchors=512, tokens=3072, rows=1),
}


def write_random_cache(folder: Path, shape: Shape) -> FeatureCache:
    """Samples for a few steps, of lengths between 2/3 and 1 of ``shape.tokens``."""
    rng, samples = np.random.default_rng(0), []
    for number in range(STEPS_IN_CACHE * shape.rows):
        tokens = int(rng.integers(2 * shape.tokens // 3, shape.tokens + 1))
        samples.append(
            Sample(
                sample_id=str(number),
                input_ids=rng.integers(4, shape.vocab, tokens, dtype=np.int32),
                loss_mask=(np.arange(tokens) >= PROMPT_SHARE * tokens).astype(np.uint8),
                features=torch.from_numpy(
                    rng.standard_normal((tokens, shape.taps * shape.hidden), dtype=np.float32)
                ).bfloat16(),
            )
        )
    manifest = CacheManifest(
        target=TargetIdentity("random", "", *3 * ("0" * 64,)),
        target_layer_ids=tuple(range(shape.taps)),
        hidden_size=shape.hidden,
        storage="bfloat16",
        compression="none",
        generation={},
        capture={},
        dataset_sha256="0" * 64,
        max_length=shape.tokens,
        source={},
        code_version=__version__,
        shard_samples=(len(samples),),
    )
    create_or_join(folder, manifest).write_shard(0, samples)
    return FeatureCache(folder)


@dataclass
class Seconds:
    """Where a step's time went."""

    data: float = 0.0
    gradient: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return self.data + self.gradient + self.optimizer


class Training(ABC):
    """A drafter in training on the steps of a cache, over and over; all cases start from the same weights."""

    optimizer: torch.optim.Optimizer

    def __init__(
        self, shape: Shape, cache: FeatureCache, *, dtype: torch.dtype, device: str, clock: Callable[[], float]
    ):
        self.shape, self.cache, self.dtype, self.device, self.clock = shape, cache, dtype, device, clock
        torch.manual_seed(0)
        self.table = torch.randn(shape.vocab, shape.hidden).mul_(0.02).to(device, dtype)
        self.initial = Drafter(shape.config())
        self.taken = 0

    @abstractmethod
    def add_gradient(self, indices: list[int], seconds: Seconds) -> int:
        """Forward and backward of a step on these samples; returns its supervised slots."""

    @abstractmethod
    def update(self) -> None:
        """Clip the gradient and step the optimizer."""

    def step(self) -> tuple[Seconds, int]:
        seconds = Seconds()
        first = self.taken % STEPS_IN_CACHE * self.shape.rows
        self.taken += 1
        labels = self.add_gradient(list(range(first, first + self.shape.rows)), seconds)
        start = self.clock()
        self.update()
        seconds.optimizer += self.since(start)
        return seconds, labels

    def since(self, start: float) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return self.clock() - start


class OurTraining(Training):
    """dflash_lightning's step as `fit` runs it: weights in ``dtype``, float32 masters, all samples in one forward."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drafter = self.initial
        self.masters = [p.detach().clone().to(self.device).requires_grad_() for p in self.drafter.parameters()]
        self.drafter.to(self.device, self.dtype)
        self.optimizer = make_optimizer(self.masters)
        self.loss = LossSettings("decay", gamma=self.shape.block_size / 2)
        self.dataset = MicroBatchDataset(self.cache, num_anchors=self.shape.anchors, seed=0)

    def add_gradient(self, indices: list[int], seconds: Seconds) -> int:
        start = self.clock()
        plan = MicroBatch(tuple(indices), tuple(indices), 0, self.shape.rows * self.shape.anchors)
        batch = {name: tensor.to(self.device) for name, tensor in self.dataset[plan].items()}
        seconds.data += self.since(start)
        start = self.clock()
        results, blocks = score_batch(self.drafter, batch, self.table, self.table)
        (weighted_loss(results, self.loss) / batch["anchors_in_step"]).backward()
        seconds.gradient += self.since(start)
        return int(blocks.supervised.sum())

    def update(self) -> None:
        for master, weight in zip(self.masters, self.drafter.parameters(), strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(self.drafter.parameters()), self.masters)


class DenseTraining(OurTraining):
    """Ours with SDPA and a dense mask where FlexAttention would be taken."""

    def add_gradient(self, indices: list[int], seconds: Seconds) -> int:
        with patch("dflash_lightning.training.module.attention_mask", dense_mask):
            return super().add_gradient(indices, seconds)


class ReferenceTraining(Training):
    """A straightforward step: float32 weights, autocast to ``dtype``, one sample after the other."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drafter = ReferenceDrafter(self.shape.config())
        self.drafter.load_state_dict(self.initial.state_dict())
        self.drafter.to(self.device)
        del self.initial
        self.optimizer = make_optimizer(self.drafter.parameters())

    def add_gradient(self, indices: list[int], seconds: Seconds) -> int:
        labels = 0
        for index in indices:
            start = self.clock()
            sample = self.cache.read(index)
            anchors = sample_anchors(sample.loss_mask, self.shape.anchors, seed=0, sample_id=sample.sample_id, epoch=0)
            tensors = (sample.features, *map(torch.from_numpy, (sample.input_ids, sample.loss_mask, anchors)))
            features, input_ids, loss_mask, anchors = (tensor.to(self.device) for tensor in tensors)
            seconds.data += self.since(start)
            start = self.clock()
            with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
                loss, supervised = self.drafter.loss(
                    features.to(self.dtype), input_ids.long(), loss_mask, anchors, self.table, self.table
                )
            (loss / (self.shape.rows * self.shape.anchors)).backward()
            labels += supervised
            seconds.gradient += self.since(start)
        return labels

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


CASES: dict[str, type[Training]] = {"ours": OurTraining, "ours-sdpa": DenseTraining, "reference": ReferenceTraining}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def make_optimizer(parameters) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0, fused=True)


def make_training(case: str, shape: Shape, cache: FeatureCache, options: argparse.Namespace) -> Training:
    dtype, clock = getattr(torch, options.dtype), CLOCKS[options.clock]
    return CASES[case](shape, cache, dtype=dtype, device=options.device, clock=clock)


def memory_in_bytes(name: str) -> int:
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def restart_peak_memory() -> int:
    """Let VmHWM begin anew; returns the memory in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_in_bytes("VmRSS")


class PeakMemory(L.Callback):
    """By how many MB training raised the memory of the process: gradients, optimizer state and activations."""

    rise = 0.0

    def on_train_start(self, *_) -> None:
        self._before = restart_peak_memory()

    def on_train_end(self, *_) -> None:
        self.rise = (memory_in_bytes("VmHWM") - self._before) / 1e6
