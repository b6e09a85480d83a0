"""Exported `speculators` folders in the hands of the package `speculators`, and its folders in ours (spec.md 5.7)."""

import json

import pytest
import torch
from export_helpers import SCALED_ROPE, TOKENS, random_drafter, random_verifier, save_checkpoint
from helpers import load_tiny, make_drafter
from other_decoders import MISSING, draft, load_speculator

from dflash_lightning.errors import ExportError
from dflash_lightning.export import Verifier, export, export_drafter, load_drafter, read_drafter

pytestmark = pytest.mark.slow  # the package takes seconds to import


@pytest.fixture(scope="module")
def package():
    return pytest.importorskip("speculators", reason=MISSING)


def export_random(drafter, folder, **options):
    options = {"verifier": random_verifier(drafter.config), "dtype": torch.float32, **options}
    return export_drafter(drafter.state_dict(), drafter.config, folder, "speculators", tokens=TOKENS, **options)


@pytest.mark.parametrize("spelling", ["as written", "older"])
@pytest.mark.parametrize("rope", SCALED_ROPE)
@pytest.mark.parametrize("num_kv_heads", [1, 4])
@torch.no_grad()
def test_hidden_states_and_logits_are_the_same(package, tmp_path, rope, num_kv_heads, spelling):  # noqa: ARG001
    drafter = random_drafter(rope, num_kv_heads)
    config, verifier = drafter.config, random_verifier(drafter.config)
    folder = export_random(drafter, tmp_path / "out")
    if spelling == "older":
        values = json.loads((folder / "config.json").read_text())
        del values["transformer_layer_config"]["rope_parameters"]
        (folder / "config.json").write_text(json.dumps(values))
    model = load_speculator(folder)
    assert model.target_layer_ids == [2, 5, 4]  # as the package counts: the embedding's output is 0
    length = 200
    features = torch.randn(length, config.feature_size)
    token_ids = torch.randint(4, 272, (length + 1,)).tolist()
    block = torch.tensor([[token_ids[-1], *[config.mask_token_id] * (config.block_size - 1)]])
    positions = torch.arange(length + config.block_size)[None]
    loaded = load_drafter(folder, dtype=torch.float32)
    for one in (drafter, loaded):
        context = one.context_key_values(features[None], positions[:, :length])
        expected = one(torch.nn.functional.embedding(block, verifier.embedding), positions[:, length:], context)[0]
        hidden, logits = draft(model, features, token_ids)
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, expected @ verifier.head.T, rtol=1e-4, atol=1e-3)


def test_the_packages_own_conversion_is_the_same_and_is_read(package, target_folder, tmp_path):
    from speculators.convert.dflash import DFlashConverter

    drafter, target = make_drafter(load_tiny(target_folder)), str(target_folder)
    save_checkpoint(tmp_path / "best.ckpt", drafter, target_folder)
    zlab, ours = export(tmp_path / "best.ckpt", tmp_path, "zlab,speculators", dtype="float32", verify=False)
    theirs = tmp_path / "theirs"
    DFlashConverter().convert(zlab, theirs, base_model=target)
    mine, its = (package.SpeculatorModelConfig.from_pretrained(folder) for folder in (ours, theirs))
    assert mine.speculators_config.verifier.name_or_path is None  # nobody's folders are published
    mine.speculators_config.verifier.name_or_path = target
    for field in type(its).model_fields.keys() - {"transformer_layer_config", "architectures"}:
        if field != "sliding_window_non_causal":  # says nothing: no layer has a window
            assert getattr(mine, field) == getattr(its, field), field
    mine, its = (config.transformer_layer_config.to_dict() for config in (mine, its))
    assert {k for k in mine.keys() | its.keys() if mine.get(k) != its.get(k)} <= {"dtype", "pad_token_id"}

    loaded = load_speculator(ours)
    given = load_tiny(target_folder)
    assert torch.equal(loaded.embed_tokens.weight, given.get_input_embeddings().weight)
    assert torch.equal(loaded.lm_head.weight, given.get_output_embeddings().weight)
    weights = loaded.state_dict()
    for name, weight in package.SpeculatorModel.from_pretrained(theirs, dtype=torch.float32).state_dict().items():
        if not name.startswith("verifier_"):
            assert torch.equal(weights[name], weight), name

    # It leaves out the two tables, what Qwen3Config has by default, and the target's depth.
    with pytest.raises(ExportError, match=r"no key 'num_target_layers'. Name its target \(--target\)"):
        read_drafter(theirs)
    source = read_drafter(theirs, target)
    assert (source.config, source.verifier) == (drafter.config, None)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(source.weights[name], weight), name


def test_what_a_dflash_drafter_is_not_is_refused(tmp_path):
    drafter = random_drafter("default", 2)
    folder = export_random(drafter, tmp_path / "out")
    whole = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"sample_from_anchor": True}, "proposes a token at the anchor too"),
        ({"draft_vocab_size": 100}, "proposes from 100 of the target's 272 tokens"),
        ({"transformer_layer_config": None}, "has no transformer_layer_config"),
        ({"transformer_layer_config": {"model_type": "nonsense"}}, "isn't one that transformers reads: .*nonsense"),
        ({"speculators_model_type": "eagle3"}, "of none of the formats zlab, speculators, transformers"),
    ):
        (folder / "config.json").write_text(json.dumps(whole | change))
        with pytest.raises(ExportError, match=message):
            read_drafter(folder)
    with pytest.raises(ExportError, match="Name it by --target"):
        export_random(drafter, tmp_path / "no", verifier=None)
    tables = random_verifier(drafter.config)
    with pytest.raises(ExportError, match=r"tables of the target of shape \[\[5, 32\]\]; expected \[272, 32\]"):
        export_random(drafter, tmp_path / "no", verifier=Verifier(None, (), tables.embedding[:5], tables.head))
