"""Exported folders in the hands of others, with their own code (spec.md 5.7): the official package and transformers.

Texts and committed lengths of hard cases are in test_export_cases.py, the package speculators in test_speculators.py.
"""

import json
from dataclasses import replace

import other_decoders
import pytest
import torch
from export_helpers import SCALED_ROPE, TOKENS, make_trained, random_drafter
from helpers import load_tiny, make_drafter
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from dflash_lightning.decoding.decode import speculative_decode
from dflash_lightning.decoding.tau import pooled_tau
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import ExportError
from dflash_lightning.export import export_drafter
from dflash_lightning.export.transformers_check import load_assistant

LENGTH = 200  # beyond what the scaled kinds call their original length


@pytest.fixture
def official(monkeypatch):
    return other_decoders.official(monkeypatch)


def export_float32(drafter: Drafter, folder, form):
    return export_drafter(drafter.state_dict(), drafter.config, folder / form, form, tokens=TOKENS, dtype=torch.float32)


def inputs(drafter):
    """Features, embeddings of a block, and positions of both."""
    config = drafter.config
    features, embeddings = torch.randn(1, LENGTH, config.feature_size), torch.randn(1, config.block_size, 32)
    return features, embeddings, torch.arange(LENGTH + config.block_size)[None]


def our_hidden(drafter, features, embeddings, positions):
    context = drafter.context_key_values(features, positions[:, :LENGTH])
    return drafter(embeddings, positions[:, LENGTH:], context)


def official_hidden(official, folder, features, embeddings, positions):
    model, report = official.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    return model.eval()(position_ids=positions, noise_embedding=embeddings, target_hidden=features)


def transformers_hidden(folder, features, embeddings, positions):
    model, report = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    return model.eval()(embeddings, features, position_ids=positions).last_hidden_state


def with_rope(drafter: Drafter, rope) -> Drafter:
    """The same weights, rotated otherwise."""
    other = Drafter(replace(drafter.config, rope_parameters=rope)).eval()
    other.load_state_dict(drafter.state_dict())
    return other


@pytest.mark.parametrize("rope", SCALED_ROPE)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@torch.no_grad()
def test_hidden_states_are_the_same_in_all_three(official, tmp_path, rope, num_kv_heads):
    drafter = random_drafter(rope, num_kv_heads)
    given = inputs(drafter)
    expected = our_hidden(drafter, *given)
    zlab, muse = (export_float32(drafter, tmp_path, form) for form in ("zlab", "transformers"))
    torch.testing.assert_close(official_hidden(official, zlab, *given), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(transformers_hidden(muse, *given), expected, rtol=1e-4, atol=1e-4)
    # The comparison can tell the kinds apart.
    other = with_rope(drafter, {**SCALED_ROPE["default"], "rope_theta": 1e4})
    assert (our_hidden(other, *given) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("rope", SCALED_ROPE)
@torch.no_grad()
def test_engines_that_read_the_older_spelling_see_the_same_drafter(official, tmp_path, rope):
    """rope_theta and rope_scaling alone, as engines on transformers 4 read them."""
    drafter = random_drafter(rope, 2)
    given, folder = inputs(drafter), export_float32(drafter, tmp_path, "zlab")
    values = json.loads((folder / "config.json").read_text())
    del values["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(values))
    found = official_hidden(official, folder, *given)
    torch.testing.assert_close(found, our_hidden(drafter, *given), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_official_package_has_no_partial_rotation(official, tmp_path):
    """It reads the folder, and rotates whole heads: only a server that knows partial_rotary_factor can serve it."""
    drafter = with_rope(random_drafter("default", 2), {**SCALED_ROPE["default"], "partial_rotary_factor": 0.5})
    given = inputs(drafter)
    found = official_hidden(official, export_float32(drafter, tmp_path, "zlab"), *given)
    assert (found - our_hidden(drafter, *given)).abs().max() > 1e-2
    whole = our_hidden(with_rope(drafter, SCALED_ROPE["default"]), *given)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


def test_transformers_stops_where_we_stop(llama_folder, tmp_path):
    trained = make_trained(llama_folder)
    folder = export_float32(trained.drafter, tmp_path, "transformers")
    defaults = trained.target.generation_config
    defaults.repetition_penalty = 3.0  # no default of the target may reach the comparison
    for stop_ids in ((), (2,), (40, 200, 9)):
        limits = {"max_new_tokens": 22, "stop_ids": stop_ids}
        runs = [speculative_decode(trained.target, trained.drafter, prompt, **limits) for prompt in trained.prompts]
        assert 1 < pooled_tau(run.committed for run in runs) < trained.drafter.config.block_size
        found = other_decoders.decode_with_transformers(folder, trained.target, trained.prompts, 22, stop_ids)
        assert found == [(run.token_ids, run.committed) for run in runs]
    assert trained.target.generation_config is defaults


def test_weights_that_transformers_misses_are_named(qwen3_folder, tmp_path):
    target = load_tiny(qwen3_folder)
    folder = export_float32(make_drafter(target), tmp_path, "transformers")
    weights = load_file(folder / "model.safetensors")
    weights["encoder.fusion.weight"] = weights.pop("encoder.fc.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"missing_keys.*encoder\.fc\.weight.*unexpected_keys.*encoder\.fusion"):
        load_assistant(folder, target)
