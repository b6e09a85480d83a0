"""How tokens are chosen from logits, and how a drafted block is verified so that the text stays the target's own.

Every scheme keeps the target's distribution (spec.md section 4; arXiv 2211.17192): a greedy text is the text of plain
greedy decoding, and a sampled one is a draw from the target at the same temperature, top-k and top-p.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from dflash_lightning.errors import ConfigError

# Logits divided by less may overflow float32.
LEAST_TEMPERATURE = 1e-6
Proposals = Literal["argmax", "sampled"]


@dataclass(frozen=True)
class Sampling:
    """What the target's distribution is, as in transformers' ``generate``: temperature, then top-k, then top-p."""

    temperature: float = 1.0
    top_k: int | None = None
    """Only the k most likely tokens."""
    top_p: float = 1.0
    """Only the smallest set of most likely tokens that has this probability."""

    def __post_init__(self) -> None:
        if not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature is {self.temperature}; expected 0 (the most likely token), or {LEAST_TEMPERATURE} and up."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; expected at least 1.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; expected more than 0, at most 1.")

    def probabilities(self, logits: Tensor) -> Tensor:
        """[..., V] in float32 at least."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.softmax(dim=-1)
        if self.top_p < 1:
            ordered, tokens = probabilities.sort(dim=-1, descending=True)
            beyond = ordered.cumsum(dim=-1) - ordered >= self.top_p
            probabilities = probabilities.masked_fill(beyond.scatter(-1, tokens, beyond), 0)
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities


class Verified(NamedTuple):
    """What a verify round decides.

    Attributes:
        tokens: [R, B] the accepted proposals of each row, and after them the target's own token; then anything.
        accepted: [R] how many proposals each row accepts.
    """

    tokens: Tensor
    accepted: Tensor


class Scheme(Protocol):
    """Chooses tokens: the first of a text, the proposals of a block, and what verification makes of them."""

    def choose(self, logits: Tensor) -> Tensor:
        """Tokens [...] of the target's logits [..., V]."""

    def propose(self, logits: Tensor) -> Tensor:
        """Proposals [R, B - 1] from the drafter's logits [R, B - 1, V]."""

    def verify(self, proposals: Tensor, logits: Tensor) -> Verified:
        """Compare the latest proposals [R, B - 1] with the target's logits [R, B, V] at anchor and proposals."""


def leading(agree: Tensor) -> Tensor:
    """[R] how many slots of each row [R, B - 1] agree before the first that doesn't."""
    return agree.cumprod(dim=1).sum(dim=1)


def verify_by_equality(proposals: Tensor, tokens: Tensor) -> Verified:
    """Accept the leading proposals [R, B - 1] that equal the target's own ``tokens`` [R, B]."""
    return Verified(tokens, leading(proposals == tokens[:, :-1]))


class Greedy:
    """The most likely token, always."""

    def choose(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def propose(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def verify(self, proposals: Tensor, logits: Tensor) -> Verified:
        return verify_by_equality(proposals, self.choose(logits))


class _Sampled:
    """Draws from the target's distribution, with random numbers of its own."""

    def __init__(self, sampling: Sampling, generator: torch.Generator):
        self.sampling, self.generator = sampling, generator

    def choose(self, logits: Tensor) -> Tensor:
        return draw(self.sampling.probabilities(logits), self.generator)


class ArgmaxProposals(_Sampled):
    """Samples from the target; proposes the drafter's most likely tokens.

    The target draws a token at every slot. What it draws is committed, so that the distribution is the target's
    whatever was proposed; a draw that equals the proposal lets the next slot's draw count as well.
    """

    def propose(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def verify(self, proposals: Tensor, logits: Tensor) -> Verified:
        return verify_by_equality(proposals, self.choose(logits))


class SampledProposals(_Sampled):
    """Samples from the target; proposals are samples too, and one is accepted with probability min(1, p / q).

    p and q are the target's and the drafter's distributions. At the first rejection the token is drawn from what p has
    more than q.
    """

    def propose(self, logits: Tensor) -> Tensor:
        self._drafted = self.sampling.probabilities(logits)
        return draw(self._drafted, self.generator)

    def verify(self, proposals: Tensor, logits: Tensor) -> Verified:
        wanted = self.sampling.probabilities(logits)
        at_proposal = proposals[..., None]
        p, q = (x.gather(-1, at_proposal).squeeze(-1) for x in (wanted[:, :-1], self._drafted))
        uniform = torch.rand(p.shape, generator=self.generator, device=p.device, dtype=p.dtype)
        accepted = leading(uniform * q < p)
        row = torch.arange(len(accepted), device=p.device)
        # Past the last proposal nothing was drafted: the bonus is drawn from p itself.
        drafted = torch.nn.functional.pad(self._drafted, (0, 0, 0, 1))[row, accepted]
        wanted = wanted[row, accepted]
        left = (wanted - drafted).clamp(min=0)
        # Nothing left but rounding: p and q are equal, and so is drawing from p.
        left = torch.where(left.sum(dim=-1, keepdim=True) > 0, left, wanted)
        tokens = torch.nn.functional.pad(proposals, (0, 1))
        tokens[row, accepted] = draw(left, self.generator)
        return Verified(tokens, accepted)


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One index [...] by weights [..., V], which need not sum to 1: the first arrival of Poisson processes."""
    waiting = torch.empty_like(weights).exponential_(generator=generator)
    return (weights / waiting).argmax(dim=-1)


def make_scheme(
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    proposals: Proposals = "sampled",
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Scheme:
    """The scheme for these settings, with random numbers of its own.

    Args:
        temperature: 0 takes the most likely token (greedy); above it, texts are sampled.
        top_k: sample from the k most likely tokens only.
        top_p: sample from the smallest set of most likely tokens that has this probability.
        proposals: what the drafter proposes when sampling: its most likely tokens, or a sample
            (docs/decoding.md compares them).
        seed: of the random numbers.
        device: where they are drawn.

    Raises:
        ConfigError: a setting out of range, or one that greedy decoding would ignore; but for the seed, which it
            accepts.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed is {seed}; expected 0 to 2**63 - 1.")
    if temperature == 0:
        if top_k is not None or top_p != 1 or proposals != "sampled":
            raise ConfigError(
                f"temperature is 0, which takes the most likely token: top_k {top_k}, top_p {top_p} and proposals "
                f"{proposals} would have no effect. Give a temperature above 0, or leave them out."
            )
        return Greedy()
    kind = {"argmax": ArgmaxProposals, "sampled": SampledProposals}[proposals]
    return kind(Sampling(temperature, top_k, top_p), torch.Generator(device).manual_seed(seed))
