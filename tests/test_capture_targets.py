"""A target is named by a folder, a hub name or a GGUF file, and computes in the dtype asked for."""

import shutil
from pathlib import Path

import pytest
import torch
from capture_helpers import random_texts, write_texts
from gguf_helpers import write_tiny_gguf

from dflash_lightning.cache import CacheManifest, FeatureCache, open_store, verify
from dflash_lightning.capture.command import capture
from dflash_lightning.features import compute_features
from dflash_lightning.target import convert_gguf, load_target

LAYERS = [1, 3]


def check_captured(target: str, tmp_path: Path, dtype: str) -> CacheManifest:
    """Capture texts, one a batch, and compare bit by bit with the whole target's features of the same batches."""
    samples, cache = random_texts(4), tmp_path / "cache"
    data = write_texts(tmp_path / "data", target, samples)
    settings = {"target_layer_ids": LAYERS, "storage": "bfloat16", "device": "cpu", "batch_tokens": 1}
    capture(target, data, str(cache), dtype=dtype, **settings)
    assert verify(cache) == []
    model, stored = load_target(target, dtype=getattr(torch, dtype)), FeatureCache(cache)
    assert len(stored) == len(samples)
    for index, sample in enumerate(samples):
        ids = torch.tensor([sample.input_ids])
        expected = compute_features(model, ids, torch.ones_like(ids), LAYERS)[0].bfloat16()
        assert torch.equal(stored.read(index).features, expected)
    manifest = CacheManifest.load(open_store(cache))
    assert manifest.capture["dtype"] == dtype
    return manifest


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_folder_in_the_dtype_asked_for(target_folder, tmp_path, dtype):
    assert check_captured(str(target_folder), tmp_path, dtype).target.revision == ""


def test_a_hub_name_with_its_revision(llama_folder, tmp_path, monkeypatch):
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(llama_folder, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    manifest = check_captured("someone/tiny", tmp_path, "bfloat16")
    assert (manifest.target.name, manifest.target.revision) == ("someone/tiny", revision)


def test_a_gguf_file_gives_the_features_of_the_folder_made_from_it(tmp_path, capsys):
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    caches = []
    for place, target in (("file", file), ("folder", convert_gguf(file, tmp_path / "converted"))):
        data = write_texts(tmp_path / place, target, random_texts(4))
        settings = {"target_layer_ids": LAYERS, "storage": "bfloat16", "device": "cpu"}
        capture(str(target), data, str(tmp_path / f"{place}-cache"), **settings)
        caches.append(FeatureCache(tmp_path / f"{place}-cache"))
    assert "\r" not in capsys.readouterr().err  # a library's progress bar
    of_file, of_folder = caches
    for index in range(len(of_file)):
        assert of_file.read(index).features.float().abs().sum() > 0
        assert torch.equal(of_file.read(index).features, of_folder.read(index).features)
