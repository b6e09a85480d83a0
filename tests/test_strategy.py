"""What our DeepSpeed strategy adds to Lightning's; its gradients are proved in test_training.py."""

from pathlib import Path

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy

from dflash_lightning.errors import CheckpointError, ConfigError
from dflash_lightning.training.strategy import DFlashDeepSpeedStrategy


@pytest.fixture
def strategy(monkeypatch):
    """One process; DeepSpeed's own writing is stood in for by ``writes``."""
    strategy = DFlashDeepSpeedStrategy()
    monkeypatch.setattr(strategy, "broadcast", lambda value: value)
    monkeypatch.setattr(strategy, "barrier", lambda: None)
    return strategy


def written_by(monkeypatch, writes):
    monkeypatch.setattr(DeepSpeedStrategy, "save_checkpoint", lambda _self, _state, path, _options: writes(Path(path)))


def test_a_checkpoint_is_replaced_only_by_a_whole_one(strategy, monkeypatch, tmp_path):
    place = tmp_path / "last.ckpt"

    def write(path, text="new"):
        path.mkdir()
        (path / "weights").write_text(text)

    written_by(monkeypatch, lambda path: write(path, "first"))
    strategy.save_checkpoint({}, place)
    assert (place / "weights").read_text() == "first"

    def dies(path):
        write(path, "half")
        assert (place / "weights").read_text() == "first"
        raise KeyboardInterrupt

    written_by(monkeypatch, dies)
    with pytest.raises(KeyboardInterrupt):
        strategy.save_checkpoint({}, place)
    assert (place / "weights").read_text() == "first"

    written_by(monkeypatch, write)
    strategy.save_checkpoint({}, place)
    assert (place / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_full_disk_is_one_message_and_costs_no_older_checkpoint(strategy, monkeypatch, tmp_path):
    place = tmp_path / "last.ckpt"
    place.mkdir()

    def full(path):
        path.mkdir()
        raise RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file data/0")

    written_by(monkeypatch, full)
    with pytest.raises(CheckpointError, match=r"last.ckpt can't be written .*Older checkpoints are kept"):
        strategy.save_checkpoint({}, place)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_rank_that_is_lost_while_saving_is_not_taken_for_a_full_disk(strategy, monkeypatch, tmp_path):
    def lost(_path):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer")

    written_by(monkeypatch, lost)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        strategy.save_checkpoint({}, tmp_path / "last.ckpt")


def test_an_unknown_stage_is_refused():
    with pytest.raises(ConfigError, match="ZeRO stage is 4"):
        DFlashDeepSpeedStrategy(stage=4)


@pytest.mark.parametrize("name", ["timeout_minutes", "bucket_size"])
def test_a_setting_out_of_range_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} of the strategy is 0; expected more than 0"):
        DFlashDeepSpeedStrategy(**{name: 0})
