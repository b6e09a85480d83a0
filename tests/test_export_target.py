"""A drafter and its target belong together: every command refuses the one with another."""

import json
import shutil
from dataclasses import replace

import pytest
from export_helpers import TOKENS, save_checkpoint
from helpers import load_tiny, make_drafter
from safetensors.torch import load_file, save_file

from dflash_lightning.decoding.generate import generate
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import ExportError
from dflash_lightning.evaluation.command import evaluate
from dflash_lightning.export import export, export_drafter, read_drafter
from dflash_lightning.training.initial_drafter import choose_drafter


def test_another_shape_is_refused_field_by_field(llama_folder, tmp_path):
    drafter = make_drafter(load_tiny(llama_folder))

    def written(config, name):
        return export_drafter(Drafter(config).state_dict(), config, tmp_path / name, tokens=TOKENS)

    read_drafter(written(drafter.config, "right"), str(llama_folder))
    wrong = written(replace(drafter.config, hidden_size=64, vocab_size=300, num_target_layers=8), "wrong")
    with pytest.raises(ExportError) as caught:
        read_drafter(wrong, str(llama_folder))
    for part in (
        "hidden_size is 64, the target's is 32",
        "vocab_size is 300, the target's is 272",
        "num_target_layers is 8, the target's is 6",
    ):
        assert part in str(caught.value)


@pytest.fixture(scope="module")
def tuned_folder(llama_folder, tmp_path_factory):
    """The Llama target after a little more training, as it were: the same shape, one weight moved."""
    folder = tmp_path_factory.mktemp("targets") / "tuned"
    shutil.copytree(llama_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


USES = {
    "evaluate": lambda drafter, target, folder: evaluate(target, drafter, str(folder / "prompts.jsonl"), device="cpu"),
    "generate": lambda drafter, target, _: generate(target, drafter, "Hello", device="cpu"),
    "export": lambda drafter, target, folder: export(drafter, folder / "again", target=target),
    "fit": lambda drafter, target, _: choose_drafter(target, None, drafter),
}


@pytest.mark.parametrize("command", USES)
def test_another_fingerprint_is_refused_by_every_command(llama_folder, tuned_folder, prompts_file, tmp_path, command):
    checkpoint, target = tmp_path / "best.ckpt", str(tuned_folder)
    save_checkpoint(checkpoint, make_drafter(load_tiny(llama_folder)), llama_folder)
    [folder] = export(checkpoint, tmp_path / "ours", format="zlab", verify=False)
    for drafter in (checkpoint, folder):
        with pytest.raises(ExportError, match=r"isn't the one .* was trained for \(llama\): it has other weights\."):
            USES[command](drafter, target, prompts_file.parent)
    (folder / "dflash_lightning.json").unlink()
    assert read_drafter(folder, target).provenance is None


def test_a_mask_token_that_ends_answers_is_refused(llama_folder, tmp_path):
    drafter, target = make_drafter(load_tiny(llama_folder)), tmp_path / "target"
    folder = export_drafter(drafter.state_dict(), drafter.config, tmp_path / "out", tokens=TOKENS)
    shutil.copytree(llama_folder, target)
    read_drafter(folder, str(target))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    with pytest.raises(ExportError, match="mask token 3 is the target's stop token"):
        read_drafter(folder, str(target))
