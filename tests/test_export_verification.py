"""The export decodes before it calls a folder good, and leaves none that decoders read differently."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from export_helpers import memorise, save_checkpoint
from helpers import load_tiny, make_drafter
from lightning.pytorch.callbacks import ModelCheckpoint
from prepare_helpers import write_rows
from safetensors.torch import save_file

from callbacks import ExportDrafter
from dflash_lightning.cli import run
from dflash_lightning.decoding.decode import speculative_decode
from dflash_lightning.decoding.tau import pooled_tau
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import ConfigError, DataError, ExportError
from dflash_lightning.export import FORMATS, command, export, load_drafter, verification
from dflash_lightning.export.verification import PROMPTS
from dflash_lightning.target import load_tokenizer

ALL = ",".join(FORMATS)


@dataclass(frozen=True)
class Known:
    """A drafter that knows by heart what its target says to the built-in prompts."""

    checkpoint: Path
    target_folder: Path
    prompts: list[list[int]]

    def decode(self, folder):
        target, drafter = load_tiny(self.target_folder), load_drafter(folder, dtype=torch.float32)
        return [
            speculative_decode(target, drafter, prompt, max_new_tokens=32, stop_ids=(2,)) for prompt in self.prompts
        ]


@pytest.fixture(scope="module")
def known(llama_folder, tmp_path_factory):
    target, tokenizer = load_tiny(llama_folder), load_tokenizer(str(llama_folder))
    prompts = [
        tokenizer(f"<|start|>user\n{text}<|end|><|start|>assistant\n", add_special_tokens=False).input_ids
        for text in PROMPTS
    ]
    drafter = make_drafter(target)
    memorise(target, drafter, prompts, steps=25)
    checkpoint = tmp_path_factory.mktemp("known") / "best.ckpt"
    save_checkpoint(checkpoint, drafter, llama_folder)
    return Known(checkpoint, llama_folder, prompts)


def told(folder):
    return json.loads((folder / "dflash_lightning.json").read_text())["verification"]


def left(folder) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("formats", [ALL, "zlab", "transformers"])
def test_what_was_decoded_stands_in_every_folder(known, tmp_path, capsys, formats):
    folders = export(known.checkpoint, tmp_path, formats)
    assert sorted(left(tmp_path)) == sorted(formats.split(","))
    runs = known.decode(folders[0])
    tau = pooled_tau(run.committed for run in runs)
    assert 1.5 < tau < 4
    difference = told(folders[0])["largest_difference"]
    assert 0 < difference < 1e-5
    for folder in folders:
        assert told(folder) == {
            "largest_difference": difference,
            "prompt_set": "built-in",
            "prompts": 3,
            "ties": 0,
            "max_new_tokens": 32,
            "tau": tau,
            "transformers_tau": tau,
        }
        sentence = (
            "in float32, our decoder and transformers' generate() gave the target's plain greedy text for 3 of 3 "
            f"prompts (built-in, at most 32 tokens each), tau {tau:.3f} in both, and the drafter's hidden states "
            f"differ by {difference:.0e} at most"
        )
        assert sentence in (folder / "README.md").read_text()
    assert f"verified: {sentence}\n" in capsys.readouterr().out


def turned(assistant):
    """Rotated by the wrong angles, as if rope_theta had been lost."""
    frequencies = assistant.rotary_emb.inv_freq
    frequencies.copy_(frequencies**0.5)
    return assistant


@pytest.mark.parametrize("formats", ["zlab", "speculators,transformers"])
def test_a_drafter_that_is_read_differently_is_refused(known, tmp_path, monkeypatch, formats):
    load = verification.load_assistant
    monkeypatch.setattr(verification, "load_assistant", lambda *given: turned(load(*given)))
    with pytest.raises(ExportError) as caught:
        export(known.checkpoint, tmp_path, formats)
    assert left(tmp_path) == []
    message = str(caught.value)
    assert "no folder was left: prompt 1 ('Count from 1 to 20, separated by commas.'): from new token " in message
    for part in ("our decoder commits", "check rope_parameters, target_layer_ids", "by transformers. `--verify false`"):
        assert part in message
    monkeypatch.undo()
    [folder] = export(known.checkpoint, tmp_path / "zlab", "zlab", verify=False)
    assert f"tau is {pooled_tau(r.committed for r in known.decode(folder)):.3f} by our decoder and " in message


def test_a_drafter_that_is_read_differently_is_refused_even_where_tau_is_the_same(known, tmp_path, monkeypatch):
    load = verification.load_assistant

    def scaled(*given):
        """Its hidden states are 1 % too large, and its proposals the same."""
        assistant = load(*given)
        assistant.norm.weight.data.mul_(1.01)
        return assistant

    monkeypatch.setattr(verification, "load_assistant", scaled)
    with pytest.raises(ExportError, match=r"at new token 2 \(round 1\) the drafter's hidden states .* differ by 1\.0%"):
        export(known.checkpoint, tmp_path, "zlab")
    assert left(tmp_path) == []


def test_what_does_not_come_back_from_the_disk_is_refused(known, tmp_path, monkeypatch):
    def flip(tensors, file, **options):
        name = "layers.1.mlp.up_proj.weight"
        save_file({**tensors, name: -tensors[name]}, file, **options)

    monkeypatch.setattr("dflash_lightning.export.folder.save_file", flip)
    with pytest.raises(ExportError, match=r"doesn't hold what was written .*: layers\.1\.mlp\.up_proj\.weight differ"):
        export(known.checkpoint, tmp_path, verify=False)
    assert left(tmp_path) == []


def test_the_end_of_a_training_decodes_nothing(known, tmp_path):
    saver = ModelCheckpoint(monitor="decode/tau")
    saver.best_model_path = str(known.checkpoint)
    trainer = SimpleNamespace(checkpoint_callbacks=[saver], is_global_zero=True, ckpt_path=None)
    ExportDrafter(str(tmp_path)).on_fit_end(trainer, None)
    assert sorted(left(tmp_path)) == ["transformers", "zlab"]
    assert told(tmp_path / "zlab") is None


@pytest.mark.parametrize("decoder", ["our decoder", "transformers"])
def test_another_text_is_refused_unless_it_parts_at_a_tie(known, tmp_path, monkeypatch, decoder):
    name = {"our decoder": "speculative_decode", "transformers": "generate_with_transformers"}[decoder]
    decode = getattr(verification, name)

    def altered(*given, **limits):
        """Of the second prompt, the eighth token is another one."""
        result = decode(*given, **limits)
        text = result[0] if isinstance(result, tuple) else result.token_ids
        if known.prompts[1] in given:
            text[7] += 1
        return result

    monkeypatch.setattr(verification, name, altered)
    with pytest.raises(
        ExportError, match=rf"prompt 2 \('Write the .*the text of {decoder} parts .* new token 8: token "
    ):
        export(known.checkpoint, tmp_path)
    assert left(tmp_path) == []
    monkeypatch.setattr(verification, "is_tie", lambda *_: True)
    [folder] = export(known.checkpoint, tmp_path, "zlab")
    runs = known.decode(folder)
    assert (told(folder)["ties"], told(folder)["tau"]) == (1, pooled_tau([runs[0].committed, runs[2].committed]))
    card = (folder / "README.md").read_text()
    assert "for 2 of 3 prompts" in card
    assert "; 1 part from it at a tie" in card


def test_own_prompts_and_lengths(known, tmp_path):
    prompts = write_rows(tmp_path / "mine.jsonl", [{"prompt": "Say something."}])
    export(known.checkpoint, tmp_path / "out", prompts=str(prompts), max_new_tokens=9)
    found = told(tmp_path / "out" / "zlab")
    assert (found["prompt_set"], found["prompts"], found["max_new_tokens"]) == ("mine", 1, 9)
    with pytest.raises(ExportError, match="1 prompt decoded to verify it, and none gave a verify round"):
        export(known.checkpoint, tmp_path / "short", prompts=str(prompts), max_new_tokens=1)
    with pytest.raises(DataError, match="no such file"):
        export(known.checkpoint, tmp_path / "none", prompts=str(tmp_path / "absent.jsonl"))
    assert left(tmp_path / "short") == left(tmp_path / "none") == []


def test_whether_it_could_be_verified_is_not_asked_where_it_need_not(known, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "why_not", None)
    assert export(known.checkpoint, tmp_path, "zlab", verify=False) == [tmp_path / "zlab"]


def test_where_nothing_is_decoded_the_folder_says_so(known, tmp_path, monkeypatch, capsys):
    run(["export", "--checkpoint", str(known.checkpoint), "--output", str(tmp_path / "off"), "--verify", "false"])
    hint = f"`dflash-lightning export --checkpoint {known.checkpoint} --target {known.target_folder} --output ANOTHER`"
    assert f"not verified by decoding: it wasn't asked for; {hint} does it\n" in capsys.readouterr().out
    zlab = tmp_path / "off" / "zlab"
    export(zlab, tmp_path / "off" / "again", verify=False)
    assert "not verified by decoding: it wasn't asked for\n" in capsys.readouterr().out
    export(zlab, tmp_path / "unknown")
    assert "not verified by decoding: the target isn't known; name it by --target" in capsys.readouterr().out
    for folder in (zlab, tmp_path / "unknown" / "zlab"):
        assert told(folder) is None
        assert "Nothing was decoded with them: `dflash-lightning export" in (folder / "README.md").read_text()
    with pytest.raises(ExportError, match="can't be verified: the target isn't known"):
        export(zlab, tmp_path / "must", verify=True)
    with pytest.raises(ConfigError, match="--verify is false; leave one of them out"):
        export(zlab, tmp_path / "must", verify=False, prompts="any")
    monkeypatch.setattr(verification, "free_memory", lambda _: 200_000)
    export(known.checkpoint, tmp_path / "full")
    assert "decoding: target and drafter take 0.0 GB in float32, and 0.0 GB are free on cpu" in capsys.readouterr().out
    assert told(tmp_path / "full" / "zlab") is None
    monkeypatch.undo()
    export(zlab, tmp_path / "named", target=str(known.target_folder))
    assert told(tmp_path / "named" / "zlab")["prompts"] == 3


def test_a_drafter_that_transformers_has_not_is_verified_by_our_decoder(llama_folder, tmp_path):
    drafter = make_drafter(load_tiny(llama_folder), scale=3.0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    drafter = Drafter(replace(drafter.config, rope_parameters=rope))
    save_checkpoint(tmp_path / "best.ckpt", drafter, llama_folder)
    [folder] = export(tmp_path / "best.ckpt", tmp_path, "zlab")
    assert told(folder)["transformers_tau"] is None
    assert "our decoder (transformers has no drafter that rotates a part" in (folder / "README.md").read_text()


def test_hidden_states_that_are_no_numbers_are_refused(known, tmp_path, monkeypatch):
    decode = verification._decode
    monkeypatch.setattr(
        verification, "_decode", lambda *given: replace(decode(*given), differences=[0.0, float("nan")])
    )
    with pytest.raises(ExportError, match=r"\(round 2\) the drafter's hidden states of the block differ by nan"):
        export(known.checkpoint, tmp_path, "zlab")
    assert left(tmp_path) == []
