"""The disk and memory that docs/cluster.md reckons with are those of the code."""

import re

import pytest
import torch
import yaml
from page_commands import ROOT
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_lightning.cache.space import feature_row_bytes
from dflash_lightning.config import DrafterConfig, DrafterSettings
from dflash_lightning.doctor.training import BYTES_PER_WEIGHT
from dflash_lightning.drafter import Drafter

# Qwen/Qwen3-8B's config.json.
TARGET = Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=False,
)
CONFIG = yaml.safe_load((ROOT / "conf" / "train_qwen3_8b.yaml").read_text())
GB = 1e9


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join((ROOT / "docs" / "cluster.md").read_text().split())


@pytest.fixture(scope="module")
def weights() -> tuple[int, int]:
    """Of the drafter, and of the target."""
    settings = DrafterSettings(**CONFIG["model"]["drafter"])
    with torch.device("meta"):
        models = Drafter(DrafterConfig.from_target(settings, TARGET, mask_token_id=151669)), Qwen3ForCausalLM(TARGET)
    drafter, target = (sum(weight.numel() for weight in model.parameters()) for model in models)
    return drafter, target


def test_disk(page, weights):
    rows = re.findall(r"\| `(\w+)`[^|]*\| ([\d,]+) \| ([\d,]+) GB \| ([\d.]+) TB \|", page)
    assert len(rows) == 4
    for storage, *numbers in rows:
        row, small, large = (float(number.replace(",", "")) for number in numbers)
        assert row == feature_row_bytes(storage, 5 * TARGET.hidden_size)
        assert (small, large) == (25e6 * row / GB, round(800e6 * row / 1e12, 1))
    drafter, _ = weights
    assert f"{BYTES_PER_WEIGHT} bytes a weight" in page
    assert f"{BYTES_PER_WEIGHT * drafter / GB:.1f} GB for this drafter's {drafter / 1e6:,.0f} million" in page
    assert f"Its export takes {2 * drafter / GB:.1f} GB" in page


def test_memory(page, weights):
    drafter, target = weights
    ranks = CONFIG["trainer"]["devices"]
    assert f"here, R = {ranks}" in page
    for what, size in (
        ("the drafter's weights | 2 a weight", 2 * drafter),
        ("gradients, at most | 2 a weight", 2 * drafter),
        ("masters and moments, sharded | 12 a weight / R", 12 * drafter / ranks),
        ("LM head | 2 x 2 x V x H", 2 * 2 * TARGET.vocab_size * TARGET.hidden_size),
        ("decodes | 2 a weight", 2 * target),
        ("a micro-batch | 2 x K x H a token", 2 * 5 * TARGET.hidden_size * CONFIG["data"]["batch_tokens"]),
    ):
        assert f"{what} | {size / GB:.1f} GB" in page


def test_time_and_batches(page):
    assert f"= {CONFIG['trainer']['max_steps']:,} steps" in page
    assert CONFIG["trainer"]["max_steps"] == 800_000 * 6 / 64
    read = 64 * 1000 * feature_row_bytes("4bit", 5 * TARGET.hidden_size)
    assert f"reads {read / 1e6:.0f} MB" in page
    settings = CONFIG["data"] | CONFIG["model"]["drafter"]
    assert 3072 + settings["num_anchors"] * settings["block_size"] <= settings["batch_tokens"]
    assert f"{settings['batch_tokens']:,} hold the longest sample alone, 3,072 tokens and 512 blocks of 16" in page
