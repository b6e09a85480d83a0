"""The doctor: what is sound is called so, each fault is found and comes with what to do, and the exit code tells."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from capture_helpers import random_texts, write_texts
from fit_helpers import checkpoints, fit_config
from training_helpers import random_sample, write_cache

from dflash_lightning.cli import run
from dflash_lightning.doctor import command as command_module
from dflash_lightning.doctor import ranks as ranks_module
from dflash_lightning.doctor.machine import (
    GIB,
    check_cpu,
    check_disk,
    check_machine,
    check_open_files,
    check_shared_memory,
)
from dflash_lightning.doctor.packages import check_packages, check_quickstart, installed, known_fault
from dflash_lightning.doctor.parts import Parts
from dflash_lightning.doctor.ranks import add_up
from dflash_lightning.doctor.verdict import Verdict


def by_subject(verdicts) -> dict[str, Verdict]:
    return {verdict.subject: verdict for verdict in verdicts}


def test_these_packages_and_this_machine_do(tmp_path):
    (packages,) = check_packages()
    assert (packages.state, packages.advice) == ("ok", "")
    verdicts = by_subject(check_machine(tmp_path / "runs" / "not-made-yet"))
    assert {verdict.state for verdict in verdicts.values()} <= {"ok", "doubtful"}
    assert set(verdicts) >= {"accelerators", "memory", "shared memory", "disk", "open files"}
    assert not (tmp_path / "runs").exists()


def test_a_wrong_release_and_a_missing_package_are_found_with_the_reason():
    replaced = {"deepspeed": "0.18.0", "zarr": None}
    faults = list(check_packages(lambda name: replaced.get(name, installed(name))))
    assert [verdict.state for verdict in faults] == ["fails", "fails"]
    deepspeed, zarr = sorted(faults, key=lambda verdict: verdict.found)
    assert deepspeed.found.startswith("deepspeed 0.18.0; expected ")
    assert "ZeRO-2 gives wrong gradients, without an error" in deepspeed.found
    assert deepspeed.advice.startswith("`pip install 'deepspeed")
    assert zarr.found.startswith("zarr isn't installed")
    quickstart = check_quickstart(lambda _: None)
    assert (quickstart.state, quickstart.advice) == ("ok", "`make quickstart` installs it.")


@pytest.mark.parametrize(
    ("version", "fault"),
    [
        ("0.17.5", "unsummed"),
        ("0.18.2", "issue 7718"),
        ("0.19.3", "issue 8224"),
        ("0.19.7", "unsummed"),
        ("0.19.8", None),
    ],
)
def test_the_releases_that_are_known_to_go_wrong(version, fault):
    found = known_fault("deepspeed", version)
    assert (found is None) if fault is None else (fault in found)


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (check_open_files(256), "ulimit -n 65536"),
        (check_cpu(bfloat16=False), "32-true"),
        (check_disk("disk", Path("runs"), GIB), "cache plan"),
        (check_shared_memory(64 * 2**20), "--shm-size"),
        (check_shared_memory(None), "data.num_workers to 0"),
    ],
)
def test_what_is_short_is_doubtful_and_comes_with_advice(verdict, words):
    assert verdict.state == "doubtful"
    assert words in verdict.advice


@pytest.mark.slow
def test_two_processes_add_up_and_one_that_finds_no_network_is_told(monkeypatch):
    verdict = add_up("gloo", 2)
    assert verdict.state == "ok", verdict
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    verdict = add_up("gloo", 2)
    assert verdict.state == "fails"
    assert "nowhere0" in verdict.found
    assert "getent hosts" in verdict.advice


@pytest.fixture(scope="module")
def run_parts(llama_folder, tmp_path_factory) -> Parts:
    """The parts of a run that fit each other, but for the cache, which isn't captured from this data."""
    folder = tmp_path_factory.mktemp("run")
    samples = [random_sample(f"s{i}", 30 + i, 6, 64, seed=i) for i in range(24)]
    write_cache(folder / "cache", samples, target=llama_folder, layer_ids=[1, 3], hidden_size=32)
    write_texts(folder / "data", llama_folder, random_texts(4))
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(3)))
    decoding = {"class_path": "callbacks.DecodedAcceptance", "init_args": {"prompts": str(prompts)}}
    config = fit_config(llama_folder, folder / "cache", folder, [decoding, checkpoints(folder, "last")])
    (folder / "fit.yaml").write_text(yaml.safe_dump(config))
    return Parts(str(llama_folder), folder / "data", str(folder / "cache"), folder / "fit.yaml")


@pytest.mark.usefixtures("process_group")
def test_parts_that_fit_are_called_so_and_nothing_is_written(run_parts):
    folder = run_parts.training.parent
    before = sorted(folder.rglob("*"))
    verdicts = by_subject(run_parts.check())
    assert sorted(folder.rglob("*")) == before
    found = [
        "target",
        "data",
        "cache",
        "training",
        "output folders",
        "training data",
        "checkpoints",
        "held-out prompts",
    ]
    assert list(verdicts) == found
    assert {name for name, verdict in verdicts.items() if verdict.state != "ok"} == {"cache"}
    assert "captured from other data" in verdicts["cache"].found
    assert "asked to count from 1 to 5, said '" in verdicts["target"].found
    assert "an epoch has 5 steps" in verdicts["training data"].found
    assert "3 from" in verdicts["held-out prompts"].found


def changed(parts: Parts, folder: Path, **settings) -> Parts:
    """The same training with other settings, given as ``model__drafter={...}``."""
    config = yaml.safe_load(parts.training.read_text())
    for path, value in settings.items():
        *outer, name = path.split("__")
        section = config
        for key in outer:
            section = section[key]
        section[name] = value
    (folder / "fit.yaml").write_text(yaml.safe_dump(config))
    return Parts(training=folder / "fit.yaml")


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("settings", "subject", "words"),
    [
        ({"model__drafter__blok_size": 4}, "training", "blok_size"),
        ({"model__target": "nowhere"}, "training", "nowhere"),
        ({"model__drafter__target_layer_ids": [1, 2]}, "training data", "target_layer_ids: cache has [1, 3]"),
        ({"data__batch_tokens": 40}, "training data", "data.batch_tokens is 40"),
        ({"data__cache": "nowhere"}, "training data", "nowhere"),
        ({"trainer__precision": "16-mixed"}, "training", "16-mixed"),
        ({"trainer__logger__init_args__save_dir": "/proc/x"}, "output folders", "folder for logs is /proc/x"),
    ],
)
def test_a_training_that_would_end_early_is_told_why(run_parts, tmp_path, settings, subject, words):
    verdict = by_subject(changed(run_parts, tmp_path, **settings).check())[subject]
    assert verdict.state == "fails"
    assert words in verdict.found


def test_a_target_that_is_no_model_and_a_cache_of_another_one_fail(run_parts, qwen3_folder, tmp_path):
    assert by_subject(Parts(target=str(tmp_path)).check())["target"].state == "fails"
    verdicts = by_subject(Parts(target=str(qwen3_folder), data=run_parts.data, cache=run_parts.cache).check())
    assert verdicts["target"].state == "ok"
    assert verdicts["mask token"].found == "260, a row that no token uses"
    assert (verdicts["data"].state, verdicts["cache"].state) == ("fails", "fails")
    assert "Prepare it anew" in verdicts["data"].found


def test_a_target_without_a_free_row_is_told_which_mask_tokens_would_do(llama_folder, tmp_path):
    folder = tmp_path / "full"
    shutil.copytree(llama_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 260}))
    verdict = Parts(target=str(folder))._mask_token()
    assert verdict.state == "doubtful"
    assert "model.drafter.mask_token_id" in verdict.found
    assert "3 (<|mask|>)" in verdict.found


def test_without_a_package_the_other_checks_are_left_out(monkeypatch, capsys):
    monkeypatch.setattr(command_module, "check_packages", lambda: iter([Verdict("packages", "fails", "no torch")]))
    monkeypatch.setitem(sys.modules, "dflash_lightning.doctor.machine", None)
    with pytest.raises(SystemExit):
        run(["doctor"])
    assert "fails    other checks" in capsys.readouterr().out


def test_the_exit_code_tells(run_parts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ranks_module, "check_ranks", lambda: iter([Verdict("gloo", "ok", "added up")]))
    run(["doctor", "--cache", run_parts.cache])
    assert "fail" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_:
        run(["doctor", "--cache", str(tmp_path)])
    assert exit_.value.code == 1
    printed = capsys.readouterr().out
    assert "fails    cache " in printed
    assert printed.endswith("1 check failed\n")
