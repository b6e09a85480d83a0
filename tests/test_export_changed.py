"""Exported folders that were changed or damaged afterwards are refused by field."""

import json

import pytest
import torch
from export_helpers import TOKENS, save_checkpoint
from helpers import load_tiny, make_drafter

from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import ExportError
from dflash_lightning.export import export_drafter, load_drafter, read_drafter


@pytest.fixture
def drafter(qwen3_folder):
    return make_drafter(load_tiny(qwen3_folder))


def test_two_block_sizes_that_differ_are_refused(drafter, tmp_path):
    folder = export_drafter(drafter.state_dict(), drafter.config, tmp_path / "zlab", tokens=TOKENS)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "block_size": 8}))
    with pytest.raises(ExportError, match=r"block_size is 8 in its config\.json, and 4 in dflash_config"):
        read_drafter(folder)


def test_a_folder_without_a_rope_theta_is_refused(drafter, tmp_path):
    folder = export_drafter(drafter.state_dict(), drafter.config, tmp_path / "zlab", tokens=TOKENS)
    values = json.loads((folder / "config.json").read_text())
    del values["rope_theta"], values["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ExportError, match="rope_theta is None; expected a positive number"):
        read_drafter(folder)


def test_a_folder_that_was_changed_after_its_export_is_refused_but_for_a_smaller_block(drafter, tmp_path):
    folder = export_drafter(drafter.state_dict(), drafter.config, tmp_path / "zlab", tokens=TOKENS)
    values = json.loads((folder / "config.json").read_text())

    def change(**dflash):
        changed = {**values, "dflash_config": {**values["dflash_config"], **dflash}}
        changed["block_size"] = changed["dflash_config"]["block_size"]
        (folder / "config.json").write_text(json.dumps(changed))

    change(block_size=2)
    assert read_drafter(folder).config.block_size == 2
    for name, value in (("mask_token_id", 100), ("target_layer_ids", [3, 1]), ("block_size", 8)):
        change(**{name: value})
        with pytest.raises(ExportError, match=rf"{name}: .*, exported with"):
            read_drafter(folder)


def test_weights_that_are_not_finite_are_not_decoded_with(drafter, qwen3_folder, tmp_path):
    weights = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    weights["norm.weight"][0] = float("nan")
    spoiled = Drafter(drafter.config)
    spoiled.load_state_dict(weights)
    save_checkpoint(tmp_path / "a.ckpt", spoiled, qwen3_folder)
    with pytest.raises(ExportError, match=r"NaN or infinity: norm\.weight"):
        load_drafter(tmp_path / "a.ckpt", dtype=torch.float32)
