"""`prepare` stopped and started again: nothing is lost, nothing is computed twice, other work is refused."""

import errno
import json
import os
import shutil
import signal
import time

import pytest
from command_client import command_server, kill
from prepare_helpers import PROMPTS, SETTINGS, folder_bytes, write_rows

from dflash_lightning import journal as journal_module
from dflash_lightning.errors import DataError
from dflash_lightning.journal import Journal
from dflash_lightning.prepare import command as prepare_module
from dflash_lightning.prepare.command import load_data, prepare


def test_a_second_run_recomputes_nothing_and_other_work_is_refused(
    llama_folder, qwen3_folder, prompts_file, tmp_path, monkeypatch
):
    prepare(str(llama_folder), prompts_file, tmp_path / "data", **SETTINGS)
    before = folder_bytes(tmp_path / "data")
    monkeypatch.setattr(prepare_module, "load_target", None)
    renamed = shutil.copytree(llama_folder, tmp_path / "renamed")
    assert prepare(str(renamed), prompts_file, tmp_path / "data", **SETTINGS).generated_now == 0
    with pytest.raises(DataError, match=r"target\.weights_sha256: there '.*', asked for '"):
        prepare(str(qwen3_folder), prompts_file, tmp_path / "data", **SETTINGS)
    with pytest.raises(DataError, match=r"max_new_tokens: there 24, asked for 25; .*dtype: there 'float32'"):
        prepare(
            str(llama_folder),
            prompts_file,
            tmp_path / "data",
            **{**SETTINGS, "max_new_tokens": 25, "dtype": "bfloat16"},
        )
    with pytest.raises(DataError, match=r"input\.rows: there 5, asked for 2"):
        prepare(str(llama_folder), prompts_file, tmp_path / "data", limit=2, **SETTINGS)
    assert folder_bytes(tmp_path / "data") == before


def test_a_killed_run_goes_on_and_gives_the_same_data(llama_folder, tmp_path):
    rows = [{"prompt": f"Say {'very ' * (i % 5)}{i}"} for i in range(40)]
    path = write_rows(tmp_path / "in.jsonl", rows)
    prepare(str(llama_folder), path, tmp_path / "whole", **SETTINGS)
    arguments = {"target": llama_folder, "input": path, "output": tmp_path / "killed", **SETTINGS}
    server = command_server()
    process = server.start("prepare", *(f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()))
    written = tmp_path / "killed" / "journal.jsonl"
    deadline = time.monotonic() + 600
    while not (written.exists() and written.read_bytes().count(b"\n") > 3):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    kill([process])
    assert server.wait([process]) == [-signal.SIGKILL], "it ended before it could be killed"
    kept = written.read_bytes().count(b"\n") - 1
    assert 3 <= kept < 20
    with pytest.raises(DataError, match="unfinished"):
        load_data(tmp_path / "killed")
    with pytest.raises(DataError, match="batch_size: there 2, asked for 3"):
        prepare(str(llama_folder), path, tmp_path / "killed", **{**SETTINGS, "batch_size": 3})
    with written.open("ab") as file:
        file.write(b'{"answers": [["torn')
    done = prepare(str(llama_folder), path, tmp_path / "killed", **SETTINGS)
    assert done.generated_now == 40 - 2 * kept
    assert folder_bytes(tmp_path / "killed") == folder_bytes(tmp_path / "whole")


@pytest.mark.parametrize("cut", [0, 1, 9, 30])
def test_a_journal_cut_anywhere_keeps_the_whole_lines(tmp_path, cut):
    path = tmp_path / "journal.jsonl"
    with Journal(path, {"work": 1}) as journal:
        journal.append({"n": 1})
        journal.append({"n": 2})
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) - cut])
    with Journal(path, {"work": 2}) as journal:
        whole = {0: [1, 2], 1: [1], 9: [1], 30: []}[cut]
        assert [entry["n"] for entry in journal.entries] == whole
        assert journal.header == ({"work": 2} if cut == 30 else {"work": 1})
        with pytest.raises(DataError, match="another process"):
            Journal(path, {})
        journal.append({"n": 3})
    assert [json.loads(line) for line in path.read_text().splitlines()][1:] == [*({"n": n} for n in whole), {"n": 3}]


def test_a_damaged_journal_line_is_named(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"work": 1}\nnonsense\n{"n": 2}\n')
    with pytest.raises(DataError, match="line 2: damaged"):
        Journal(path, {"work": 1})


def test_a_full_disk_is_one_message_and_loses_nothing(llama_folder, prompts_file, tmp_path, monkeypatch):
    synced = []

    def full(file):
        synced.append(file)
        if len(synced) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "fsync", full)
        with pytest.raises(DataError, match="no space left"):
            prepare(str(llama_folder), prompts_file, tmp_path / "data", **SETTINGS)
    assert prepare(str(llama_folder), prompts_file, tmp_path / "data", **SETTINGS).generated_now < len(PROMPTS)


def test_changed_or_foreign_data_is_refused(llama_folder, prompts_file, tmp_path):
    with pytest.raises(DataError, match="holds no prepared data"):
        load_data(tmp_path)
    prepare(str(llama_folder), prompts_file, tmp_path / "data", **SETTINGS)
    samples = tmp_path / "data" / "samples.jsonl"
    text = samples.read_text(encoding="utf-8")
    samples.write_text("".join(text.splitlines(keepends=True)[:-1]), encoding="utf-8")
    with pytest.raises(DataError, match="was changed"):
        load_data(tmp_path / "data")
    samples.write_text(text[:-20], encoding="utf-8")
    with pytest.raises(DataError, match="is damaged"):
        load_data(tmp_path / "data")
    (tmp_path / "data" / "data.json").write_text('{"some": "thing"}')
    with pytest.raises(DataError, match="isn't a data folder's description"):
        load_data(tmp_path / "data")
