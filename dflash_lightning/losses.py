"""The loss: cross entropy of the supervised slots, weighted so that early slots count more.

The whole [slots, vocabulary] matrix of logits never exists. The head is frozen, so the gradient of a slot's cross
entropy with respect to its hidden state can be computed together with the value, chunk by chunk; backward only scales
it. Weighting schemes then work on a [rows, blocks, slots] grid of plain numbers.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dflash_lightning.blocks import Blocks
from dflash_lightning.errors import ConfigError

# Logits of a chunk take 4 bytes x chunk elements in float32.
CHUNK_ELEMENTS = 1 << 23
DEFAULT_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


@dataclass(frozen=True)
class LossSettings:
    """How the slots of a block are weighted."""

    weighting: Literal["decay", "dpace", "uniform"] = "decay"
    """decay: exp(-(k-1)/gamma), the paper's. dpace: by the probability that the slot is reached (arXiv 2605.18810).
    uniform: the ablation."""
    gamma: float | None = None
    """Decay rate in slots. Default by block size: 7 for 16, 5 for 10, 4 for 8, and in proportion between."""
    alpha: float = 0.5
    """Smoothing of D-PACE's probabilities: (1 - alpha) q + alpha."""

    def __post_init__(self) -> None:
        if self.gamma is not None and not self.gamma > 0:
            raise ConfigError(f"loss gamma is {self.gamma}; expected a positive number of slots.")
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"loss alpha is {self.alpha}; expected 0 to 1.")

    def resolve_gamma(self, block_size: int) -> float:
        if self.gamma is not None:
            return self.gamma
        return DEFAULT_GAMMA.get(block_size, 7.0 * block_size / 16)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        rows = max(1, CHUNK_ELEMENTS // head.shape[0])
        # float32 at least: a float64 caller (the tests) keeps its precision.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        entropy = torch.empty(len(labels), dtype=dtype, device=hidden.device)
        correct = torch.empty(len(labels), dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(labels), rows):
            chunk = slice(start, start + rows)
            label = labels[chunk, None]
            logits = (hidden[chunk] @ head.T).to(dtype)
            largest, best = logits.max(dim=-1, keepdim=True)
            label_logit = logits.gather(1, label)
            correct[chunk] = (best == label).squeeze(1)
            exponentials = logits.sub_(largest).exp_()
            total = exponentials.sum(dim=-1, keepdim=True)
            entropy[chunk] = (largest + total.log() - label_logit).squeeze(1)
            if gradient is not None:
                expected = (exponentials.to(hidden.dtype) @ head).to(dtype) / total
                gradient[chunk] = expected - head[labels[chunk]]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return entropy, correct

    @staticmethod
    def backward(ctx, entropy_gradient: Tensor, _correct_gradient: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * entropy_gradient[:, None].to(gradient.dtype), None, None


def linear_cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row under a frozen head, without ever holding all logits.

    Args:
        hidden: [M, H]; the gradient flows here only.
        head: [V, H], frozen.
        labels: [M] int64.

    Returns:
        Cross entropy [M], float32 (float64 for float64 input), and whether the most likely token is the label [M].
    """
    return _LinearCrossEntropy.apply(hidden, head, labels)


@dataclass(frozen=True)
class SlotResults:
    """What the drafter made of each slot of a batch.

    Attributes:
        entropy: [R, N, B] cross entropy, 0 where unsupervised; carries the gradient.
        correct: [R, N, B] the drafter's argmax is the label; False where unsupervised.
        supervised: [R, N, B] as in ``Blocks``.
        valid: [R, N] as in ``Blocks``.
    """

    entropy: Tensor
    correct: Tensor
    supervised: Tensor
    valid: Tensor

    @property
    def accepted_lengths(self) -> Tensor:
        """[valid blocks] 1 + leading correct slots of each valid block: what greedy verification would commit if the
        text were the target's own (teacher-forced)."""
        leading = self.correct[..., 1:].cumprod(dim=-1).sum(dim=-1)
        return 1 + leading[self.valid]


def score_slots(hidden: Tensor, head: Tensor, blocks: Blocks) -> SlotResults:
    """Score the supervised slots of ``blocks`` from the drafter's output ``hidden`` [R, N*B, H]."""
    flat = hidden.view(*blocks.labels.shape, -1)
    entropy, correct = linear_cross_entropy(flat[blocks.supervised], head, blocks.labels[blocks.supervised])
    # masked_scatter keeps an empty selection tied to the graph: a rank without anchors joins every collective.
    grid = entropy.new_zeros(blocks.labels.shape)
    return SlotResults(
        entropy=grid.masked_scatter(blocks.supervised, entropy),
        correct=torch.zeros_like(blocks.supervised).masked_scatter(blocks.supervised, correct),
        supervised=blocks.supervised,
        valid=blocks.valid,
    )


def slot_weights(results: SlotResults, settings: LossSettings) -> Tensor:
    """Weight [R, N, B] of each slot's cross entropy, detached, so that a step's loss is sum(weight * entropy) / A with
    A the valid anchors of the whole optimizer step.

    decay and uniform weights of a whole block sum to 1. D-PACE's don't: its weight mass grows as the drafter learns,
    and dividing it out would change the objective.
    """
    supervised = results.supervised
    if settings.weighting == "dpace":
        return _dpace_weights(results.entropy.detach(), supervised, settings.alpha)
    block_size = supervised.shape[-1]
    distance = torch.arange(block_size - 1, device=supervised.device, dtype=results.entropy.dtype)
    if settings.weighting == "decay":
        weights = torch.exp(-distance / settings.resolve_gamma(block_size))
    else:
        weights = torch.ones_like(distance)
    weights = torch.cat((weights.new_zeros(1), weights / weights.sum()))
    return weights * supervised


def _dpace_weights(entropy: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """w_j = sum over m >= j of prod over i <= m of q~_i, with q~ = (1 - alpha) q + alpha and q the label's probability.

    Unsupervised slots count as factor 1 and are left out of the sum.
    """
    probability = (1 - alpha) * torch.exp(-entropy) + alpha
    reach = torch.where(supervised, probability, 1.0).cumprod(dim=-1) * supervised
    return reach.flip(-1).cumsum(dim=-1).flip(-1) * supervised


def weighted_loss(results: SlotResults, settings: LossSettings) -> Tensor:
    """Sum over the batch of weight x cross entropy. Divide by the optimizer step's valid anchors."""
    return (slot_weights(results, settings) * results.entropy).sum()
