"""Greedy decoding with exported folders by others' software. Each gives the new tokens of a prompt and how many of them
each verify round committed."""

import pytest
import torch
from transformers import PreTrainedModel

from dflash_lightning.export.transformers_check import generate_with_transformers, load_assistant

MISSING = "a package isn't installed: pip install --no-deps -r requirements-nodeps.txt (make setup does)"
Decoded = tuple[list[int], list[int]]


def official(monkeypatch):
    """The module of the official package `dflash`."""
    module = pytest.importorskip("dflash.model", reason=MISSING)
    # Its statistics wait for a GPU.
    monkeypatch.setattr(module, "_cuda_time", lambda: 0.0)
    return module


def decode_officially(module, folder, target: PreTrainedModel, prompts, limit: int, block_size=None) -> list[Decoded]:
    """By `dflash_generate` of the official package, from a folder of format `zlab`."""
    model = module.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    runs = [
        module.dflash_generate(
            model,
            target,
            torch.tensor([prompt]),
            limit,
            stop_token_ids=[2],
            block_size=block_size,
            return_stats=True,
        )
        for prompt in prompts
    ]
    return [
        (run.output_ids[0, len(prompt) :].tolist(), run.acceptance_lengths)
        for run, prompt in zip(runs, prompts, strict=True)
    ]


def decode_with_transformers(folder, target: PreTrainedModel, prompts, limit: int, stop_ids=(2,)) -> list[Decoded]:
    """By `generate` of transformers, from a folder of format `transformers`."""
    assistant = load_assistant(folder, target)
    return [
        generate_with_transformers(target, assistant, prompt, max_new_tokens=limit, stop_ids=stop_ids)
        for prompt in prompts
    ]


def load_speculator(folder):
    """The model of a folder of format `speculators` by the package, in float32: no tensor is missing or left over."""
    package = pytest.importorskip("speculators", reason=MISSING)
    config = package.SpeculatorModelConfig.from_pretrained(folder)
    # Its default is FlexAttention, which takes long to compile.
    config.transformer_layer_config._attn_implementation = "eager"
    model, report = package.SpeculatorModel.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    assert type(model) is package.DFlashDraftModel
    return model.eval()


@torch.no_grad()
def draft(model, features, token_ids):
    """Hidden states [B, H] and logits [B, V] of the block at the last of ``token_ids``, by the package's own forward.

    That is its training forward, with one anchor. ``features`` are those of all tokens but the last; what comes after
    them it doesn't see.
    """
    anchor, room = len(token_ids) - 1, model.block_size + 1  # it lays no anchor in the last block
    mask = torch.zeros(1, anchor + room, dtype=torch.long)
    mask[0, anchor] = 1
    hidden, logits, *_ = model._backbone_forward(
        torch.nn.functional.pad(features, (0, 0, 0, room), value=7.0)[None],
        torch.tensor([[*token_ids, *[5] * model.block_size]]),
        mask,
        torch.zeros(1, anchor + room, features.shape[-1] // len(model.target_layer_ids)),
        torch.zeros_like(mask),
        max_anchors=1,
    )
    return hidden[0], logits[0]


@torch.no_grad()
def decode_with_speculator(folder, target: PreTrainedModel, prompts, limit: int) -> list[Decoded]:
    """With what the package proposes, verified in a naive loop without any cache: it has no decoding of its own."""
    model = load_speculator(folder)

    def forward(token_ids):
        output = target(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
        features = torch.cat([output.hidden_states[layer][0] for layer in model.target_layer_ids], dim=-1)
        return output.logits[0].argmax(-1).tolist(), features

    decoded = []
    for prompt in prompts:
        text, committed = [forward(prompt)[0][-1]], []
        while len(text) < limit and text[-1] != 2:
            features = forward([*prompt, *text])[1][:-1]
            proposals = draft(model, features, [*prompt, *text])[1][1:].argmax(-1).tolist()
            wanted = forward([*prompt, *text, *proposals])[0][len(prompt) + len(text) - 1 :]
            new = []
            for proposal, token in zip([*proposals, None], wanted, strict=True):
                new.append(token)
                if proposal != token or token == 2 or len(text) + len(new) == limit:
                    break
            text += new
            committed.append(len(new))
        decoded.append((text, committed))
    return decoded
