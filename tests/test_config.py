"""What a drafter may be: default layers, and each refusal with what was found and what was expected."""

import pytest
from transformers import LlamaConfig, Qwen3Config

from dflash_lightning.config import DrafterConfig, DrafterSettings, default_target_layer_ids
from dflash_lightning.errors import ConfigError

# target layers -> ids of 5 tapped layers, as the official package gives them
FIVE_LAYERS = {
    24: (1, 6, 11, 16, 21),
    28: (1, 7, 13, 19, 25),
    32: (1, 8, 15, 22, 29),
    36: (1, 9, 17, 25, 33),
    40: (1, 10, 19, 28, 37),
    48: (1, 12, 23, 34, 45),
    64: (1, 16, 31, 46, 61),
}


@pytest.mark.parametrize(("num_target_layers", "expected"), FIVE_LAYERS.items())
def test_default_layers_are_the_official_ones(num_target_layers, expected):
    assert default_target_layer_ids(num_target_layers, 5) == expected
    assert DrafterSettings(num_layers=5).resolve_target_layer_ids(num_target_layers) == expected


def test_other_numbers_of_default_layers():
    assert default_target_layer_ids(40, 8) == (1, 6, 11, 16, 22, 27, 32, 37)
    assert default_target_layer_ids(30, 5) == (1, 8, 14, 20, 27)  # the golden steps' target
    assert default_target_layer_ids(30, 1) == (15,)
    assert DrafterSettings(num_layers=2, num_tapped_layers=8).resolve_target_layer_ids(40) == default_target_layer_ids(
        40, 8
    )


@pytest.mark.parametrize("block_size", [-1, 0, 1, 65])
def test_a_block_size_out_of_range_is_refused(block_size):
    with pytest.raises(ConfigError, match=f"block_size is {block_size}; expected 2 to 64"):
        DrafterSettings(block_size=block_size)


@pytest.mark.parametrize("block_size", [2, 64])
def test_the_block_sizes_at_the_ends_are_taken(block_size):
    assert make(settings=DrafterSettings(block_size=block_size, target_layer_ids=[1])).block_size == block_size


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [
        ([], "empty"),
        ([1, 12], r"\[12\] out of range"),
        ([-1, 3], r"\[-1\] out of range"),
        ([2, 5, 2], r"\[2, 5, 2\] repeats a layer"),
        ([1, 11], r"contains the last layer \(11\).*Use 10"),
    ],
)
def test_layer_ids_that_cannot_be_are_refused(layer_ids, message):
    with pytest.raises(ConfigError, match=f"{message}") as caught:
        DrafterSettings(target_layer_ids=layer_ids).resolve_target_layer_ids(12)
    assert "0..10 for a target of 12 layers" in str(caught.value)
    with pytest.raises(ConfigError, match=message):
        DrafterConfig.from_dict(make().to_dict() | {"target_layer_ids": layer_ids})


def test_more_default_layers_than_the_target_has_are_refused():
    with pytest.raises(ConfigError, match="can't be spread over"):
        DrafterSettings(num_layers=5).resolve_target_layer_ids(6)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="num_tapped_layers is 3 but target_layer_ids lists 2"):
        DrafterSettings(target_layer_ids=[1, 2], num_tapped_layers=3)
    with pytest.raises(ConfigError, match="num_layers is 0"):
        DrafterSettings(num_layers=0)


@pytest.mark.parametrize("mask_token_id", [-1, 500, 501])
def test_a_mask_token_outside_the_table_is_refused(mask_token_id):
    with pytest.raises(ConfigError, match=rf"mask_token_id is {mask_token_id}; .*0\.\.499"):
        make(mask_token_id=mask_token_id)


def rope(rope_type, **parameters):
    return {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "invented", None])
def test_a_rope_type_that_depends_on_the_length_is_refused(rope_type):
    with pytest.raises(ConfigError, match=f"rope_type is {rope_type!r}; supported are default, linear, yarn, llama3"):
        DrafterConfig.from_dict(make().to_dict() | {"rope_parameters": {"rope_type": rope_type}})


def make(settings=None, mask_token_id=4, **changes) -> DrafterConfig:
    fields = {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4, **changes}
    target = LlamaConfig(intermediate_size=96, num_key_value_heads=2, max_position_embeddings=256, **fields)
    return DrafterConfig.from_target(settings or DrafterSettings(num_layers=2), target, mask_token_id=mask_token_id)


def test_everything_else_follows_from_the_target():
    config = make()
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 96, 500)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.num_layers, config.block_size, config.target_layer_ids) == (2, 16, (1, 9))
    assert config.feature_size == 2 * 64
    assert make(settings=DrafterSettings(num_layers=2, intermediate_size=48)).intermediate_size == 48
    wide = Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=32, num_hidden_layers=12)
    assert DrafterConfig.from_target(DrafterSettings(), wide, mask_token_id=4).head_dim == 32


def test_rotary_parameters_are_the_targets():
    scaled = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    found = make(rope_parameters=scaled).rope_parameters
    assert {key: found[key] for key in scaled} == scaled


def test_plain_values_and_back():
    config = make()
    assert DrafterConfig.from_dict(config.to_dict()) == config
    assert isinstance(config.to_dict()["target_layer_ids"], list)
