"""What a run needs, and command lines in which one thing can be made wrong."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from capture_helpers import random_texts, write_texts
from export_helpers import TOKENS
from fit_helpers import checkpoints, fit_config
from helpers import load_tiny, make_drafter
from training_helpers import random_sample, write_cache

from dflash_lightning.cli import main
from dflash_lightning.export import export_drafter


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
    (folder / "turns.jsonl").write_text('{"turns": ["say 7", "and 8"]}\n')
    (folder / "evaluate.yaml").write_text("max_new_tokens: null\n")
    (folder / "empty.jsonl").write_text('{"prompt": "say 7", "response": ""}\n')
    cut = [replace(text, response_start=len(text.input_ids)) for text in random_texts(2)]
    write_texts(folder / "unanswered", llama_folder, cut)
    below = folder / "prompts.jsonl" / "below"
    return SimpleNamespace(folder=folder, llama=str(llama_folder), qwen3=str(qwen3_folder), below=below)


def prepare(made, **changes):
    settings = {"target": made.llama, "input": made.folder / "prompts.jsonl", "output": made.folder / "prepared"}
    return ["prepare", *(part for name, value in {**settings, **changes}.items() for part in (f"--{name}", str(value)))]


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


def decoding(prompts, **settings):
    return {"class_path": "callbacks.DecodedAcceptance", "init_args": {"prompts": str(prompts), **settings}}


def export_at_end(folder):
    return {"class_path": "callbacks.ExportDrafter", "init_args": {"dirpath": str(folder)}}


def told(monkeypatch, capsys, arguments: list[str]) -> str:
    """What the command says on stderr; it ends with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["dflash-lightning", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    return capsys.readouterr().err
