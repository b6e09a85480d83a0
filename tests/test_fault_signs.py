"""Each sign of a fault: found where the fault is, and not in the figures of healthy runs."""

import math

import numpy as np
import pytest
import torch

from dflash_lightning.training.fault_signs import (
    constant_features,
    decoding_below_validation,
    decoding_loses,
    later_slot_above_earlier,
    low_first_loss,
    mask_token_in_data,
    nothing_accepted,
    odd_supervision,
)

# The quickstart's run: decoded tau, teacher-forced tau of the same texts, and of the validation samples.
HEALTHY = [(1.0, 1.0, 1.0), (1.58, 1.62, 1.51), (2.52, 2.67, 2.58), (3.59, 4.15, 3.64), (3.59, 4.37, 3.84)]
# Its accuracies by slot in the first validation and in the last, of about 700 blocks.
ACCURACIES = [
    [0.366, 0.315, 0.294, 0.266, 0.227, 0.206, 0.141],
    [0.735, 0.671, 0.651, 0.618, 0.565, 0.546, 0.501],
]


def counts(accuracies: list[float], labels: int) -> tuple[torch.Tensor, torch.Tensor]:
    supervised = torch.tensor([0] + [labels] * len(accuracies))
    return (supervised * torch.tensor([0.0, *accuracies])).round().long(), supervised


@pytest.mark.parametrize(
    ("lengths", "candidates", "seen"),
    [
        ([100, 200], [60, 10], None),
        ([3000, 3000], [2990, 2980], None),  # short questions, long answers
        ([3000, 3000], [60, 70], None),  # long documents, short answers
        ([3000, 3000], [20, 30], "0.8% of the training tokens are supervised; expected at least 2%"),
        (
            [100, 200, 50],
            [99, 199, 20],
            "90.9% of the training tokens are supervised, and in 67% of the samples all are",
        ),
    ],
)
def test_supervised_share(lengths, candidates, seen):
    sign = odd_supervision(np.array(lengths), np.array(candidates))
    assert (sign is None) if seen is None else (sign.seen.startswith(seen))


def test_constant_features_name_the_layer():
    features = torch.randn(40, 3 * 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert constant_features(features, (2, 9, 16)) is None
    features[:, 64] = 1.5  # one dead channel of 64
    assert constant_features(features, (2, 9, 16)) is None
    features[:, 64:128] = 0
    assert "100% of layer 9 have one value for all 40 tokens" in constant_features(features, (2, 9, 16)).seen
    assert constant_features(features[:10], (2, 9, 16)) is None  # too few tokens to say


@pytest.mark.parametrize("cross_entropy", [math.log(50_000), 40.0, math.nan])
def test_guessing_is_no_low_loss(cross_entropy):
    assert low_first_loss(cross_entropy, 50_000) is None


def test_a_low_first_loss_is_told_with_what_guessing_would_give():
    assert (
        "cross entropy 3.00 before the first step, where random weights give 10.82" in low_first_loss(3.0, 50_000).seen
    )


def test_one_mask_token_in_the_data_is_enough():
    assert mask_token_in_data(0, 3) is None
    assert "mask token 3 is a token of the data, seen 2 times" in mask_token_in_data(2, 3).seen


@pytest.mark.parametrize("accuracies", ACCURACIES)
@pytest.mark.parametrize("labels", [24, 700])
def test_accuracies_of_a_healthy_run_raise_nothing(accuracies, labels):
    assert later_slot_above_earlier(*counts(accuracies, labels)) is None


def test_a_later_slot_far_above_an_earlier_one_is_told():
    accuracies = [0.30, 0.62, 0.20, 0.50]
    sign = later_slot_above_earlier(*counts(accuracies, 700))
    assert "62.0% in slot 2, above the 30.0% of slot 1" in sign.seen
    assert later_slot_above_earlier(*counts(accuracies, 10)) is None  # chance
    assert later_slot_above_earlier(*counts([0.30, 0.38, 0.20], 10_000)) is None  # certain, but not by far
    correct, supervised = counts(accuracies, 700)
    supervised[1] = correct[1] = 0
    assert "50.0% in slot 4, above the 20.0% of slot 3" in later_slot_above_earlier(correct, supervised).seen


@pytest.mark.parametrize(("tau", "teacher_forced", "validation"), HEALTHY)
def test_the_gap_of_a_healthy_run_raises_nothing(tau, teacher_forced, validation):
    assert decoding_loses(tau, teacher_forced) is None
    assert decoding_below_validation(tau, validation) is None


def test_decoding_that_gets_less_than_a_quarter_is_told():
    assert "decoded tau is 1.04, where the training forward reaches 3.90" in decoding_loses(1.04, 3.9).seen
    assert "validation samples of the cache reach 3.90" in decoding_below_validation(1.04, 3.9).seen
    assert decoding_loses(1.8, 3.9) is None
    assert decoding_below_validation(math.nan, 3.9) is None  # nothing was decoded at this validation


def test_nothing_accepted_is_told_at_the_second_time():
    assert nothing_accepted(1, 100) is None
    assert "in the last 2 decodings, up to step 200" in nothing_accepted(2, 200).seen
