"""Signs of faults that spoil a drafter without stopping its training, read from numbers that are at hand anyway.

Each check returns what it found, or None. docs/monitoring.md lists them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dflash_lightning.wording import counted

LEAST_SUPERVISED = 0.02
"""Share of supervised tokens below which nearly all that was captured is prompt. Short answers to long documents
have about 5 %."""
UNMASKED_SAMPLES = 0.5
"""Share of samples without one unsupervised token above which prompts are taken to be unmasked: a chat template puts
tokens before every answer."""
CONSTANT_CHANNELS = 0.05
"""Share of a layer's channels that may have the same value for every token: hidden states have none."""
LEAST_TOKENS = 16
"""Tokens that a constant channel is judged by, at least."""
FIRST_LOSS = 0.5
"""Of ln(vocabulary), the cross entropy of guessing: a drafter with random weights can't be so far below it."""
SLOT_MARGIN, SLOT_ERRORS = 0.1, 4.0
"""A later slot may be more accurate than an earlier one by so much, and by so many standard errors: it predicts further
ahead from the same context."""
HIGH_TAU = 2.0
"""Teacher-forced tau from which on decoding has to show it."""
LOST_SHARE = 0.75
"""Share of the teacher-forced draft tokens that decoding may lose: rounds begin where the last one failed, at harder
places, which costs a quarter of them in a healthy run."""
SILENT_DECODINGS = 2
"""Decodings in a row, after the one before training, in which no draft token was ever accepted."""


@dataclass(frozen=True)
class FaultSign:
    """What was seen, what has most likely gone wrong, and how to find out.

    Attributes:
        name: short, the same in every run.
    """

    name: str
    seen: str
    cause: str
    check: str

    def __str__(self) -> str:
        return f"{self.seen} Likely cause: {self.cause} To check: {self.check}"


def odd_supervision(lengths: np.ndarray, candidates: np.ndarray) -> FaultSign | None:
    """Nearly no supervised token in the data, or prompts that are supervised too.

    Args:
        lengths: [n] tokens of each sample.
        candidates: [n] places for an anchor: supervised tokens that are followed by another one.
    """
    share, unmasked = float(candidates.sum() / lengths.sum()), float((candidates == lengths - 1).mean())
    if share >= LEAST_SUPERVISED and unmasked <= UNMASKED_SAMPLES:
        return None
    seen = f"{share:.1%} of the training tokens are supervised"
    if unmasked > UNMASKED_SAMPLES:
        return FaultSign(
            "supervised_share",
            f"{seen}, and in {unmasked:.0%} of the samples all are, the prompt too.",
            "the loss mask of the data covers prompts: it wasn't made by `prepare`, or the chat template is empty.",
            "decode the tokens of a sample where `loss_mask` is 1: they should be the answer alone. Prepare it again.",
        )
    return FaultSign(
        "supervised_share",
        f"{seen}; expected at least {LEAST_SUPERVISED:.0%}.",
        "answers were cut off or are empty, or the prompts are far too long.",
        "look at some answers in the prepared data, and at --max-new-tokens of `prepare`.",
    )


def constant_features(features: Tensor, layer_ids: Sequence[int]) -> FaultSign | None:
    """A tapped layer whose channels have the same value for every token.

    Args:
        features: [T, K*H] of the tokens of a sample, without padding.
        layer_ids: the K tapped layers.
    """
    if len(features) < LEAST_TOKENS:
        return None
    constant = (features.amax(dim=0) == features.amin(dim=0)).view(len(layer_ids), -1)
    shares = dict(zip(layer_ids, constant.float().mean(dim=1).tolist(), strict=True))
    found = {layer: share for layer, share in shares.items() if share > CONSTANT_CHANNELS}
    if not found:
        return None
    listed = ", ".join(f"{share:.0%} of layer {layer}" for layer, share in found.items())
    return FaultSign(
        "constant_features",
        f"context features without variance: {listed} have one value for all {len(features)} tokens of a sample.",
        "the features are zeros: they were written wrong, or lost on the way.",
        "`dflash-lightning cache verify CACHE`; if every object is sound, capture again.",
    )


def low_first_loss(cross_entropy: float, vocab_size: int) -> FaultSign | None:
    """A drafter with random weights that predicts labels.

    Args:
        cross_entropy: mean over the labels of the first batch, in nats, before any step.
    """
    guessing = math.log(vocab_size)
    if not cross_entropy < FIRST_LOSS * guessing:
        return None
    return FaultSign(
        "low_first_loss",
        f"cross entropy {cross_entropy:.2f} before the first step, where random weights give {guessing:.2f} or more.",
        "the labels can be seen in the input, or nearly all of them are the same token.",
        "read some answers in the prepared data; `pytest tests/test_leak.py` proves what a block may see.",
    )


def mask_token_in_data(count: int, mask_token_id: int) -> FaultSign | None:
    """The mask token among the tokens of the samples.

    Args:
        count: how often it was seen.
    """
    if count == 0:
        return None
    return FaultSign(
        "mask_token_in_data",
        f"the mask token {mask_token_id} is a token of the data, seen {counted(count, 'time')} so far.",
        "the tokenizer or the chat template uses it: the drafter can't tell a slot to fill from that token.",
        "choose an unused one as model.drafter.mask_token_id. That needs no new capture.",
    )


def later_slot_above_earlier(correct: Tensor, supervised: Tensor) -> FaultSign | None:
    """A slot that is by far more accurate than one before it.

    Args:
        correct, supervised: [B] right labels and labels of each slot.
    """
    right, labels = correct.cpu().double(), supervised.cpu().double()
    worst: tuple[float, int, int] | None = None
    for later in range(2, len(labels)):
        for earlier in range(1, later):
            pair = [earlier, later]
            if (labels[pair] == 0).any():
                continue
            gain = float(right[later] / labels[later] - right[earlier] / labels[earlier])
            pooled = right[pair].sum() / labels[pair].sum()
            error = float((pooled * (1 - pooled) * (1 / labels[pair]).sum()).sqrt())
            if gain > max(SLOT_MARGIN, SLOT_ERRORS * error) and (worst is None or gain > worst[0]):
                worst = gain, earlier, later
    if worst is None:
        return None
    gain, earlier, later = worst
    accuracy = (right / labels).tolist()
    return FaultSign(
        "later_slot_above_earlier",
        f"validation accuracy is {accuracy[later]:.1%} in slot {later}, above the {accuracy[earlier]:.1%} of slot "
        f"{earlier}, which is nearer to the anchor.",
        "a block sees what it should predict, or the labels of some slots are shifted.",
        "`pytest tests/test_leak.py tests/test_blocks.py`; `dflash-lightning evaluate` of the newest checkpoint shows "
        "which slots hold in decoding.",
    )


def decoding_loses(tau: float, teacher_forced_tau: float) -> FaultSign | None:
    """Decoding accepts far less than the training forward on the same texts."""
    if not _lost(tau, teacher_forced_tau):
        return None
    return FaultSign(
        "decoding_below_teacher_forced",
        f"decoded tau is {tau:.2f}, where the training forward reaches {teacher_forced_tau:.2f} on the same texts.",
        "decoding feeds the drafter something else than training does: positions, cached keys, or the mask token.",
        "`dflash-lightning evaluate --dtype float32` of the newest checkpoint. If tau stays low, please report it with "
        "the target's config.json; `pytest tests/test_decoding.py` compares both forwards.",
    )


def decoding_below_validation(tau: float, validation_tau: float) -> FaultSign | None:
    """Decoding accepts far less than the training forward on the cache's validation samples."""
    if not _lost(tau, validation_tau):
        return None
    return FaultSign(
        "decoding_below_validation",
        f"decoded tau is {tau:.2f}, where validation samples of the cache reach {validation_tau:.2f} (teacher-forced).",
        "the decoded prompts aren't like the data (another chat template, `thinking` switch or kind of task), or the "
        "cached features aren't those that this target computes.",
        "compare the prompts under decode/samples with the prepared data; then `dflash-lightning evaluate` some of the "
        "training prompts: if they are no better, `dflash-lightning cache verify CACHE`.",
    )


def _lost(tau: float, expected: float) -> bool:
    # Comparisons with NaN are false.
    return expected >= HIGH_TAU and tau - 1 < (1 - LOST_SHARE) * (expected - 1)


def nothing_accepted(decodings: int, step: int) -> FaultSign | None:
    """No draft token was accepted in slot 1, in any round.

    Args:
        decodings: how many in a row, after the one before training.
    """
    if decodings < SILENT_DECODINGS:
        return None
    return FaultSign(
        "nothing_accepted",
        f"not one draft token was accepted in the last {counted(decodings, 'decoding')}, up to step {step}.",
        "if train/accuracy_slot_1 is high, decoding sees other features than the cache holds; if it is low, the "
        "drafter hasn't learned yet.",
        "low: whether train/loss falls, and model.optimizer.lr. High: `dflash-lightning cache info CACHE` (target and "
        "layers) and `dflash-lightning evaluate --dtype float32`.",
    )
