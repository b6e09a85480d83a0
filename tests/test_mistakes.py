"""The most likely mistakes, each made on the command line: one clear message, no traceback."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from capture_helpers import random_texts, write_texts
from export_helpers import TOKENS
from fit_helpers import checkpoints, fit_config
from helpers import load_tiny, make_drafter
from training_helpers import random_sample, write_cache

from dflash_lightning import cli
from dflash_lightning.cli import main
from dflash_lightning.errors import TargetError
from dflash_lightning.export import export_drafter
from dflash_lightning.usage import plain_words


@pytest.fixture(scope="module")
def made(tmp_path_factory, llama_folder, qwen3_folder):
    """Everything that a run needs, sound."""
    folder = tmp_path_factory.mktemp("made")
    write_texts(folder / "data", llama_folder, random_texts(4))
    samples = [random_sample(f"s{i}", 20, 3, 64, seed=i) for i in range(6)]
    write_cache(folder / "cache", samples, target=llama_folder, layer_ids=[1, 3], hidden_size=32)
    drafter = make_drafter(load_tiny(llama_folder))
    export_drafter(drafter.state_dict(), drafter.config, folder / "drafter", "zlab", tokens=TOKENS)
    values = json.loads((folder / "drafter" / "config.json").read_text())
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text(json.dumps({**values, "num_target_layers": 9}))
    (folder / "other" / "model.safetensors").symlink_to(folder / "drafter" / "model.safetensors")
    (folder / "full" / "zlab").mkdir(parents=True)
    (folder / "full" / "zlab" / "mine.txt").write_text("")
    (folder / "prompts.jsonl").write_text('{"prompt": "say 7"}\n')
    (folder / "broken.jsonl").write_text('{"prompt": "say 7"}\n{"prompt": 7}\n')
    (folder / "broken.ckpt").write_bytes(b"PK not a checkpoint")
    return SimpleNamespace(folder=folder, llama=str(llama_folder), qwen3=str(qwen3_folder))


def evaluate(made, **changes):
    settings = {"target": made.llama, "drafter": made.folder / "drafter", "prompts": made.folder / "prompts.jsonl"}
    return [
        "evaluate",
        *(part for name, value in {**settings, **changes}.items() for part in (f"--{name}", str(value))),
    ]


def capture(made, **changes):
    settings = {"target": made.llama, "data": made.folder / "data", "cache": made.folder / "new-cache"}
    settings["target-layer-ids"] = [1, 3]
    return ["capture", *(part for name, value in {**settings, **changes}.items() for part in (f"--{name}", str(value)))]


def fit(made, changes=None, *arguments):
    """``changes`` of the configuration, by dotted name."""
    config = fit_config(made.llama, made.folder / "cache", made.folder, [checkpoints(made.folder, "last")])
    for name, value in (changes or {}).items():
        *above, last = name.split(".")
        place = config
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    file = made.folder / "fit.yaml"
    file.write_text(yaml.safe_dump(config))
    return ["fit", "--config", str(file), *arguments]


MISTAKES = {
    "no target there": (lambda made: evaluate(made, target="/nowhere"), "/nowhere"),
    "a folder that is no target": (lambda made: evaluate(made, target=made.folder), "isn't a target"),
    "no prompts there": (lambda made: evaluate(made, prompts="/nowhere.jsonl"), r"/nowhere.jsonl: no such file"),
    "a malformed prompt": (lambda made: evaluate(made, prompts=made.folder / "broken.jsonl"), "broken.jsonl, line 2"),
    "no drafter there": (lambda made: evaluate(made, drafter="/nowhere"), "no drafter at /nowhere"),
    "a drafter for another target": (
        lambda made: evaluate(made, drafter=made.folder / "other"),
        "num_target_layers is 9",
    ),
    "a damaged checkpoint": (lambda made: evaluate(made, drafter=made.folder / "broken.ckpt"), "can't be read"),
    "no such dtype": (lambda made: evaluate(made, dtype="float8"), "bfloat16"),
    "no such device": (lambda made: evaluate(made, device="cuda:7"), "cuda:7"),
    "an unknown option": (lambda made: [*evaluate(made), "--promts", "x"], "promts"),
    "an option left out": (lambda made: ["evaluate", "--target", made.llama], "drafter"),
    "an unknown command": (lambda _: ["trian"], "no command 'trian'"),
    "no prepared data there": (lambda made: capture(made, data="/nowhere"), "/nowhere"),
    "data of another target": (lambda made: capture(made, target=made.qwen3), "prepared with target"),
    "the last layer is tapped": (lambda made: capture(made, **{"target-layer-ids": [1, 5]}), "last layer"),
    "no cache there": (lambda made: fit(made, {"data.cache": "/nowhere"}), "/nowhere"),
    "a cache of another target": (lambda made: fit(made, {"model.target": made.qwen3}), "weights_sha256"),
    "a cache of other layers": (lambda made: fit(made, {"model.drafter.target_layer_ids": [1, 2]}), r"\[1, 3\]"),
    "a mask token that ends texts": (lambda made: fit(made, {"model.drafter.mask_token_id": 2}), "Mask token id 2"),
    "an unknown key in YAML": (lambda made: fit(made, {"model.drafter.blocksize": 8}), "blocksize"),
    "no such configuration": (lambda _: ["fit", "--config", "/nowhere.yaml"], "config: .*/nowhere.yaml"),
    "a value of another type": (lambda made: fit(made, {"model.drafter.num_layers": "two"}), "num_layers"),
    "a value out of range": (lambda made: fit(made, {"model.optimizer.lr": -1.0}), "lr is -1.0"),
    "no end to training": (lambda made: fit(made, {"trainer.max_steps": -1}), "max_steps"),
    "no accumulation": (lambda made: fit(made, {"trainer.accumulate_grad_batches": 0}), "accumulate_grad_batches"),
    "no node": (lambda made: fit(made, {"trainer.num_nodes": 0}), "num_nodes"),
    "no device": (lambda made: fit(made, {"trainer.devices": 0}), "devices"),
    "no GPU here": (lambda made: fit(made, {"trainer.accelerator": "gpu"}), "No supported gpu backend found"),
    "a precision that loses": (lambda made: fit(made, {"trainer.precision": "16-mixed"}), "16-mixed"),
    "a batch smaller than a sample": (lambda made: fit(made, {"data.batch_tokens": 10}), "batch_tokens"),
    "blocks longer than any answer": (lambda made: fit(made, {"model.drafter.block_size": 32}), "block_size"),
    "nothing to resume": (lambda made: fit(made, None, "--resume", "/nowhere.ckpt"), "no checkpoint at /nowhere.ckpt"),
    "a full folder to export to": (
        lambda made: ["export", "--checkpoint", str(made.folder / "drafter"), "--output", str(made.folder / "full")],
        "zlab is not empty",
    ),
    "no such format": (
        lambda made: ["export", "--checkpoint", str(made.folder / "drafter"), "--output", "x", "--format", "onnx"],
        "unknown format 'onnx' in 'onnx'; known are zlab",
    ),
    "a file where a folder is expected": (
        lambda made: capture(made, cache=made.folder / "prompts.jsonl"),
        r"prompts.jsonl",
    ),
    "no cache at a path": (lambda made: ["cache", "info", str(made.folder)], "is not a feature cache"),
}


def told(made, monkeypatch, capsys, name: str, *more: str) -> str:
    """What the command says on stderr; it ends with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["dflash-lightning", *MISTAKES[name][0](made), *more])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message(made, monkeypatch, capsys, name):
    message = told(made, monkeypatch, capsys, name)
    assert "Traceback" not in message
    assert re.search(MISTAKES[name][1], message), message
    assert len(message.splitlines()) <= 9


@pytest.mark.slow
def test_a_port_in_use_is_one_message(made):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        command = [sys.executable, "-m", "dflash_lightning", *fit(made)]
        found = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stderr
    assert "is in use" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_full_disk_is_one_message(monkeypatch, capsys):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device", "out.json")

    monkeypatch.setattr(cli, "run", full)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "No space left on device: 'out.json'. Free some space" in capsys.readouterr().err


@pytest.mark.usefixtures("process_group")
def test_debug_shows_where_it_was_raised(made, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dflash-lightning", "--debug", *MISTAKES["no target there"][0](made)])
    with pytest.raises(TargetError, match="/nowhere"):
        main()


def test_nested_reasons_are_told_with_the_full_name_of_the_setting():
    message = """Parser key "model.drafter":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'dflash_lightning.config.DrafterSettings'>, <class 'NoneType'>]
  Errors:
    - Problem with given class_path 'dflash_lightning.config.DrafterSettings':
        Parser key "num_layers":
          Expected a <class 'int'>. Got value: two
    - Expected a <class 'NoneType'>
  Given value type: <class 'dict'>
  Given value: {'num_layers': 'two'}"""
    assert plain_words(message) == "model.drafter.num_layers: Expected a int. Got value: two"
    assert plain_words("unrecognized arguments: --x") == "unrecognized arguments: --x"
    assert plain_words('Parser key "config": no file') == "config: no file"
