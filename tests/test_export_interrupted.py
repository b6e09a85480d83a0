"""An export is there whole or not at all, whatever stops it and whoever else exports."""

import errno
import fcntl

import pytest
import torch
from export_helpers import TOKENS, save_checkpoint
from helpers import load_tiny, make_drafter

from dflash_lightning.errors import ExportError
from dflash_lightning.export import export, export_drafter, load_drafter, unfinished


@pytest.fixture
def drafter(qwen3_folder):
    return make_drafter(load_tiny(qwen3_folder), scale=3.0)


def write(drafter, folder):
    return export_drafter(drafter.state_dict(), drafter.config, folder, tokens=TOKENS)


class Killed(BaseException):
    """Nothing catches it."""


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), Killed()])
def test_an_interrupted_export_never_looks_finished(drafter, tmp_path, monkeypatch, failure):
    folder = tmp_path / "out"

    def fail(*_args, **_kwargs):
        assert not folder.exists()
        raise failure

    monkeypatch.setattr("dflash_lightning.export.folder.save_file", fail)
    with pytest.raises(type(failure) if isinstance(failure, Killed) else ExportError) as caught:
        write(drafter, folder)
    if isinstance(caught.value, ExportError):
        assert "No space left on device" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    write(drafter, folder)
    assert load_drafter(folder, dtype=torch.float32).config == drafter.config


def test_what_a_killed_export_left_is_removed_and_what_another_one_writes_is_not(drafter, tmp_path):
    left, written = (tmp_path / unfinished._partial_name("out", digit * 32) for digit in "1f")
    others = [tmp_path / name for name in (".out.mine.partial", f".out.another-host-{'2' * 32}.partial")]
    for partial in (left, written, *others):
        partial.mkdir()
        (partial / "model.safetensors").write_bytes(b"half")
    a_file = tmp_path / unfinished._partial_name("out", "3" * 32)
    a_file.touch()
    with unfinished._locked(written, fcntl.LOCK_EX):
        write(drafter, tmp_path / "out")
    assert {*tmp_path.iterdir()} == {tmp_path / "out", written, a_file, *others}


def test_what_cannot_be_removed_is_named_and_stays(drafter, tmp_path, monkeypatch, capsys):
    left = tmp_path / unfinished._partial_name("out", "1" * 32)
    left.mkdir()

    def refuse(folder, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(unfinished.shutil, "rmtree", refuse)
    write(drafter, tmp_path / "out")
    assert capsys.readouterr().err.count(f"{left}, which an export has left, can't be removed: [Errno 13]") == 1
    assert left.exists()


def test_a_file_system_without_locks_is_exported_to_and_nothing_is_removed_there(drafter, tmp_path, monkeypatch):
    left = tmp_path / unfinished._partial_name("out", "1" * 32)
    left.mkdir()

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(unfinished.fcntl, "flock", refuse)
    write(drafter, tmp_path / "out")
    assert {*tmp_path.iterdir()} == {tmp_path / "out", left}


@pytest.mark.parametrize("step", ["sync_tree", "sync_folder"])
def test_folders_take_their_names_all_or_none(drafter, qwen3_folder, tmp_path, monkeypatch, step):
    save_checkpoint(tmp_path / "best.ckpt", drafter, qwen3_folder)
    original, calls = getattr(unfinished, step), []

    def fail(path):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        original(path)

    monkeypatch.setattr(unfinished, step, fail)
    with pytest.raises(ExportError, match="Input/output error"):
        export(tmp_path / "best.ckpt", tmp_path / "out", verify=False)
    assert list((tmp_path / "out").iterdir()) == []


def test_of_two_exports_to_one_place_the_first_stands_and_the_second_says_so(drafter, tmp_path, monkeypatch):
    folder, original = tmp_path / "out", unfinished.sync_tree

    def export_meanwhile(path):
        monkeypatch.undo()
        write(drafter, folder)
        original(path)

    monkeypatch.setattr(unfinished, "sync_tree", export_meanwhile)
    with pytest.raises(ExportError, match=r"out was made by another export in the meantime, and stands; nothing was"):
        write(drafter, folder)
    assert [*tmp_path.iterdir()] == [folder]
    assert load_drafter(folder, dtype=torch.float32).config == drafter.config
