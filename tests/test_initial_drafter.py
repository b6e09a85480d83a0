"""Fine-tuning: training begins with exactly the weights of a given drafter, and only where everything fits."""

import json

import pytest
import torch
import yaml
from export_helpers import TOKENS, random_verifier, save_checkpoint
from fit_helpers import fit_config
from helpers import MASK_TOKEN_ID, load_tiny, make_drafter
from lightning.pytorch.callbacks import ModelCheckpoint
from test_module import make_job
from training_helpers import DealtData, make_trainer, random_sample, write_cache

from dflash_lightning.checkpoints import TrainingCheckpoint, read_training_checkpoint
from dflash_lightning.config import DrafterSettings
from dflash_lightning.errors import CacheError, ConfigError, ExportError
from dflash_lightning.export import FORMATS, export, export_drafter
from dflash_lightning.target import load_tokenizer
from dflash_lightning.training.fit import fit
from dflash_lightning.training.module import DFlashModule, OptimizerSettings

SETTINGS = {"num_layers": 2, "block_size": 4, "target_layer_ids": [1, 3], "mask_token_id": MASK_TOKEN_ID}
# Too small to change any weight.
STANDSTILL = OptimizerSettings(lr=1e-30)


@pytest.fixture(scope="module")
def initial(llama_folder):
    """A drafter with weights that bfloat16 can hold."""
    drafter = make_drafter(load_tiny(llama_folder), seed=5)
    return drafter.bfloat16().float()


@pytest.fixture(scope="module")
def released(initial, tmp_path_factory):
    """The drafter as others would publish it: without anything of ours beside it."""
    folder = tmp_path_factory.mktemp("released") / "zlab"
    export_drafter(initial.state_dict(), initial.config, folder, "zlab", tokens=TOKENS)
    (folder / "dflash_lightning.json").unlink()
    return folder


def trained(target, start_from, folder, strategy, precision="32-true") -> TrainingCheckpoint:
    """The checkpoint after a step that changes no weight."""
    module = DFlashModule(str(target), optimizer=STANDSTILL, start_from=start_from)
    saving = ModelCheckpoint(folder, filename="last", every_n_train_steps=1)
    trainer = make_trainer(
        strategy, max_steps=1, precision=precision, callbacks=[saving], enable_checkpointing=True, devices=1
    )
    trainer.fit(module, datamodule=DealtData(make_job(target).steps))
    return read_training_checkpoint(folder / "last.ckpt")


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("form", FORMATS)
def test_training_begins_with_the_weights_of_a_folder_of_any_format(llama_folder, initial, tmp_path, form):
    folder = export_drafter(
        initial.state_dict(),
        initial.config,
        tmp_path / form,
        form,
        tokens=TOKENS,
        verifier=random_verifier(initial.config),
    )
    assert_same(trained(llama_folder, folder, tmp_path, "plain").state_dict, initial.state_dict())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("strategy", "precision"), [("zero0", "bf16-mixed"), ("zero2", "bf16-mixed"), ("zero3", "32-true")]
)
def test_sharded_training_begins_with_them_too(llama_folder, released, initial, tmp_path, strategy, precision):
    assert_same(trained(llama_folder, released, tmp_path, strategy, precision).state_dict, initial.state_dict())


def test_a_training_checkpoint_is_taken_with_its_float32_weights(llama_folder, tmp_path):
    drafter = make_drafter(load_tiny(llama_folder), seed=6)
    save_checkpoint(tmp_path / "a.ckpt", drafter, llama_folder)
    assert_same(trained(llama_folder, tmp_path / "a.ckpt", tmp_path, "plain").state_dict, drafter.state_dict())


def test_the_card_says_what_training_began_with(llama_folder, released, tmp_path):
    trained(llama_folder, released, tmp_path, "plain")
    export(tmp_path / "last.ckpt", tmp_path / "out", "zlab", verify=False)
    assert "| training began with | zlab |" in (tmp_path / "out" / "zlab" / "README.md").read_text()


def test_the_drafters_own_rotary_parameters_are_kept(llama_folder, released, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(released / "model.safetensors")
    values = json.loads((released / "config.json").read_text())
    values["rope_parameters"]["rope_theta"] = 12345.0
    (folder / "config.json").write_text(json.dumps(values))
    module = DFlashModule(str(llama_folder), start_from=folder)
    assert module.drafter_config.rope_parameters["rope_theta"] == 12345.0


def test_settings_that_agree_are_accepted(llama_folder, released, initial):
    assert DFlashModule(str(llama_folder), DrafterSettings(**SETTINGS), start_from=released).drafter_config == (
        initial.config
    )


def test_each_setting_that_differs_is_named_with_both_values(llama_folder, released):
    settings = DrafterSettings(
        num_layers=3, block_size=8, target_layer_ids=[1, 2, 3], mask_token_id=MASK_TOKEN_ID, intermediate_size=48
    )
    with pytest.raises(ConfigError) as refused:
        DFlashModule(str(llama_folder), settings, start_from=released)
    lines = str(refused.value).splitlines()[1:-1]
    assert lines == [
        "  num_layers: there 2, here 3",
        "  block_size: there 4, here 8",
        "  target_layer_ids: there (1, 3), here (1, 2, 3)",
        "  intermediate_size: there 64, here 48",
    ]


def test_a_drafter_for_another_target_is_refused(qwen3_folder, released, tmp_path):
    values = json.loads((released / "config.json").read_text())
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(released / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**values, "num_target_layers": 9}))
    with pytest.raises(ExportError, match="num_target_layers is 9, the target's is 6"):
        DFlashModule(str(qwen3_folder), start_from=folder)


def test_its_mask_token_must_still_mean_nothing_else(llama_folder, initial, tmp_path):
    config = type(initial.config).from_dict({**initial.config.to_dict(), "mask_token_id": 2})
    folder = export_drafter(initial.state_dict(), config, tmp_path / "eos", "zlab", tokens=type(TOKENS)(None, None))
    assert load_tokenizer(str(llama_folder)).eos_token_id == 2
    with pytest.raises(ExportError, match="mask token 2 is the target's eos token"):
        DFlashModule(str(llama_folder), start_from=folder)


@pytest.mark.usefixtures("process_group")
def test_a_cache_of_other_features_is_refused(llama_folder, released, tmp_path):
    samples = [random_sample(f"s{i}", 20, 3, 64, seed=i) for i in range(4)]
    cache = write_cache(tmp_path / "cache", samples, target=llama_folder, layer_ids=[0, 3], hidden_size=32)
    config = fit_config(llama_folder, cache, tmp_path, callbacks=[])
    del config["model"]["drafter"]
    config["model"]["start_from"] = str(released)
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(CacheError, match=r"target_layer_ids: cache has \[0, 3\], this run has \[1, 3\]"):
        fit(["--config", str(tmp_path / "fit.yaml")])
