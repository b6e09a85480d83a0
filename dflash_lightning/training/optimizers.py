"""The optimizer: AdamW, or Muon for the matrices beside AdamW for the norms, with its learning rate over the steps."""

import math
from dataclasses import dataclass

import lightning as L
import torch
from torch import nn

from dflash_lightning.errors import ConfigError
from dflash_lightning.training.strategy import DFlashDeepSpeedStrategy

# At stage 0 a step that is left out would still move the weights, and in bfloat16 DeepSpeed takes another road there.
MUON_STAGES = (1, 2)


@dataclass(frozen=True)
class MuonSettings:
    """Muon (momentum, made orthogonal by Newton-Schulz steps) by DeepSpeed, which shards its state."""

    lr: float = 0.02
    """Peak learning rate of the matrices: the size of an update in spectral norm. Same warm-up and decay."""
    momentum: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"muon lr is {self.lr}; expected a positive number.")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"muon momentum is {self.momentum}; expected 0 to below 1.")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, or Muon for the matrices and AdamW for the rest, with linear warm-up and cosine decay over the trainer's
    ``max_steps`` (paper appendix A.1)."""

    lr: float = 6e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_ratio: float = 0.04
    """Share of max_steps in which the learning rate rises."""
    muon: MuonSettings | None = None
    """Given, the matrices are trained by Muon."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"lr is {self.lr}; expected a positive number.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas are {self.betas}; expected two numbers from 0 to below 1.")
        for name in ("eps", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 0 or more.")
        if not 0 <= self.warmup_ratio < 1:
            raise ConfigError(f"warmup_ratio is {self.warmup_ratio}; expected 0 to below 1.")

    def check_trainer(self, trainer: L.Trainer) -> None:
        """Refuse a trainer that Muon would go wrong with.

        Raises:
            ConfigError: with what to set instead.
        """
        if self.muon is None:
            return
        strategy = trainer.strategy
        if not isinstance(strategy, DFlashDeepSpeedStrategy) or strategy.stage not in MUON_STAGES:
            raise ConfigError(
                "optimizer.muon needs trainer.strategy dflash_lightning.training.strategy.DFlashDeepSpeedStrategy at "
                "ZeRO stage 1 or 2: DeepSpeed's Muon is part of them. Choose it, or leave optimizer.muon out."
            )
        if trainer.gradient_clip_val:
            raise ConfigError(
                f"trainer.gradient_clip_val is {trainer.gradient_clip_val} with optimizer.muon. DeepSpeed clips after "
                "Muon has made its update of the gradient, whose norm doesn't depend on the gradient's: that would "
                "scale the learning rates of all weights down. Set it to null."
            )

    def scale(self, step: int, max_steps: int) -> float:
        """Factor on the peak learning rate at optimizer step ``step`` (0-based)."""
        warmup = max(1, round(self.warmup_ratio * max_steps))
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, max_steps - warmup)))


def make_optimizer(drafter: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer of a drafter, at the peak learning rate."""
    adamw = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps, "weight_decay": settings.weight_decay}
    if settings.muon is None:
        return torch.optim.AdamW(drafter.parameters(), fused=True, **adamw)
    # Not at the top: DeepSpeed chooses its accelerator when it is imported.
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    if not torch.cuda.is_available():
        # It is wrapped in torch.compile, which takes minutes and a C++ compiler on CPU.
        torch.compiler.set_stance("force_eager")
    matrices, others = [], []
    for parameter in drafter.parameters():
        parameter.use_muon = parameter.dim() == 2  # DeepSpeed's mark
        (matrices if parameter.use_muon else others).append(parameter)
    muon = {"lr": settings.muon.lr, "momentum": settings.muon.momentum, "weight_decay": settings.weight_decay}
    return MuonWithAuxAdam(
        [
            {"params": matrices, "use_muon": True, "ns_method": "standard", **muon},
            {"params": others, "use_muon": False, **adamw},
        ]
    )
