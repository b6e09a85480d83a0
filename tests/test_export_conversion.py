"""Any format into any other, and back: the same bytes, whichever way a folder was reached."""

import json

import pytest
import torch
from export_helpers import random_drafter, random_verifier, save_checkpoint
from helpers import load_tiny, make_drafter

from dflash_lightning.errors import ExportError
from dflash_lightning.export import FORMATS, TokenIds, export, export_drafter, load_drafter

ALL = ",".join(FORMATS)


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def exported(target_folder, tmp_path_factory):
    """The folders of one checkpoint, by format, and where its target is."""
    folder = tmp_path_factory.mktemp("exported")
    save_checkpoint(folder / "best.ckpt", make_drafter(load_tiny(target_folder), scale=3.0), target_folder)
    report = folder / "held-out.json"
    report.write_text(json.dumps({"tau": 2.875, "tau_low": 2.5, "tau_high": 3.25, "prompts": 48}))
    folders = export(folder / "best.ckpt", folder, format=ALL, evaluations=[report], verify=False)
    return dict(zip(FORMATS, folders, strict=True)), str(target_folder)


@pytest.mark.parametrize("source", FORMATS)
def test_every_way_to_a_folder_gives_the_same_bytes(exported, tmp_path, source):
    folders, target = exported
    for form, converted in zip(
        FORMATS, export(folders[source], tmp_path, format=ALL, target=target, verify=False), strict=True
    ):
        assert contents(converted) == contents(folders[form])
    card = (tmp_path / "zlab" / "README.md").read_text()
    assert "| held-out | 48 | 2.875 | 2.500 to 3.250 |" in card


@pytest.mark.parametrize("source", FORMATS)
def test_a_folder_is_converted_without_its_target(exported, tmp_path, source):
    folders, _ = exported
    possible = ["zlab", "transformers", *(["speculators"] if source == "speculators" else [])]
    for form, converted in zip(possible, export(folders[source], tmp_path, ",".join(possible)), strict=True):
        assert contents(converted) == contents(folders[form])
    if "speculators" not in possible:
        with pytest.raises(ExportError, match=r"carries the target's embedding table .* Name it by --target"):
            export(folders[source], tmp_path / "refused", format=ALL)
        assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_and_token_ids_are_kept_through_every_format(tmp_path, dtype):
    """Though format transformers has room for one stop token, and zlab for no padding token."""
    drafter = random_drafter("yarn", 2)

    def write(weights, folder):
        given = {"tokens": TokenIds(bos=1, eos=[2, 9], pad=7), "verifier": random_verifier(drafter.config)}
        return export_drafter(weights, drafter.config, tmp_path / folder, "speculators", dtype=dtype, **given)

    folder = first = write(drafter.state_dict(), "first")
    for number, name in enumerate(["speculators", "zlab", "transformers", "zlab"]):
        [folder] = export(folder, tmp_path / str(number), format=name)
        assert load_drafter(folder, dtype=dtype).config == drafter.config
    values = json.loads((folder / "config.json").read_text())
    assert (values["dtype"], values["eos_token_id"]) == (str(dtype).removeprefix("torch."), [2, 9])
    [last] = export(folder, tmp_path / "last", format="transformers")
    assert json.loads((last / "config.json").read_text())["pad_token_id"] == 7
    again = write(load_drafter(last, dtype=dtype).state_dict(), "again")
    assert contents(again) == contents(first)


def test_somebody_elses_card_is_kept(exported, tmp_path):
    folders, target = exported
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name, content in contents(folders["zlab"]).items():
        if name != "dflash_lightning.json":
            (foreign / name).write_bytes(content)
    (foreign / "README.md").write_bytes(b"license: MIT\xff")
    folder = foreign
    for number, form in enumerate(["transformers", "speculators", "zlab"]):
        [folder] = export(folder, tmp_path / str(number), format=form, target=target, verify=False)
        assert (folder / "README.original.md").read_bytes() == b"license: MIT\xff"
        assert "its own card, with what it says of the licence" in (folder / "README.md").read_text()
    assert (folder / "model.safetensors").read_bytes() == contents(foreign)["model.safetensors"]
    assert not (folders["zlab"] / "README.original.md").exists()


def test_another_dtype_is_asked_for(exported, tmp_path):
    folders, _ = exported
    [wide] = export(folders["zlab"], tmp_path, format="zlab", dtype="float32")
    narrow = load_drafter(folders["zlab"], dtype=torch.float32).state_dict()
    for name, weight in load_drafter(wide, dtype=torch.float32).state_dict().items():
        assert torch.equal(weight, narrow[name])
    [back] = export(wide, tmp_path / "back", format="zlab", dtype="bfloat16")
    assert contents(back) == contents(folders["zlab"])
