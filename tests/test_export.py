"""Exported folders: exactly what is in them, back bit for bit, and every wrong folder refused by name."""

import json
from dataclasses import replace

import pytest
import torch
from export_helpers import SCALED_ROPE, TOKENS, random_verifier, save_checkpoint
from helpers import load_tiny, make_drafter
from safetensors.torch import load_file, save_file

from dflash_lightning.config import DrafterConfig
from dflash_lightning.errors import ConfigError, DataError, DFlashError, ExportError
from dflash_lightning.export import (
    FORMATS,
    TokenIds,
    export,
    export_drafter,
    load_drafter,
    parse_formats,
    read_drafter,
)
from dflash_lightning.rope import RotaryEmbedding

FILES = ["README.md", "config.json", "dflash_lightning.json", "model.safetensors"]
LAYER_KEYS = set(
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act attention_dropout rms_norm_eps initializer_range max_position_embeddings vocab_size bos_token_id "
    "eos_token_id tie_word_embeddings layer_types rope_parameters".split()
)
QWEN3_KEYS = {"attention_bias", "use_sliding_window", "sliding_window", "is_causal", "rope_theta"}
FOLDER_KEYS = {"architectures", "dtype", "num_target_layers", "block_size"}
KEYS = {
    "zlab": FOLDER_KEYS | LAYER_KEYS | QWEN3_KEYS | {"dflash_config"},
    "transformers": FOLDER_KEYS | LAYER_KEYS | {"pad_token_id", "mask_token_id", "target_layer_ids"},
    "speculators": FOLDER_KEYS
    | set(
        "speculators_model_type speculators_version speculators_config transformer_layer_config draft_vocab_size "
        "aux_hidden_state_layer_ids mask_token_id sample_from_anchor sliding_window_non_causal "
        "tie_word_embeddings".split()
    ),
}


@pytest.fixture
def target(qwen3_folder):
    return load_tiny(qwen3_folder)


@pytest.fixture
def drafter(target):
    return make_drafter(target, scale=3.0)


def write(drafter, folder, form="zlab", **options):
    options = {"tokens": TOKENS, "verifier": random_verifier(drafter.config), **options}
    return export_drafter(drafter.state_dict(), drafter.config, folder, form, **options)


def edit(folder, **changes):
    """Change keys of a config.json; None removes one."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.parametrize("form", FORMATS)
def test_a_folder_holds_exactly_the_files_keys_and_tensors_of_its_format(drafter, tmp_path, form):
    folder = write(drafter, tmp_path / "out", form)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    values = json.loads((folder / "config.json").read_text())
    assert set(values) == KEYS[form]
    layers = values
    if form == "speculators":
        layers = values["transformer_layer_config"]
        assert set(layers) == LAYER_KEYS | QWEN3_KEYS | {"pad_token_id"}
        assert values["speculators_config"] == {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": ["Qwen3ForCausalLM"]},
        }
        values["target_layer_ids"] = [layer - 1 for layer in values["aux_hidden_state_layer_ids"]]
    assert values["dtype"] == "bfloat16"
    assert (layers["bos_token_id"], layers["eos_token_id"], layers.get("pad_token_id", 0)) == (1, 2, 0)
    assert layers["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    settings = values["dflash_config"] if form == "zlab" else values
    assert (settings["block_size"], settings["mask_token_id"], settings["target_layer_ids"]) == (4, 3, [1, 3])
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    others = {"norm.weight"} | {
        "zlab": {"fc.weight", "hidden_norm.weight"},
        "transformers": {"encoder.fc.weight", "encoder.output_norm_enc.weight"},
        "speculators": {"fc.weight", "hidden_norm.weight", "embed_tokens.weight", "lm_head.weight"},
    }[form]
    parts = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    parts += [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    assert set(tensors) == others | {f"layers.{i}.{part}.weight" for i in range(2) for part in parts}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", SCALED_ROPE)
def test_a_drafter_comes_back_bit_for_bit(drafter, tmp_path, form, dtype, rope):
    drafter.config = config = replace(drafter.config, rope_parameters=SCALED_ROPE[rope])
    folder = write(drafter, tmp_path / "out", form, dtype=dtype)
    values = json.loads((folder / "config.json").read_text())
    assert set(values) == KEYS[form] | ({"rope_scaling"} if (form, rope != "default") == ("zlab", True) else set())
    layers = values["transformer_layer_config"] if form == "speculators" else values
    assert layers["rope_parameters"] == config.rope_parameters
    if rope != "default" and form != "transformers":  # for engines on transformers 4
        assert {"rope_theta": layers["rope_theta"], **layers["rope_scaling"]} == config.rope_parameters
    loaded = load_drafter(folder, dtype=dtype)
    assert loaded.config == config
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    for name, weight in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.to(dtype))


def test_the_older_spelling_of_official_checkpoints_is_read(drafter, tmp_path):
    yarn = SCALED_ROPE["yarn"]
    config = replace(drafter.config, rope_parameters=yarn)
    folder = export_drafter(drafter.state_dict(), config, tmp_path / "out", tokens=TOKENS)
    scaling = {"type": "yarn", "factor": yarn["factor"], "original_max_position_embeddings": 128}
    edit(
        folder,
        rope_parameters=None,
        rope_scaling=scaling,
        dflash_config={"mask_token_id": 3, "target_layer_ids": [1, 3]},
    )
    loaded = load_drafter(folder, dtype=torch.bfloat16)
    assert loaded.config.block_size == 4
    positions = torch.arange(300)[None]
    for found, expected in zip(loaded.rotary(positions), RotaryEmbedding(config)(positions), strict=True):
        assert torch.equal(found, expected)


def test_a_partial_rotary_factor_is_written_where_it_can_be_expressed(drafter, tmp_path):
    half = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    drafter.config = replace(drafter.config, rope_parameters=half)
    folder = write(drafter, tmp_path / "zlab")
    values = json.loads((folder / "config.json").read_text())
    assert set(values) == KEYS["zlab"] | {"partial_rotary_factor"}
    assert values["partial_rotary_factor"] == values["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert load_drafter(folder, dtype=torch.float32).config == drafter.config
    for form in ("transformers", "speculators"):
        with pytest.raises(ExportError, match=rf"Format {form} can't express this drafter: it rotates 0\.5 of each"):
            write(drafter, tmp_path / form, form)
    assert [path.name for path in tmp_path.iterdir()] == ["zlab"]


def test_values_that_the_data_type_has_no_room_for_are_refused(drafter, tmp_path):
    weights = {**drafter.state_dict(), "norm.weight": torch.full_like(drafter.norm.weight, 1e5)}
    with pytest.raises(ExportError, match=r"In float16 these tensors hold NaN or infinity: norm\.weight\. Export in"):
        export_drafter(weights, drafter.config, tmp_path / "out", tokens=TOKENS, dtype=torch.float16)
    verifier = random_verifier(drafter.config)
    verifier = replace(verifier, head=torch.full_like(verifier.head, 1e5))
    with pytest.raises(ExportError, match=r"In float16 .*: lm_head\.weight"):
        write(drafter, tmp_path / "out", "speculators", dtype=torch.float16, verifier=verifier)
    assert list(tmp_path.iterdir()) == []


def test_a_target_without_an_end_token_is_written(drafter, tmp_path):
    folder = write(drafter, tmp_path / "out", "transformers", tokens=TokenIds(bos=1, eos=[]))
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] is None


def test_reports_go_by_their_files_names_and_belong_to_the_drafter(drafter, qwen3_folder, tmp_path):
    checkpoint, report = tmp_path / "best.ckpt", tmp_path / "held-out.json"
    save_checkpoint(checkpoint, drafter, qwen3_folder)
    target = {"name": "qwen3", "weights_sha256": read_drafter(checkpoint).provenance.target.weights_sha256}
    told = {**drafter.config.to_dict(), "weights_sha256": "of another dtype"}
    figures = {"tau": 2.0, "prompts": 4, "prompt_set": "p.jsonl", "target": target, "drafter": told}
    report.write_text(json.dumps(figures))
    [folder] = export(checkpoint, tmp_path / "one", "zlab", evaluations=[report], verify=False)
    report.write_text(json.dumps({**figures, "tau": 3.0}))
    [folder] = export(folder, tmp_path / "two", "zlab", evaluations=[report], verify=False)
    found = read_drafter(folder).provenance.evaluations
    assert [(entry["prompt_set"], entry["tau"]) for entry in found] == [("held-out", 3.0)]
    for wrong, message in (
        ({"target": {**target, "weights_sha256": "0"}}, "is of the target qwen3, the drafter's is qwen3, of other"),
        ({"drafter": {**told, "block_size": 5}}, "is of another drafter: block_size is 5, here 4"),
    ):
        report.write_text(json.dumps({**figures, **wrong}))
        with pytest.raises(ExportError, match=message):
            export(checkpoint, tmp_path / "three", evaluations=[report], verify=False)
    report.write_text("{")
    with pytest.raises(ExportError, match=r"not valid JSON .* Run `evaluate` again"):
        export(checkpoint, tmp_path / "three", evaluations=[report], verify=False)


def test_a_checkpoint_beside_an_exported_drafter_is_not_looked_at(drafter, tmp_path):
    folder = write(drafter, tmp_path / "out")
    (folder / "old.ckpt").write_bytes(b"of something else")
    assert load_drafter(folder, dtype=torch.float32).config == drafter.config


def test_nothing_is_overwritten(drafter, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    write(drafter, folder)  # an empty folder is free
    before = (folder / "config.json").stat().st_mtime_ns
    with pytest.raises(ExportError, match="not empty, and an export overwrites nothing"):
        write(drafter, folder)
    assert (folder / "config.json").stat().st_mtime_ns == before
    with pytest.raises(ExportError, match="is a file"):
        write(drafter, folder / "config.json")


def test_weights_that_are_not_the_drafters_are_refused(drafter, tmp_path):
    weights = drafter.state_dict()
    wrong = {**weights, "lm_head.weight": torch.zeros(2, 2), "norm.weight": torch.zeros(5)}
    del wrong["layers.1.mlp.up_proj.weight"]
    with pytest.raises(ExportError) as caught:
        export_drafter(wrong, drafter.config, tmp_path / "out", tokens=TOKENS)
    for part in (
        "missing layers.1.mlp.up_proj.weight",
        "unexpected lm_head.weight",
        "norm.weight is [5], expected [32]",
    ):
        assert part in str(caught.value)
    broken = {**weights, "fc.weight": weights["fc.weight"].clone().fill_(float("nan"))}
    with pytest.raises(ExportError, match=r"NaN or infinity: fc\.weight"):
        export_drafter(broken, drafter.config, tmp_path / "out", tokens=TOKENS)
    with pytest.raises(ExportError, match="mask token 3 is the target's eos token"):
        write(drafter, tmp_path / "out", tokens=TokenIds(bos=1, eos=[2, 3]))
    assert list(tmp_path.iterdir()) == []


def test_foreign_and_damaged_folders_are_refused(drafter, qwen3_folder, tmp_path):
    def refused(path, message, error=ExportError):
        with pytest.raises(error, match=message):
            load_drafter(path, dtype=torch.float32)

    refused(tmp_path / "absent", "There is no drafter at")
    refused(qwen3_folder, "not a drafter: its config.json is of model type 'qwen3'")
    refused(tmp_path, "it has no config.json and no model.safetensors")
    folder = write(drafter, tmp_path / "out", dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")

    save_file({"extra": torch.zeros(2), **tensors}, folder / "model.safetensors")
    refused(folder, "unexpected extra")
    save_file({name: tensor for name, tensor in tensors.items() if "k_norm" not in name}, folder / "model.safetensors")
    refused(folder, r"missing layers.0.self_attn.k_norm.weight, layers.1.self_attn.k_norm.weight")
    (folder / "model.safetensors").write_bytes(b"\x10" * 50)
    refused(folder, "model.safetensors can't be read")

    edit(folder, num_target_layers=None)
    refused(folder, "has no key 'num_target_layers'")
    edit(folder, num_target_layers=4)
    refused(folder, "doesn't describe a drafter that works: .*last layer")
    edit(folder, layer_types=["sliding_attention", "full_attention"])
    refused(folder, "only full_attention is supported")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json is not valid JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "holds a list")


def test_format_lists(tmp_path):
    assert [form.name for form in parse_formats("transformers, zlab,zlab")] == ["transformers", "zlab"]
    with pytest.raises(ExportError, match="unknown format 'gguf' in 'zlab,gguf'; known are zlab, speculators, tr"):
        export(tmp_path / "absent", tmp_path, format="zlab,gguf")
    with pytest.raises(ExportError, match="no format"):
        parse_formats(" , ")


def test_the_command_exports_a_checkpoint_and_says_what_it_is(drafter, qwen3_folder, tmp_path):
    checkpoint, report = tmp_path / "best.ckpt", tmp_path / "held-out.json"
    save_checkpoint(checkpoint, drafter, qwen3_folder)
    report.write_text(
        json.dumps({"tau": 2.875, "tau_low": 2.5, "tau_high": 3.25, "prompts": 48, "histogram": {"1": 3}})
    )
    folders = export(checkpoint, tmp_path / "out", evaluations=[report], verify=False)
    assert folders == [tmp_path / "out" / "zlab", tmp_path / "out" / "transformers"]
    for folder in folders:
        assert torch.equal(load_drafter(folder, dtype=torch.bfloat16).fc.weight, drafter.fc.weight.bfloat16())
        metadata = json.loads((folder / "dflash_lightning.json").read_text())
        made = metadata["provenance"]
        assert (metadata["format"], made["checkpoint"], made["step"]) == (folder.name, "best.ckpt", 7)
        assert made["target"]["name"] == "qwen3"
        assert made["evaluations"][0]["prompt_set"] == "held-out"
        card = (folder / "README.md").read_text()
        assert "| held-out | 48 | 2.875 | 2.500 to 3.250 |" in card
        assert made["target"]["weights_sha256"] in card
        assert str(tmp_path) not in card + json.dumps(metadata)  # nobody's folders are published
    # An exported folder exports again, to the same weights and with the same story.
    [again] = export(folders[1], tmp_path / "again", format="zlab")
    assert (again / "model.safetensors").read_bytes() == (folders[0] / "model.safetensors").read_bytes()
    assert (again / "config.json").read_text() == (folders[0] / "config.json").read_text()
    assert read_drafter(again).provenance == read_drafter(folders[0]).provenance


def test_the_command_refuses_before_it_writes(drafter, qwen3_folder, llama_folder, tmp_path):
    checkpoint, output = tmp_path / "best.ckpt", tmp_path / "out"
    save_checkpoint(checkpoint, drafter, qwen3_folder)
    report = tmp_path / "report.json"
    report.write_text("{}")
    for options, error, message in (
        ({"target": str(llama_folder)}, ExportError, "isn't the one that the drafter was trained for"),
        ({"target": str(tmp_path / "gone")}, DFlashError, "no such path"),
        ({"evaluations": [report]}, DataError, "has no tau and no prompts"),
    ):
        with pytest.raises(error, match=message):
            export(checkpoint, output, **options)
    (output / "transformers").mkdir(parents=True)
    (output / "transformers" / "precious").write_text("x")
    with pytest.raises(ExportError, match="not empty"):
        export(checkpoint, output)
    assert [path.name for path in output.iterdir()] == ["transformers"]
    with pytest.raises(ConfigError):
        DrafterConfig.from_dict({**drafter.config.to_dict(), "mask_token_id": 272})
