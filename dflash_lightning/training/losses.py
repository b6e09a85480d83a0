"""The loss: cross entropy of the supervised slots, weighted so that early slots count more.

The [slots, vocabulary] matrix of logits never exists. The head is frozen, so the gradient of a slot's cross entropy
with respect to its hidden state can be computed together with the value, piece by piece; backward only scales it.
Weighting schemes then work on a [rows, blocks, slots] grid of plain numbers.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dflash_lightning.blocks import Blocks
from dflash_lightning.errors import ConfigError

# Logits exist for so many slots and so many tokens of the vocabulary at a time: 6 bytes each in bfloat16 training.
CHUNK_SLOTS, CHUNK_VOCABULARY = 2048, 4096
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
    """Goes once through the vocabulary with a running maximum, as FlashAttention goes through its keys: each piece of
    the head is read once, and its logits are used up while they are in the cache."""

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # float32 at least: a float64 caller (the tests) keeps its precision.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        entropy = torch.empty(len(labels), dtype=dtype, device=hidden.device)
        correct = torch.empty(len(labels), dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        chunk_size = min(len(labels), CHUNK_SLOTS) * min(len(head), CHUNK_VOCABULARY)
        buffers = hidden.new_empty(chunk_size), entropy.new_empty(chunk_size)
        for start in range(0, len(labels), CHUNK_SLOTS):
            chunk = slice(start, start + CHUNK_SLOTS)
            scored = _score_chunk(hidden[chunk], head, labels[chunk, None], buffers, gradient is not None)
            entropy[chunk], correct[chunk], expected = scored
            if gradient is not None:
                gradient[chunk] = expected - head[labels[chunk]]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return entropy, correct

    @staticmethod
    def backward(ctx, entropy_gradient: Tensor, _correct_gradient: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * entropy_gradient[:, None].to(gradient.dtype), None, None


def _score_chunk(
    hidden: Tensor, head: Tensor, labels: Tensor, buffers: tuple[Tensor, Tensor], with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross entropy [m], whether the most likely token is the label [m], and the expected head row [m, H], of m slots.

    Args:
        labels: [m, 1].
        buffers: room for m x CHUNK_VOCABULARY logits, in hidden's dtype and in the result's.
    """
    narrow, wide = buffers
    slots = len(hidden)
    largest = wide.new_full((slots, 1), -math.inf)
    total, label_logit = torch.zeros_like(largest), torch.zeros_like(largest)
    best = torch.zeros_like(labels)
    expected = wide.new_zeros(hidden.shape) if with_gradient else None
    for first in range(0, len(head), CHUNK_VOCABULARY):
        piece = head[first : first + CHUNK_VOCABULARY]
        shape = slots, len(piece)
        logits = torch.mm(hidden, piece.T, out=narrow[: slots * len(piece)].view(shape))
        label = labels - first
        found = logits.gather(1, label.clamp(0, len(piece) - 1)).to(total.dtype)
        label_logit = torch.where((label >= 0) & (label < len(piece)), found, label_logit)
        exponentials = wide[: slots * len(piece)].view(shape).copy_(logits)
        piece_largest, piece_best = _first_largest(exponentials)
        best = torch.where(piece_largest > largest, piece_best + first, best)
        now_largest = torch.maximum(largest, piece_largest)
        shrink = (largest - now_largest).exp_()
        exponentials.sub_(now_largest).exp_()
        total.mul_(shrink).add_(exponentials.sum(dim=-1, keepdim=True))
        if expected is not None:
            expected.mul_(shrink).add_(logits.copy_(exponentials) @ piece)
        largest = now_largest
    entropy = (largest + total.log() - label_logit).squeeze(1)
    return entropy, (best == labels).squeeze(1), None if expected is None else expected.div_(total)


def _first_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum of each row and its first index, [m, 1]. A reduction that keeps indices is several times slower than one
    that doesn't, so it is made in the best of up to 64 groups only."""
    groups = math.gcd(logits.shape[1], 64)
    grouped = logits.unflatten(1, (groups, -1))
    largest, group = grouped.amax(dim=-1).max(dim=-1, keepdim=True)
    inside = grouped.take_along_dim(group[..., None], dim=1).squeeze(1).argmax(dim=-1, keepdim=True)
    return largest, group * grouped.shape[-1] + inside


def linear_cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row under a frozen head, without ever holding all logits.

    torch's own ``linear_cross_entropy`` (2.13) also works in chunks, but doesn't tell whether the label came first, and
    casts the head to float32 on CPU: docs/training.md compares them.

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
