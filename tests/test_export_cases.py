"""Hard cases, each through three others' software: the same texts, and as many tokens committed by every round."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import other_decoders
import pytest
import torch
from conftest import COMMON, save_target
from export_helpers import SCALED_ROPE, make_trained, save_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from dflash_lightning.decoding.decode import plain_decode, speculative_decode
from dflash_lightning.export import FORMATS, export, load_drafter

pytestmark = pytest.mark.slow  # the package speculators takes seconds to import

LIMIT = 22
# Texts of 23 to 51 tokens are longer than what the scaled kinds call their original length.
SHORT = {"original_max_position_embeddings": 16}


@dataclass(frozen=True)
class Case:
    model: type[PreTrainedModel]
    settings: dict[str, Any]
    rope: dict[str, Any]
    block_size: int
    served: int
    """Block size where it is smaller at serving."""


LLAMA, QWEN3 = LlamaForCausalLM, Qwen3ForCausalLM
CASES = {
    "Llama, tied, llama3, 8": Case(LLAMA, {"tie_word_embeddings": True}, SCALED_ROPE["llama3"] | SHORT, 8, 3),
    "Llama, untied, one key head, 4": Case(
        LLAMA, {"tie_word_embeddings": False, "num_key_value_heads": 1}, SCALED_ROPE["default"], 4, 2
    ),
    "Qwen3, untied, wide heads, YaRN, 16": Case(
        QWEN3, {"tie_word_embeddings": False, "head_dim": 16}, SCALED_ROPE["yarn"] | SHORT, 16, 8
    ),
    "Qwen3, tied, no GQA, 10": Case(
        QWEN3,
        {"tie_word_embeddings": True, "head_dim": 8, "num_key_value_heads": 4},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        10,
        4,
    ),
}


@dataclass(frozen=True)
class Exported:
    case: Case
    target: PreTrainedModel
    prompts: list[list[int]]
    folder: Path
    """With a folder of each format, in float32."""

    def decode(self, folder) -> list[tuple[list[int], list[int]]]:
        drafter, limits = load_drafter(folder, dtype=torch.float32), {"max_new_tokens": LIMIT, "stop_ids": (2,)}
        runs = [speculative_decode(self.target, drafter, prompt, **limits) for prompt in self.prompts]
        return [(run.token_ids, run.committed) for run in runs]


@pytest.fixture(scope="module", params=CASES)
def exported(request, tmp_path_factory) -> Exported:
    """A target of the case, and a drafter that knows what it says to three prompts of five, in every format."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("case")
    torch.manual_seed(2)
    config = (LlamaConfig if case.model is LLAMA else Qwen3Config)(
        **{**COMMON, **case.settings, "rope_parameters": case.rope}
    )
    trained = make_trained(save_target(case.model(config), folder / "target"), block_size=case.block_size)
    save_checkpoint(folder / "best.ckpt", trained.drafter, folder / "target")
    export(folder / "best.ckpt", folder, ",".join(FORMATS), dtype="float32", verify=False)
    return Exported(case, trained.target, trained.prompts, folder)


def same_but_for_the_end(found, expected, block_size):
    """Near the length limit the official package drafts a shorter block, whose proposals may differ: slots see fewer
    neighbours. From there on only the sum must agree.
    """
    for (text, committed), (other, lengths) in zip(found, expected, strict=True):
        assert text == other
        whole, done = 0, 1
        while whole < len(lengths) and done + block_size <= LIMIT:
            done += lengths[whole]
            whole += 1
        assert committed[:whole] == lengths[:whole]
        assert sum(committed) == sum(lengths)


def test_texts_and_committed_lengths_are_the_same_everywhere(exported, monkeypatch):
    folder, given = exported.folder, (exported.target, exported.prompts, LIMIT)
    ours = exported.decode(folder / "zlab")
    assert {1, exported.case.block_size} <= {n for _, committed in ours for n in committed}
    for prompt, (text, _) in zip(exported.prompts, ours, strict=True):
        assert text == plain_decode(exported.target, prompt, max_new_tokens=LIMIT, stop_ids=(2,)).token_ids
    assert other_decoders.decode_with_transformers(folder / "transformers", *given) == ours
    assert other_decoders.decode_with_speculator(folder / "speculators", *given) == ours
    module = other_decoders.official(monkeypatch)
    same_but_for_the_end(
        other_decoders.decode_officially(module, folder / "zlab", *given), ours, exported.case.block_size
    )


def test_a_smaller_block_at_serving_is_the_same_everywhere(exported, tmp_path, monkeypatch):
    """A drafter trained with large blocks, served with smaller ones: by an option of the server, or in config.json."""
    given, served = (exported.target, exported.prompts, LIMIT), exported.case.served
    folders = {form: tmp_path / form for form in FORMATS}
    for form, folder in folders.items():
        folder.mkdir()
        for file in (exported.folder / form).iterdir():
            (folder / file.name).symlink_to(file)
        values = json.loads((folder / "config.json").read_text())
        values["block_size"] = served
        if form == "zlab":
            values["dflash_config"]["block_size"] = served
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(values))
    ours = exported.decode(folders["zlab"])
    assert max(n for _, committed in ours for n in committed) == served
    assert other_decoders.decode_with_transformers(folders["transformers"], *given) == ours
    assert other_decoders.decode_with_speculator(folders["speculators"], *given) == ours
    module = other_decoders.official(monkeypatch)
    for folder, block_size in ((folders["zlab"], None), (exported.folder / "zlab", served)):
        found = other_decoders.decode_officially(module, folder, *given, block_size=block_size)
        same_but_for_the_end(found, ours, served)
