"""Exported folders in the hands of others, the official package and transformers, with their own code (spec.md 5.7)."""

from dataclasses import replace

import pytest
import torch
from export_helpers import SCALED_ROPE, TOKENS, random_drafter, trained  # noqa: F401
from helpers import load_tiny, make_drafter
from transformers import AutoModel

from dflash_lightning.config import DrafterConfig
from dflash_lightning.decoding import plain_decode, speculative_decode
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import ExportError
from dflash_lightning.evaluation import pooled_tau
from dflash_lightning.export import export_drafter
from dflash_lightning.transformers_check import TransformersCheck, check_with_transformers, generate_with_transformers

NO_OFFICIAL = "the official package isn't installed: pip install --no-deps dflash==0.1.0 (make setup does)"
LIMIT = 22


@pytest.fixture
def official(monkeypatch):
    """The module of the official package."""
    module = pytest.importorskip("dflash.model", reason=NO_OFFICIAL)
    # Its statistics wait for a GPU.
    monkeypatch.setattr(module, "_cuda_time", lambda: 0.0)
    return module


def export_float32(drafter: Drafter, folder, form):
    return export_drafter(drafter.state_dict(), drafter.config, folder / form, form, tokens=TOKENS, dtype=torch.float32)


def official_hidden(official, folder, embeddings, features, positions):
    model, report = official.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    return model.eval()(position_ids=positions, noise_embedding=embeddings, target_hidden=features)


def transformers_hidden(folder, embeddings, features, positions):
    model, report = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    return model.eval()(embeddings, features, position_ids=positions).last_hidden_state


@pytest.mark.parametrize("rope", SCALED_ROPE)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@torch.no_grad()
def test_hidden_states_are_the_same_in_all_three(official, tmp_path, rope, num_kv_heads):
    drafter = random_drafter(rope, num_kv_heads)
    config = drafter.config
    length = 200  # beyond what the scaled kinds call their original length
    features, embeddings = torch.randn(1, length, config.feature_size), torch.randn(1, config.block_size, 32)
    positions = torch.arange(length + config.block_size)[None]
    expected = drafter(embeddings, positions[:, length:], drafter.context_key_values(features, positions[:, :length]))
    zlab, muse = (export_float32(drafter, tmp_path, form) for form in ("zlab", "transformers"))
    found = official_hidden(official, zlab, embeddings, features, positions)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found = transformers_hidden(muse, embeddings, features, positions)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # The comparison can tell the kinds apart.
    plain = Drafter(
        DrafterConfig.from_dict({**config.to_dict(), "rope_parameters": {**SCALED_ROPE["default"], "rope_theta": 1e4}})
    )
    plain.load_state_dict(drafter.state_dict())
    other = plain(embeddings, positions[:, length:], plain.context_key_values(features, positions[:, :length]))
    assert (other - expected).abs().max() > 1e-2


def test_the_official_package_gives_the_same_text_and_commits_as_much(official, trained, tmp_path):  # noqa: F811
    folder = export_float32(trained.drafter, tmp_path, "zlab")
    model = official.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    block_size, lengths = trained.drafter.config.block_size, []
    for prompt in trained.prompts:
        ours = speculative_decode(trained.target, trained.drafter, prompt, max_new_tokens=LIMIT, stop_ids=(2,))
        theirs = official.dflash_generate(
            model, trained.target, torch.tensor([prompt]), LIMIT, stop_token_ids=[2], return_stats=True
        )
        assert theirs.output_ids[0, len(prompt) :].tolist() == ours.token_ids
        assert ours.token_ids == plain_decode(trained.target, prompt, max_new_tokens=LIMIT, stop_ids=(2,)).token_ids
        # Near the length limit the official package drafts a shorter block, whose proposals may differ (its slots see
        # fewer neighbours). From there on only the sum must agree.
        whole, done = 0, 1
        while whole < len(ours.committed) and done + block_size <= LIMIT:
            done += ours.committed[whole]
            whole += 1
        assert theirs.acceptance_lengths[:whole] == ours.committed[:whole]
        assert sum(theirs.acceptance_lengths) == sum(ours.committed)
        lengths += ours.committed[:whole]
    assert {1, block_size} <= set(lengths)  # refusals and whole blocks were among them


@pytest.mark.parametrize("stop_ids", [(), (2,), (40, 200, 9)])
def test_transformers_gives_the_same_text_and_tau(trained, tmp_path, stop_ids):  # noqa: F811
    folder = export_float32(trained.drafter, tmp_path, "transformers")
    limits = {"max_new_tokens": LIMIT, "stop_ids": stop_ids}
    defaults = trained.target.generation_config
    defaults.repetition_penalty = 3.0  # no default of the target may reach the comparison
    runs = [speculative_decode(trained.target, trained.drafter, prompt, **limits) for prompt in trained.prompts]
    texts = [run.token_ids for run in runs]
    result = check_with_transformers(trained.target, folder, trained.prompts, texts, **limits)
    tau = pooled_tau(run.committed for run in runs)
    assert result == TransformersCheck(tau=tau, identical=len(texts), prompts=len(texts))
    assert 1 < result.tau < trained.drafter.config.block_size
    assert trained.target.generation_config is defaults
    assistant = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, run in zip(trained.prompts, runs, strict=True):
        assert generate_with_transformers(trained.target, assistant, prompt, **limits) == (run.token_ids, run.committed)
    texts[0] = [*texts[0][:-1], texts[0][-1] + 1]
    assert check_with_transformers(trained.target, folder, trained.prompts, texts, **limits).identical == len(texts) - 1


def test_a_folder_that_transformers_does_not_know_is_refused(qwen3_folder, llama_folder, tmp_path):
    target, drafter = load_tiny(qwen3_folder), make_drafter(load_tiny(llama_folder))
    limits = {"max_new_tokens": 4, "stop_ids": ()}
    with pytest.raises(ExportError, match="is zlab; transformers generates"):
        check_with_transformers(target, export_float32(drafter, tmp_path, "zlab"), [[5]], [[6]], **limits)
    drafter.config = replace(drafter.config, vocab_size=300)
    with pytest.raises(ExportError, match="vocab_size is 300, the target's is 272"):
        check_with_transformers(target, export_float32(drafter, tmp_path, "transformers"), [[5]], [[6]], **limits)
