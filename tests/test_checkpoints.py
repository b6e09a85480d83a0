"""Training checkpoints: what Lightning and DeepSpeed wrote comes back whole, in one process, or is refused by name."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from export_helpers import save_checkpoint
from helpers import load_tiny, make_drafter
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from callbacks.export import ExportDrafter, _out_of_the_way
from dflash_lightning.checkpoints import is_training_checkpoint, read_training_checkpoint
from dflash_lightning.config import DrafterSettings
from dflash_lightning.errors import CheckpointError, ConfigError, ExportError
from dflash_lightning.export import export, load_drafter, tensor_shapes
from dflash_lightning.target import target_identity
from dflash_lightning.training.module import DFlashModule
from dflash_lightning.training.resume import OneStart, Start
from dflash_lightning.training.strategy import DFlashDeepSpeedStrategy

SETTINGS = DrafterSettings(num_layers=2, block_size=4, target_layer_ids=[1, 3], mask_token_id=3)
STEPS = 2


def batches() -> DataLoader:
    """Random micro-batches of two rows, as the data module would hand them out."""
    g = torch.Generator().manual_seed(0)
    length = 12
    batch = {
        "features": torch.randn(2, length, 64, generator=g).bfloat16(),
        "input_ids": torch.randint(4, 272, (2, length), generator=g),
        "loss_mask": torch.ones(2, length, dtype=torch.long),
        "document_ids": torch.zeros(2, length, dtype=torch.long),
        "anchors": torch.tensor([[1, 4, 7], [2, 3, 0]]),
        "valid": torch.tensor([[True, True, True], [True, True, False]]),
        "samples": torch.arange(2),
        "anchors_in_step": torch.tensor(5),
    }
    return DataLoader([batch] * STEPS, batch_size=None)


def train(folder, target, strategy, *callbacks, precision="32-true", resume=None) -> DFlashModule:
    """Two steps, saved as `folder/last.ckpt`; none after a checkpoint to resume."""
    L.seed_everything(0, verbose=False)
    module = DFlashModule(str(target), SETTINGS)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision=precision,
        max_steps=STEPS,
        logger=False,
        callbacks=[ModelCheckpoint(folder, filename="last", every_n_train_steps=STEPS), *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches(), ckpt_path=resume)
    return module


def check(checkpoint, module, target):
    assert checkpoint.config == module.drafter_config
    assert checkpoint.target == target_identity(str(target))
    assert (checkpoint.target_path, checkpoint.step) == (str(target), STEPS)
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.state_dict.items()}
    assert shapes == tensor_shapes(checkpoint.config)
    assert {tensor.dtype for tensor in checkpoint.state_dict.values()} == {torch.float32}


def test_a_plain_lightning_file_comes_back_bit_for_bit(llama_folder, tmp_path):
    module = train(tmp_path, llama_folder, "auto")
    path = tmp_path / "last.ckpt"
    assert path.is_file()
    assert is_training_checkpoint(path)
    checkpoint = read_training_checkpoint(path)
    check(checkpoint, module, llama_folder)
    for name, tensor in module.drafter.state_dict().items():
        assert torch.equal(checkpoint.state_dict[name], tensor)
    drafter = load_drafter(path, dtype=torch.bfloat16)
    assert torch.equal(drafter.fc.weight, module.drafter.fc.weight.bfloat16())
    assert not drafter.training
    assert not any(parameter.requires_grad for parameter in drafter.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whole_weights_of_every_zero_stage_come_back(qwen3_folder, tmp_path, stage, process_group):  # noqa: ARG001
    module = train(tmp_path, qwen3_folder, DFlashDeepSpeedStrategy(stage=stage))
    path = tmp_path / "last.ckpt"
    assert path.is_dir()
    assert is_training_checkpoint(path)
    checkpoint = read_training_checkpoint(path)
    check(checkpoint, module, qwen3_folder)
    for name, tensor in module.drafter.state_dict().items():
        assert torch.equal(checkpoint.state_dict[name], tensor)


class KeepWhole(L.Callback):
    """Gathers the weights that ZeRO-3 keeps in pieces, while they are still there to gather."""

    def on_train_end(self, trainer, pl_module):  # noqa: ARG002
        import deepspeed  # here: the strategy chooses the accelerator before the first import

        with deepspeed.zero.GatheredParameters(list(pl_module.drafter.parameters())):
            self.weights = {name: weight.detach().clone() for name, weight in pl_module.drafter.named_parameters()}


def test_weights_that_stage_3_keeps_in_pieces_come_back_whole(qwen3_folder, tmp_path, process_group):  # noqa: ARG001
    keep = KeepWhole()
    module = train(tmp_path, qwen3_folder, DFlashDeepSpeedStrategy(stage=3), keep)
    checkpoint = read_training_checkpoint(tmp_path / "last.ckpt")
    check(checkpoint, module, qwen3_folder)
    for name, tensor in keep.weights.items():
        assert torch.equal(checkpoint.state_dict[name], tensor)


def test_master_weights_keep_what_bf16_rounds_away(llama_folder, tmp_path, process_group):  # noqa: ARG001
    module = train(tmp_path, llama_folder, DFlashDeepSpeedStrategy(stage=2), precision="bf16-mixed")
    master = read_training_checkpoint(tmp_path / "last.ckpt").state_dict["fc.weight"]
    computed = module.drafter.fc.weight
    assert not torch.equal(master, master.bfloat16().float())
    assert torch.equal(master.to(computed.dtype), computed)


def test_incomplete_and_damaged_folders_are_refused_by_what_is_missing(llama_folder, tmp_path, process_group):  # noqa: ARG001
    train(tmp_path, llama_folder, DFlashDeepSpeedStrategy(stage=2))
    whole, shards = tmp_path / "last.ckpt", "checkpoint"
    [model] = [path.name for path in (whole / shards).glob("*_model_states.pt")]
    [optimizer] = [path.name for path in (whole / shards).glob("*_optim_states.pt")]

    def cut(path):
        path.write_bytes(path.read_bytes()[:1000])

    damages = {
        "no `latest`": lambda c: (c / "latest").unlink(),
        r"no `checkpoint/\*_model_states.pt`": lambda c: (c / shards / model).unlink(),
        r"0 of 1 `checkpoint/\*_optim_states.pt`": lambda c: (c / shards / optimizer).unlink(),
        "no `checkpoint/.* and no `latest`": lambda c: (
            shutil.rmtree(c / shards),
            (c / "latest").unlink(),
            (c / shards).mkdir(),
        ),
        "2 of 1 `checkpoint/": lambda c: shutil.copy(
            c / shards / optimizer, c / shards / optimizer.replace("rank_0", "rank_1", 1)
        ),
        "can't be read as a checkpoint: .*damaged": lambda c: cut(c / shards / model),
        "is no complete checkpoint: .*is cut short": lambda c: cut(c / shards / optimizer),
    }
    for i, (message, damage) in enumerate(damages.items()):
        copy = tmp_path / f"{i}.ckpt"
        shutil.copytree(whole, copy)
        damage(copy)
        assert is_training_checkpoint(copy)
        with pytest.raises(CheckpointError, match=message):
            read_training_checkpoint(copy)


def test_foreign_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        read_training_checkpoint(tmp_path / "absent.ckpt")
    foreign = tmp_path / "foreign.ckpt"
    torch.save({"state_dict": {"weight": torch.zeros(2)}, "global_step": 3}, foreign)
    with pytest.raises(CheckpointError, match="checkpoint of something else: it has no 'dflash' entry"):
        read_training_checkpoint(foreign)
    torch.save([1, 2], foreign)
    with pytest.raises(CheckpointError, match="holds a list"):
        read_training_checkpoint(foreign)
    foreign.write_text("not a checkpoint")
    with pytest.raises(CheckpointError, match="can't be read as a checkpoint"):
        read_training_checkpoint(foreign)


def test_training_ends_with_exported_folders(llama_folder, tmp_path, process_group):  # noqa: ARG001
    output = tmp_path / "export"
    module = train(tmp_path, llama_folder, DFlashDeepSpeedStrategy(stage=2), ExportDrafter(str(output)))
    assert sorted(path.name for path in output.iterdir()) == ["transformers", "zlab"]
    for folder in output.iterdir():
        assert torch.equal(
            load_drafter(folder, dtype=torch.bfloat16).norm.weight, module.drafter.norm.weight.bfloat16()
        )
    # Resumed, the same training replaces its own folders, and nobody else's.
    (output / "zlab" / "README.md").unlink()
    again = DFlashDeepSpeedStrategy(stage=2), ExportDrafter(str(output))
    train(tmp_path, llama_folder, *again, resume=tmp_path / "last.ckpt")
    assert (output / "zlab" / "README.md").exists()


def test_a_resumed_training_replaces_exports_of_its_own_kind_only(llama_folder, qwen3_folder, tmp_path):
    for target, ours in ((llama_folder, True), (qwen3_folder, False)):
        checkpoint, output = tmp_path / f"{target.name}.ckpt", tmp_path / target.name
        save_checkpoint(checkpoint, make_drafter(load_tiny(target)), target)
        export(checkpoint, output, "zlab", verify=False)
        module = SimpleNamespace(
            drafter_config=make_drafter(load_tiny(llama_folder)).config,
            target_identity=target_identity(str(llama_folder)),
        )
        resumed, callback = SimpleNamespace(ckpt_path="last.ckpt"), ExportDrafter(str(output), "zlab")
        assert callback._not_ours(resumed, module) == ([] if ours else [output / "zlab"])
        metadata = output / "zlab" / "dflash_lightning.json"
        told = json.loads(metadata.read_text())
        for text in (
            json.dumps({**told, "provenance": {**told["provenance"], "new": 1}}),
            json.dumps({key: value for key, value in told.items() if key != "drafter"}),
            "{",
        ):
            metadata.write_text(text)
            assert callback._not_ours(resumed, module) == [output / "zlab"]


def test_an_export_that_fails_gives_the_former_one_back(tmp_path):
    folders = [tmp_path / "zlab", tmp_path / "transformers"]
    for folder in folders:
        folder.mkdir()
        (folder / "old").touch()

    def export_in_vain():
        with _out_of_the_way(folders):
            assert not any(folder.exists() for folder in folders)
            raise ExportError("no space")

    with pytest.raises(ExportError, match="no space"):
        export_in_vain()
    assert all((folder / "old").exists() for folder in folders)
    with _out_of_the_way(folders):
        folders[0].mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["zlab"]
    assert not (folders[0] / "old").exists()


def test_the_next_start_sets_right_what_a_kill_left_out_of_the_way(tmp_path):
    callback, new_start = ExportDrafter(str(tmp_path), "zlab"), SimpleNamespace(ckpt_path=None)
    (tmp_path / ".zlab.replaced").mkdir()
    (tmp_path / ".zlab.replaced" / "old").touch()
    callback._not_ours(new_start, None)
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*")] == [Path("zlab"), Path("zlab/old")]
    (tmp_path / ".zlab.replaced").mkdir()
    callback._not_ours(new_start, None)
    assert (tmp_path / "zlab" / "old").exists()
    assert not (tmp_path / ".zlab.replaced").exists()


class NeverSetUp(L.Callback):
    def on_fit_start(self, trainer, pl_module):  # noqa: ARG002
        raise AssertionError("the training was set up")


def test_a_full_export_folder_is_refused_before_the_first_step(llama_folder, tmp_path):
    (tmp_path / "export" / "zlab").mkdir(parents=True)
    (tmp_path / "export" / "zlab" / "precious").write_text("x")
    with pytest.raises(ExportError, match="not empty"):
        train(tmp_path, llama_folder, "auto", ExportDrafter(str(tmp_path / "export")))
    with pytest.raises(ExportError, match="not empty"):  # of a training that starts anew, before anything is set up
        train(
            tmp_path,
            llama_folder,
            "auto",
            ExportDrafter(str(tmp_path / "export")),
            OneStart(Start(None, 0, "")),
            NeverSetUp(),
        )
    assert not (tmp_path / "last.ckpt").exists()
    with pytest.raises(ExportError, match="unknown format 'gguf'"):
        ExportDrafter(str(tmp_path), formats="gguf")
    trainer = L.Trainer(logger=False, enable_checkpointing=False, callbacks=[ExportDrafter(str(tmp_path / "free"))])
    with pytest.raises(ConfigError, match="add a ModelCheckpoint"):
        trainer.callbacks[0].setup(trainer, None, "fit")
