"""`--resume auto` finds the newest complete checkpoint; a half-written one is never loaded and hides none."""

import shutil
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from dflash_lightning.checkpoints import CHECKPOINT_KEY
from dflash_lightning.errors import CheckpointError, ConfigError
from dflash_lightning.training.resume import OneStart, Start, check_same_run, choose_start, take_back
from dflash_lightning.training.strategy import DFlashDeepSpeedStrategy


def write_checkpoint(path: Path, step: int, *, ranks: int = 2) -> Path:
    """The files that DeepSpeed writes under stage 2, without the tensors."""
    shards = path / "checkpoint"
    shards.mkdir(parents=True)
    state = {"global_step": step, "dp_world_size": ranks, "optimizer": None, CHECKPOINT_KEY: {}}
    torch.save(state, shards / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        torch.save({}, shards / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (path / "latest").write_text("checkpoint")
    return path


def trainer_that_saves_to(*folders: Path | None, strategy: str | None = None, **options) -> L.Trainer:
    savers = [ModelCheckpoint(folder, monitor=f"metric {i}") for i, folder in enumerate(folders)]
    return L.Trainer(
        accelerator="cpu",
        strategy=strategy or DFlashDeepSpeedStrategy(),
        logger=False,
        callbacks=savers,
        enable_checkpointing=bool(savers),
        **options,
    )


def test_the_newest_step_of_all_folders_is_found_whatever_the_times_of_the_files(tmp_path):
    trainer = trainer_that_saves_to(tmp_path / "best", tmp_path / "last")
    start = choose_start("auto", trainer)
    assert start.checkpoint is None
    assert start.message == f"resume: no checkpoint in {tmp_path / 'best'}, {tmp_path / 'last'}, a new start"
    newest = write_checkpoint(tmp_path / "best" / "step=12-tau=2.50.ckpt", 12)
    write_checkpoint(tmp_path / "best" / "step=9-tau=2.80.ckpt", 9)
    write_checkpoint(tmp_path / "last" / "last.ckpt", 10)
    (tmp_path / "last" / "notes.txt").write_text("not a checkpoint")
    assert choose_start("auto", trainer) == (newest, 12, f"resume: {newest}, step 12")


DAMAGES = {
    "is being written": lambda path: path.rename(path.with_name(path.name + ".partial")),
    "no shards": lambda path: shutil.rmtree(path / "checkpoint"),
    "no shard of rank 1": lambda path: next((path / "checkpoint").glob("*_rank_1_*")).unlink(),
    "no weights": lambda path: (path / "checkpoint" / "mp_rank_00_model_states.pt").unlink(),
    "not finished": lambda path: (path / "latest").unlink(),
    "weights cut short": lambda path: cut(path / "checkpoint" / "mp_rank_00_model_states.pt"),
    "shard cut short": lambda path: cut(next((path / "checkpoint").glob("*_rank_1_*"))),
    "empty file": lambda path: (shutil.rmtree(path), path.touch()),
}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-30])


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_half_written_checkpoint_is_never_taken_and_never_hides_a_good_one(tmp_path, damage):
    trainer = trainer_that_saves_to(tmp_path)
    half = write_checkpoint(tmp_path / "step=20.ckpt", 20)
    damage(half)
    if half.exists():
        with pytest.raises(CheckpointError, match=r"step=20\.ckpt"):
            choose_start(str(half), trainer)
    checkpoint, _, message = choose_start("auto", trainer)
    assert checkpoint is None
    assert "a new start; passed over as incomplete: step=20.ckpt" in message
    good = write_checkpoint(tmp_path / "last.ckpt", 10)
    checkpoint, _, message = choose_start("auto", trainer)
    assert checkpoint == good
    assert "step 10; passed over as incomplete: step=20.ckpt" in message
    assert choose_start(str(good), trainer).checkpoint == good


def test_a_kill_between_the_two_renames_costs_nothing(tmp_path):
    trainer, place = trainer_that_saves_to(tmp_path), tmp_path / "last.ckpt"
    write_checkpoint(tmp_path / "last.ckpt.replaced", 10)
    write_checkpoint(tmp_path / "last.ckpt.partial", 20)
    for resume in ("auto", str(place)):
        assert choose_start(resume, trainer).checkpoint == place
    assert not place.exists()  # only loading it changes anything
    take_back(place)
    assert choose_start("auto", trainer).message.startswith(f"resume: {place}, step 10;")
    # What a kill after both renames leaves behind is no candidate.
    write_checkpoint(tmp_path / "last.ckpt.replaced", 30)
    assert choose_start("auto", trainer).message.startswith(f"resume: {place}, step 10;")


def test_what_can_not_be_resumed_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        choose_start(str(tmp_path / "absent.ckpt"), trainer_that_saves_to(tmp_path))
    with pytest.raises(ConfigError, match="no such callback"):
        choose_start("auto", trainer_that_saves_to())
    with pytest.raises(ConfigError, match="has no dirpath"):
        choose_start("auto", trainer_that_saves_to(tmp_path, None))


def test_a_checkpoint_of_another_kind_of_strategy_is_refused(tmp_path):
    folder, file = write_checkpoint(tmp_path / "sharded" / "last.ckpt", 3), tmp_path / "whole" / "last.ckpt"
    file.parent.mkdir()
    torch.save({"global_step": 3, CHECKPOINT_KEY: {}}, file)
    for path, strategy, message in (
        (folder, "ddp", "written under DeepSpeed, and trainer.strategy is DDPStrategy"),
        (file, None, "written without DeepSpeed, and trainer.strategy is DFlashDeepSpeedStrategy"),
    ):
        trainer = trainer_that_saves_to(path.parent, strategy=strategy)
        for resume in ("auto", str(path)):
            with pytest.raises(CheckpointError, match=message):
                choose_start(resume, trainer)


def test_a_rank_that_sees_another_checkpoint_stops_the_run(monkeypatch, tmp_path):
    trainer = trainer_that_saves_to(tmp_path)
    first = Start(Path("last.ckpt"), 4, "resume")
    monkeypatch.setattr(trainer.strategy, "broadcast", lambda _mine: first)
    OneStart(first).setup(trainer, None, "fit")
    for other, named in ((Start(None, 0, ""), "the beginning"), (first._replace(step=2), "last.ckpt, step 2")):
        with pytest.raises(CheckpointError, match=f"would start from {named}, rank 0 from last.ckpt, step 4"):
            OneStart(other).setup(trainer, None, "fit")


def test_a_checkpoint_that_lightning_would_load_unasked_is_refused(tmp_path):
    trainer = trainer_that_saves_to(tmp_path / "checkpoints", default_root_dir=tmp_path)
    assert choose_start(None, trainer) == (None, 0, "")
    (tmp_path / "hpc_ckpt_3.ckpt").mkdir()
    for resume in (None, "auto"):
        with pytest.raises(CheckpointError, match=r"would load .*hpc_ckpt_3.ckpt"):
            choose_start(resume, trainer)


MAKING = {"drafter": {"num_layers": 2, "block_size": 4}, "muon": False, "target": {"weights_sha256": "a"}}


def test_a_checkpoint_of_another_run_is_refused_by_field(tmp_path):
    path = write_checkpoint(tmp_path / "last.ckpt", 3)
    weights = path / "checkpoint" / "mp_rank_00_model_states.pt"
    ds_config = {"bf16": {"enabled": False}}
    torch.save({**torch.load(weights), CHECKPOINT_KEY: MAKING, "ds_config": ds_config}, weights)
    trainer = trainer_that_saves_to(tmp_path)
    check_same_run(path, MAKING, trainer)
    other = {"drafter": {"num_layers": 2, "block_size": 8}, "muon": True, "target": {"weights_sha256": "b"}}
    with pytest.raises(CheckpointError) as refusal:
        check_same_run(path, other, trainer)
    for line in ("block_size: checkpoint 4, this run 8", "muon: checkpoint False, this run True", "target: checkpoint"):
        assert line in str(refusal.value)
    assert "num_layers" not in str(refusal.value)
    torch.save({**torch.load(weights), "ds_config": {"bf16": {"enabled": True}}}, weights)
    with pytest.raises(CheckpointError, match="precision: checkpoint bf16-mixed, this run 32-true"):
        check_same_run(path, MAKING, trainer)


def test_a_file_that_another_package_pickled_is_passed_over(tmp_path):
    good = write_checkpoint(tmp_path / "good.ckpt", 3)
    (tmp_path / "foreign.ckpt").write_bytes(b"cnowhere\nClass\n.")
    torch.save({CHECKPOINT_KEY: {}}, tmp_path / "stepless.ckpt")
    start = choose_start("auto", trainer_that_saves_to(tmp_path))
    assert start.checkpoint == good
    assert start.message.endswith("passed over as incomplete: foreign.ckpt, stepless.ckpt")


def test_an_empty_path_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--resume is empty"):
        choose_start("", trainer_that_saves_to(tmp_path))
