"""Finding, loading and identifying a target; its tables; its mask token."""

import hashlib
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conftest import byte_tokenizer
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from dflash_lightning.errors import ConfigError, TargetError
from dflash_lightning.target import (
    convert_gguf,
    load_generation_config,
    load_tables,
    load_target,
    load_tokenizer,
    resolve_mask_token_id,
    stop_token_ids,
    target_identity,
    target_text_config,
)
from dflash_lightning.target.special_tokens import fitting_mask_tokens

SMOLLM2_TABLE_SHA256 = "0c8d76d0178f771e989a41b5965b452b7ccc0ef6c36d3d73b77e643dbe23264b"


def content(name) -> tuple[str, str, str]:
    identity = target_identity(str(name))
    return identity.weights_sha256, identity.tokenizer_sha256, identity.chat_template_sha256


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def test_a_folder_loads_frozen_and_in_the_asked_dtype(target_folder):
    model = load_target(str(target_folder), dtype=torch.bfloat16)
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in model.parameters())
    assert load_tokenizer(str(target_folder)).decode([5, 6]) == byte_tokenizer().decode([5, 6])


def test_text_config_holds_the_facts_a_drafter_needs(qwen3_folder, llama_folder):
    config = target_text_config(str(qwen3_folder))
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (32, 6, 2, 16)
    assert config.rope_parameters["rope_type"] == "default"
    assert target_text_config(str(llama_folder)).head_dim == 8


def test_tables_are_those_of_the_loaded_model(target_folder):
    embedding, head = load_tables(str(target_folder), dtype=torch.float32)
    model = load_target(str(target_folder), dtype=torch.float32)
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head, model.get_output_embeddings().weight)
    assert (head is embedding) == (target_folder.name == "llama")


def test_tables_of_a_sharded_folder_with_a_prefix(qwen3_folder, tmp_path):
    folder = copy(qwen3_folder, tmp_path / "sharded")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for i, (name, tensor) in enumerate(weights.items()):
        halves[list(halves)[i % 2]][f"language_model.{name}"] = tensor
    for file, tensors in halves.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in halves.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    embedding, head = load_tables(str(folder), dtype=torch.bfloat16)
    assert torch.equal(embedding, weights["model.embed_tokens.weight"].bfloat16())
    assert torch.equal(head, weights["lm_head.weight"].bfloat16())


def test_tables_with_unknown_names_come_from_the_model(llama_folder, monkeypatch):
    monkeypatch.setattr("dflash_lightning.target.tables.EMBEDDING_NAMES", ())
    embedding, head = load_tables(str(llama_folder), dtype=torch.float32)
    assert head is embedding
    assert embedding.shape == (272, 32)


def test_a_head_that_differs_from_the_table_it_should_be_tied_to_stays_apart(llama_folder, tmp_path):
    folder = copy(llama_folder, tmp_path / "untied")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    embedding, head = load_tables(str(folder), dtype=torch.float32)
    model = load_target(str(folder), dtype=torch.float32)
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head, model.get_output_embeddings().weight)
    assert not torch.equal(head, embedding)


def test_identity_follows_content_and_not_the_path(llama_folder, qwen3_folder, tmp_path):
    moved = copy(llama_folder, tmp_path / "elsewhere")
    identity = target_identity(str(moved))
    assert (identity.name, identity.revision) == ("elsewhere", "")
    assert content(moved) == content(llama_folder)
    assert content(qwen3_folder)[0] != content(llama_folder)[0]


@pytest.mark.parametrize("changed", ["weights", "tokenizer", "template"])
def test_identity_changes_with_each_part_alone(llama_folder, tmp_path, changed):
    folder = copy(llama_folder, tmp_path / changed)
    if changed == "weights":
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][3] += 0.5
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    elif changed == "tokenizer":
        text = (folder / "tokenizer.json").read_text().replace("<|mask|>", "<|fill|>")
        (folder / "tokenizer.json").write_text(text)
    else:
        tokenizer = load_tokenizer(str(folder))
        tokenizer.chat_template += " "
        tokenizer.save_pretrained(folder)
    before, after = content(llama_folder), content(folder)
    assert [a != b for a, b in zip(before, after, strict=True)] == [
        changed == part for part in ("weights", "tokenizer", "template")
    ]


def test_identity_samples_large_files_from_the_first_byte_to_the_last(llama_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_lightning.target.identity.BLOCK_BYTES", 64)
    monkeypatch.setattr("dflash_lightning.target.identity.BLOCKS_PER_FILE", 8)
    folder = copy(llama_folder, tmp_path / "large")
    before = content(folder)[0]
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert content(folder)[0] != before


def test_a_tokenizer_without_template_has_an_empty_hash(llama_folder, tmp_path):
    folder = copy(llama_folder, tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    assert target_identity(str(folder)).chat_template_sha256 == ""


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: p.mkdir(), "no config.json and no \\*.safetensors weights"),
        (lambda p: (p.mkdir(), (p / "config.json").write_text("{}")), "no \\*.safetensors weights"),
        (lambda p: p.write_text("x"), "a file that isn't a .gguf"),
        (lambda _: None, "no such path"),
    ],
)
def test_what_is_no_target_is_refused_by_name(tmp_path, make, expected):
    make(tmp_path / "thing")
    with pytest.raises(TargetError, match=expected) as caught:
        load_target(str(tmp_path / "thing"), dtype=torch.float32)
    assert str(tmp_path / "thing") in str(caught.value)


def test_an_unknown_model_type_is_refused(llama_folder, tmp_path):
    folder = copy(llama_folder, tmp_path / "unknown")
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    with pytest.raises(TargetError, match="no_such_type"):
        load_target(str(folder), dtype=torch.float32)


def test_damaged_files_are_refused_and_named(llama_folder, tmp_path):
    folder = copy(llama_folder, tmp_path / "damaged")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    with pytest.raises(TargetError, match=r"configuration can't be loaded.*hidden_size"):
        target_text_config(str(folder))
    (folder / "config.json").write_text(json.dumps(config))
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(TargetError, match="weights can't be loaded"):
        load_target(str(folder), dtype=torch.float32)
    with pytest.raises(TargetError, match="tables can't be loaded"):
        load_tables(str(folder), dtype=torch.float32)


def test_a_hub_name_out_of_reach_is_one_message(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TargetError, match=r"'nobody/nothing'.*check the name"):
        load_tokenizer("nobody/nothing")
    with pytest.raises(TargetError, match="'no such!'"):
        load_tokenizer("no such!")


def test_a_missing_or_broken_gguf_is_refused(tmp_path):
    with pytest.raises(TargetError, match="no such GGUF file"):
        load_target(str(tmp_path / "absent.gguf"), dtype=torch.float32)
    (tmp_path / "broken.gguf").write_bytes(b"not a model at all, only text")
    with pytest.raises(TargetError, match=r"broken\.gguf"):
        load_target(str(tmp_path / "broken.gguf"), dtype=torch.float32)


def test_an_unsupported_gguf_architecture_is_named_with_its_file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "strange.gguf", "strangearch")
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(TargetError, match=r"strange\.gguf.*strangearch"):
        load_target(str(tmp_path / "strange.gguf"), dtype=torch.float32)
    with pytest.raises(TargetError, match="strangearch"):
        convert_gguf(tmp_path / "strange.gguf", tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["strange.gguf"]


def test_stop_ids_join_generation_config_and_tokenizer(llama_folder):
    tokenizer = byte_tokenizer()
    assert stop_token_ids(GenerationConfig(eos_token_id=[9, 7, 2]), tokenizer) == (2, 7, 9)
    assert stop_token_ids(GenerationConfig(eos_token_id=9), tokenizer) == (2, 9)
    assert stop_token_ids(GenerationConfig(), tokenizer) == (2,)
    assert stop_token_ids(load_generation_config(str(llama_folder)), tokenizer) == (2,)
    assert stop_token_ids(load_target(str(llama_folder), dtype=torch.float32), tokenizer) == (2,)


def test_mask_token_is_explicit_or_the_tokenizers_or_the_first_unused_row():
    tokenizer = byte_tokenizer()
    assert resolve_mask_token_id(3, tokenizer, 272, [2]) == 3
    assert resolve_mask_token_id(None, tokenizer, 272, [2]) == 260
    tokenizer.mask_token = "<|mask|>"
    assert resolve_mask_token_id(None, tokenizer, 272, [2]) == 3


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        (0, "the pad token"),
        (1, "the bos token"),
        (2, "the eos token"),
        (9, "a stop token"),
        (272, "outside the embedding table of 272 rows"),
        (-1, "outside the embedding table"),
    ],
)
def test_a_mask_token_with_another_meaning_is_refused(mask, problem):
    with pytest.raises(ConfigError, match=rf"Mask token id {mask} .*{problem}.*mask_token_id to an id from 0 to 271"):
        resolve_mask_token_id(mask, byte_tokenizer(), 272, [9])


def test_without_a_free_row_a_mask_token_must_be_named():
    with pytest.raises(ConfigError, match=r"use all 260 rows.*3 \(<\|mask\|>\)"):
        resolve_mask_token_id(None, byte_tokenizer(), 260, [2])


def test_tokens_that_a_chat_has_are_not_offered_as_mask_tokens():
    tokenizer = byte_tokenizer()
    rarest = [f"{id} ({tokenizer.convert_ids_to_tokens(id)})" for id in (259, 258)]
    assert fitting_mask_tokens(tokenizer, 260, {0, 1, 2}) == ["3 (<|mask|>)", *rarest]
    tokenizer.chat_template = "<|mask|>"
    assert fitting_mask_tokens(tokenizer, 259, {0, 1, 2})[0] == rarest[1]


@pytest.mark.real
def test_smollm2_from_gguf_to_folder(smollm2_file, smollm2_folder):
    path, folder = smollm2_file, smollm2_folder
    embedding, head = load_tables(str(folder), dtype=torch.bfloat16)
    assert head is embedding
    assert hashlib.sha256(embedding.view(torch.uint16).numpy().tobytes()).hexdigest() == SMOLLM2_TABLE_SHA256
    of_folder, of_file = load_tokenizer(str(folder)), load_tokenizer(str(path))
    assert of_folder.chat_template == of_file.chat_template
    text = "The number 12,345 in <|im_start|>user\nnaïve   text\n\n\tdone. 東京 🙂<|im_end|>"
    assert of_folder(text).input_ids == of_file(text).input_ids
    assert of_folder.decode(of_folder(text).input_ids) == text
    assert stop_token_ids(load_generation_config(str(folder)), of_folder) == (2,)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert_gguf(path, folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(TargetError, match="float32"):
        convert_gguf(path, folder, dtype=torch.float32)
    assert not list(folder.parent.glob(".*.partial"))
