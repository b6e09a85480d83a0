"""Exported `speculators` folders in the hands of the package `speculators`, and its folders in ours (spec.md 5.7)."""

import json

import pytest
import torch
from export_helpers import SCALED_ROPE, TOKENS, random_drafter, random_verifier, save_checkpoint, trained  # noqa: F401

from dflash_lightning.decoding import speculative_decode
from dflash_lightning.errors import ExportError
from dflash_lightning.export import Verifier, export, export_drafter, read_drafter

pytestmark = pytest.mark.slow  # the package takes seconds to import

LIMIT = 22


@pytest.fixture(scope="module")
def package():
    reason = "the package speculators isn't installed: pip install --no-deps -r requirements-nodeps.txt"
    return pytest.importorskip("speculators", reason=reason)


def load(package, folder):
    """The folder's model by the package's own code, in float32, with every tensor found and none left over."""
    config = package.SpeculatorModelConfig.from_pretrained(folder)
    # Its default is FlexAttention, which takes long to compile.
    config.transformer_layer_config._attn_implementation = "eager"
    model, report = package.SpeculatorModel.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    assert type(model) is package.DFlashDraftModel
    return model.eval()


@torch.no_grad()
def draft(model, features, token_ids):
    """Hidden states and logits [B, ...] of the block at the last of ``token_ids``, by the package's training forward.

    ``features`` are those of all tokens but the last: beyond them it sees nothing.
    """
    anchor, room = len(token_ids) - 1, model.block_size + 1  # it lays no anchor in the last block
    mask = torch.zeros(1, anchor + room, dtype=torch.long)
    mask[0, anchor] = 1
    hidden, logits, *_ = model._backbone_forward(
        torch.nn.functional.pad(features, (0, 0, 0, room), value=7.0)[None],
        torch.tensor([[*token_ids, *[5] * model.block_size]]),
        mask,
        torch.zeros(1, anchor + room, features.shape[-1] // len(model.target_layer_ids)),
        torch.zeros_like(mask),
        max_anchors=1,
    )
    return hidden[0], logits[0]


@pytest.mark.parametrize("rope", SCALED_ROPE)
@pytest.mark.parametrize("num_kv_heads", [1, 4])
@torch.no_grad()
def test_hidden_states_and_logits_are_the_same(package, tmp_path, rope, num_kv_heads):
    drafter = random_drafter(rope, num_kv_heads)
    config, verifier = drafter.config, random_verifier(drafter.config)
    folder = export_drafter(
        drafter.state_dict(),
        config,
        tmp_path / "out",
        "speculators",
        tokens=TOKENS,
        verifier=verifier,
        dtype=torch.float32,
    )
    model = load(package, folder)
    assert model.target_layer_ids == [2, 5, 4]  # as the package counts: the embedding's output is 0
    length = 200
    features = torch.randn(length, config.feature_size)
    token_ids = torch.randint(4, 272, (length + 1,)).tolist()
    block = torch.tensor([[token_ids[-1], *[config.mask_token_id] * (config.block_size - 1)]])
    positions = torch.arange(length + config.block_size)[None]
    context = drafter.context_key_values(features[None], positions[:, :length])
    expected = drafter(torch.nn.functional.embedding(block, verifier.embedding), positions[:, length:], context)[0]
    hidden, logits = draft(model, features, token_ids)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected @ verifier.head.T, rtol=1e-4, atol=1e-3)


def export_to(trained, folder, form):  # noqa: F811
    """Through the command, from a checkpoint: the tables come from the target."""
    save_checkpoint(folder / "best.ckpt", trained.drafter, trained.target.name_or_path)
    [exported] = export(folder / "best.ckpt", folder / form, format=form, dtype="float32")
    return exported


@torch.no_grad()
def naive_decode(target, model, prompt):
    """Greedy text and tokens committed a round, without any cache: the package has no decoding of its own."""

    def forward(token_ids):
        output = target(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
        features = torch.cat([output.hidden_states[layer][0] for layer in model.target_layer_ids], dim=-1)
        return output.logits[0].argmax(-1).tolist(), features

    text, committed = [forward(prompt)[0][-1]], []
    while len(text) < LIMIT and text[-1] != 2:
        features = forward([*prompt, *text])[1][:-1]
        proposals = draft(model, features, [*prompt, *text])[1][1:].argmax(-1).tolist()
        wanted = forward([*prompt, *text, *proposals])[0][len(prompt) + len(text) - 1 :]
        new = []
        for proposal, token in zip([*proposals, None], wanted, strict=True):
            new.append(token)
            if proposal != token or token == 2 or len(text) + len(new) == LIMIT:
                break
        text += new
        committed.append(len(new))
    return text, committed


def test_it_proposes_what_we_propose(package, trained, tmp_path):  # noqa: F811
    model = load(package, export_to(trained, tmp_path, "speculators"))
    for name, weight in trained.drafter.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert torch.equal(model.embed_tokens.weight, trained.target.get_input_embeddings().weight)
    assert torch.equal(model.lm_head.weight, trained.target.get_output_embeddings().weight)
    lengths = []
    for prompt in trained.prompts:
        ours = speculative_decode(trained.target, trained.drafter, prompt, max_new_tokens=LIMIT, stop_ids=(2,))
        assert naive_decode(trained.target, model, prompt) == (ours.token_ids, ours.committed)
        lengths += ours.committed
    assert {1, trained.drafter.config.block_size} <= set(lengths)  # refusals and whole blocks were among them


def test_the_packages_own_conversion_is_the_same_and_is_read(package, trained, tmp_path):  # noqa: F811
    from speculators.convert.dflash import DFlashConverter

    ours, target = export_to(trained, tmp_path, "speculators"), trained.target.name_or_path
    [zlab] = export(ours, tmp_path / "again", format="zlab")
    theirs = tmp_path / "theirs"
    DFlashConverter().convert(zlab, theirs, base_model=target)
    mine, its = (package.SpeculatorModelConfig.from_pretrained(folder) for folder in (ours, theirs))
    assert mine.speculators_config.verifier.architectures == its.speculators_config.verifier.architectures
    mine.speculators_config.verifier.name_or_path = target
    for field in type(its).model_fields.keys() - {"transformer_layer_config", "architectures"}:
        if field != "sliding_window_non_causal":  # says nothing: no layer has a window
            assert getattr(mine, field) == getattr(its, field), field
    drop = {"dtype", "pad_token_id"}
    mine, its = (config.transformer_layer_config.to_dict() for config in (mine, its))
    assert {k: v for k, v in mine.items() if k not in drop} == {k: v for k, v in its.items() if k not in drop}
    loaded = load(package, ours).state_dict()
    for name, weight in package.SpeculatorModel.from_pretrained(theirs, dtype=torch.float32).state_dict().items():
        if not name.startswith("verifier_"):
            assert torch.equal(loaded[name], weight), name
    # It leaves out the two tables, what Qwen3Config has by default, and the target's depth.
    with pytest.raises(ExportError, match=r"no key 'num_target_layers'. Name its target \(--target\)"):
        read_drafter(theirs)
    source = read_drafter(theirs, target)
    assert (source.config, source.verifier) == (trained.drafter.config, None)
    for name, weight in trained.drafter.state_dict().items():
        assert torch.equal(source.weights[name], weight), name


def test_what_a_dflash_drafter_is_not_is_refused(tmp_path):
    drafter = random_drafter("default", 2)
    verifier = random_verifier(drafter.config)
    folder = export_drafter(
        drafter.state_dict(), drafter.config, tmp_path / "out", "speculators", tokens=TOKENS, verifier=verifier
    )
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
        export_drafter(drafter.state_dict(), drafter.config, tmp_path / "no", "speculators", tokens=TOKENS)
    wrong = Verifier(None, (), verifier.embedding[:5], verifier.head)
    with pytest.raises(ExportError, match=r"tables of the target of shape \[\[5, 32\]\]; expected \[272, 32\]"):
        export_drafter(
            drafter.state_dict(), drafter.config, tmp_path / "no", "speculators", tokens=TOKENS, verifier=wrong
        )
