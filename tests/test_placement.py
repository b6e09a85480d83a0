"""A target that is split over processes, or over memory and disk, gives the features of the whole one."""

import shutil
import subprocess

import pytest
import torch
from cache_helpers import stored_files
from capture_helpers import random_texts, write_texts
from page_commands import command_line, commands_run_by
from safetensors.torch import load_file, save_file

from dflash_lightning import devices
from dflash_lightning.cache import FeatureCache, verify
from dflash_lightning.capture.command import capture
from dflash_lightning.cli import run
from dflash_lightning.devices import free_memory, resolve_device
from dflash_lightning.distributed import form_groups, launched_place
from dflash_lightning.errors import ConfigError, TargetError
from dflash_lightning.features import compute_features
from dflash_lightning.target import Placement, load_first_layers, load_target, target_text_config

LAYERS = [3, 1]
SETTINGS = {
    "storage": "bfloat16",
    "target_layer_ids": LAYERS,
    "dtype": "float32",
    "batch_tokens": 64,
    "shard_tokens": 100,
}


def features(cache) -> list[torch.Tensor]:
    assert verify(cache) == []
    read = FeatureCache(cache)
    assert read.complete
    return [read.read(index).features for index in range(len(read))]


def padded_batch():
    ids = torch.randint(4, 260, (3, 17), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return ids, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_layers_alone_give_the_features_of_the_whole_target(target_folder, dtype):
    whole = load_target(str(target_folder), dtype=dtype)
    part = load_first_layers(str(target_folder), 4, dtype=dtype, placement=Placement("cpu"))
    assert torch.equal(
        compute_features(part, *padded_batch(), LAYERS), compute_features(whole, *padded_batch(), LAYERS)
    )
    names = {name for name, _ in part.named_parameters()}
    assert not [name for name in names if name.startswith(("layers.4", "layers.5", "lm_head"))]
    assert names < {name.removeprefix("model.") for name, _ in whole.named_parameters()}
    assert all(not p.requires_grad and p.dtype == dtype for p in part.parameters())


def test_a_target_with_a_missing_weight_is_refused(llama_folder, tmp_path):
    for file in llama_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"1 weights are missing, such as model\.layers\.2\.mlp\.up_proj"):
        load_target(str(tmp_path), dtype=torch.float32)


@pytest.mark.parametrize("memory", ["1KB", "60KB", "110KB"])
def test_a_device_map_leaves_layers_on_disk_and_changes_no_bit(target_folder, tmp_path, memory):
    placement = Placement(device_map="auto", max_memory={"cpu": memory})
    part = load_first_layers(str(target_folder), 4, dtype=torch.float32, placement=placement)
    assert "disk" in part.hf_device_map.values()
    assert any(parameter.device.type == "meta" for parameter in part.parameters())
    folder = write_texts(tmp_path / "data", target_folder, random_texts(12))
    capture(str(target_folder), folder, tmp_path / "plain", **SETTINGS)
    capture(
        str(target_folder), folder, tmp_path / "split", device_map="auto", max_memory=placement.max_memory, **SETTINGS
    )
    for plain, split in zip(features(tmp_path / "plain"), features(tmp_path / "split"), strict=True):
        assert torch.equal(plain, split)


def capture_in_groups(target, data, cache, processes) -> str:
    """Capture as docs/cache.md says, in so many processes, two a target; returns what was said."""
    [command] = commands_run_by(__file__)
    settings = {"target": target, "data": data, "cache": cache, **SETTINGS}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    words = command_line(command, {"8": [str(processes)], "4": ["2"], "...": arguments})
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=600).stdout


@pytest.mark.slow
def test_two_processes_hold_one_target_and_one_of_them_writes(target_folder, tmp_path):
    data = write_texts(tmp_path / "data", target_folder, random_texts(12))
    capture(str(target_folder), data, tmp_path / "alone", **SETTINGS)
    said = capture_in_groups(target_folder, data, tmp_path / "shared", 2)
    assert said.count("is done") == said.count("writer 1 of 1 is done") == 1
    # Sums are made in another order: float32 differs in its last bits, so that bfloat16 may round to the neighbour.
    for alone, shared in zip(features(tmp_path / "alone"), features(tmp_path / "shared"), strict=True):
        torch.testing.assert_close(shared.float(), alone.float(), rtol=2**-7, atol=1e-4)
        assert (shared == alone).float().mean() > 0.99
    whole = stored_files(tmp_path / "shared")
    if target_folder.name == "qwen3":
        # Lost shards are made again by another number of groups.
        for shard in ("000000", "000001"):
            shutil.rmtree(tmp_path / "shared" / "shards" / shard)
        said = capture_in_groups(target_folder, data, tmp_path / "shared", 4)
        assert "writer 1 of 2 is done, 1 shard written now" in said
        assert "writer 2 of 2 is done, 1 shard written now" in said
        assert stored_files(tmp_path / "shared") == whole


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="tensor_parallel_size and device_map each say"):
        Placement(tensor_parallel_size=2, device_map="auto")
    with pytest.raises(ConfigError, match="device and device_map each say"):
        Placement("cpu", device_map="auto")
    with pytest.raises(ConfigError, match="max_memory limits a device map"):
        Placement(max_memory={"cpu": "1GB"})
    with pytest.raises(ConfigError, match="max_memory of cpu is 'plenty'; expected such as"):
        Placement(device_map="auto", max_memory={"cpu": "plenty"})
    with pytest.raises(ConfigError, match=r"max_memory names 9; expected devices of this machine: \["):
        Placement(device_map="auto", max_memory={9: "1GB", "cpu": "1GB"})
    with pytest.raises(ConfigError, match="tensor_parallel_size is 0"):
        Placement(tensor_parallel_size=0)
    with pytest.raises(ConfigError, match="Start a multiple of 2 processes with torchrun"):
        form_groups(launched_place(), 2)


def check(target, placement, local_rank=0):
    placement.check(str(target), target_text_config(str(target)), local_rank)


def test_a_target_that_cannot_be_placed_so_is_refused(llama_folder, monkeypatch):
    check(llama_folder, Placement(tensor_parallel_size=2))
    with pytest.raises(ConfigError, match=r"4 attention heads and 2 key-value heads\. Expected a size that divides"):
        check(llama_folder, Placement(tensor_parallel_size=4))
    with pytest.raises(ConfigError, match="one process a node"):
        check(llama_folder, Placement(device_map="auto"), local_rank=1)
    with pytest.raises(TargetError, match="Save it as a transformers folder first"):
        Placement(device_map="auto").check("some.gguf", target_text_config(str(llama_folder)), 0)
    monkeypatch.setattr("transformers.LlamaConfig.base_model_tp_plan", None)
    with pytest.raises(TargetError, match="no tensor parallel plan for model type 'llama'"):
        check(llama_folder, Placement(tensor_parallel_size=2))


@pytest.mark.parametrize("command", ["capture", "prepare", "evaluate", "generate"])
def test_an_unknown_device_is_one_message(llama_folder, tmp_path, command):
    needed = {
        "capture": ["--data", str(tmp_path), "--cache", str(tmp_path / "cache"), "--num-tapped-layers", "2"],
        "prepare": ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")],
        "evaluate": ["--drafter", str(tmp_path), "--prompts", "x"],
        "generate": ["--drafter", str(tmp_path), "--prompt", "x"],
    }
    with pytest.raises(ConfigError, match="device is 'foo'; expected auto or one that this machine has: cpu"):
        run([command, "--target", str(llama_folder), "--device", "foo", *needed[command]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["", "meta", "cpu:1", "cuda:99"])
def test_what_no_machine_has_is_refused(device):
    with pytest.raises(ConfigError, match=f"device is '{device}'"):
        resolve_device(device)


def test_gpus_are_named_and_shared_out_by_local_rank(monkeypatch):
    assert resolve_device("auto", local_rank=1) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto", local_rank=1) == torch.device("cuda", 1)
    assert [resolve_device(name).type for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda", "cuda"]
    with pytest.raises(ConfigError, match="this machine has: cpu, cuda:0, cuda:1"):
        resolve_device("auto", local_rank=2)


def test_the_memory_of_a_control_group_counts_without_what_makes_room(tmp_path):
    unlimited = free_memory(torch.device("cpu"), tmp_path)
    for name, content in (("max", "9000000"), ("current", "6000000"), ("stat", "anon 5000000\ninactive_file 1000000")):
        (tmp_path / f"memory.{name}").write_text(f"{content}\n")
    assert free_memory(torch.device("cpu"), tmp_path) == 4_000_000 < unlimited
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(torch.device("cpu"), tmp_path) > 4_000_000


@pytest.mark.parametrize("own", ["4:cpu,memory:/job/step\n0::/\n", None])
def test_the_memory_of_a_control_group_of_version_1_counts_too(tmp_path, monkeypatch, own):
    monkeypatch.setattr(devices, "OWN_GROUPS", tmp_path / "own")
    if own:
        (tmp_path / "own").write_text(own)
    for group, limit in (("memory", 9223372036854771712), ("memory/job", 9_000_000)):
        files = {"limit_in_bytes": limit, "usage_in_bytes": 6_000_000, "stat": "inactive_file 0\ntotal_inactive_file 5"}
        for name, content in files.items():
            (tmp_path / group).mkdir(exist_ok=True)
            (tmp_path / group / f"memory.{name}").write_text(f"{content}\n")
    free = free_memory(torch.device("cpu"), tmp_path)
    assert free == 3_000_005 if own else free > 9_000_000
    (tmp_path / "memory" / "job" / "memory.stat").write_text("cache 0\n")
    assert not own or free_memory(torch.device("cpu"), tmp_path) == 3_000_000
