"""Where bfloat16 would lose, float32 is kept: positions, softmax, norms, metrics. test_losses.py has the loss."""

import pytest
import torch
from helpers import load_tiny, make_drafter
from torch import nn

from dflash_lightning.rope import rotate
from dflash_lightning.training.losses import SlotResults
from dflash_lightning.training.metrics import BlockMetrics
from dflash_lightning.visibility import attend

# Half of bfloat16's spacing, relative: what rounding the result alone costs.
ROUNDING = 2**-8


@pytest.mark.parametrize("position", [3, 257, 2047, 4001])
def test_a_bfloat16_drafter_rotates_by_exact_positions(llama_folder, position):
    drafter = make_drafter(load_tiny(llama_folder)).bfloat16()
    cos, sin = drafter.rotary(torch.tensor([[position]]))
    assert cos.dtype == sin.dtype == torch.float32
    size, base = drafter.config.head_dim, drafter.config.rope_parameters["rope_theta"]
    x = torch.randn(1, 1, 1, size, generator=torch.Generator().manual_seed(position)).bfloat16()
    angles = position * base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    # Near a zero of the result, float32's rounding of the angle (position x 2^-24) shows.
    torch.testing.assert_close(rotate(x, cos, sin).double(), expected, rtol=ROUNDING, atol=1e-3)
    if position > 256:  # bfloat16 has no such position
        assert float(torch.tensor(position).bfloat16()) != position


def test_attention_in_bfloat16_adds_up_its_softmax_in_float32():
    # 4,096 keys alike: a sum of ones in bfloat16 ends at 256, and a softmax in it would be 16 times too large.
    generator = torch.Generator().manual_seed(0)
    query, key = torch.zeros(1, 2, 3, 16).bfloat16(), torch.randn(1, 2, 4096, 16, generator=generator).bfloat16()
    value = (1 + torch.randn(1, 2, 4096, 16, generator=generator)).bfloat16()
    mask = torch.ones(1, 1, 3, 4096, dtype=torch.bool)
    expected = value.double().mean(dim=2, keepdim=True).expand(1, 2, 3, 16)
    torch.testing.assert_close(attend(query, key, value, mask).double(), expected, rtol=2 * ROUNDING, atol=1e-4)


def test_norms_of_a_bfloat16_drafter_add_up_in_float32():
    norm = nn.RMSNorm(4096, eps=1e-6).bfloat16()
    x = torch.randn(5, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = x.double() / x.double().pow(2).mean(dim=-1, keepdim=True).sqrt()
    torch.testing.assert_close(norm(x).double(), expected, rtol=ROUNDING, atol=0)


def test_metrics_of_a_bfloat16_module_count_on_where_bfloat16_would_stop():
    module = nn.ModuleDict({"metrics": BlockMetrics(4)})
    metrics = module.bfloat16()["metrics"]
    supervised = torch.tensor([[[False, True, True, True]]])
    results = SlotResults(supervised.float(), supervised, supervised, torch.ones(1, 1, dtype=torch.bool))
    for _ in range(1000):
        metrics.update(results, torch.tensor(1.0))
    assert metrics.loss_sum.dtype == torch.float32
    assert metrics.loss_sum == metrics.blocks == metrics.correct[1] == 1000
    assert metrics.compute()["teacher_forced_tau"] == 4
