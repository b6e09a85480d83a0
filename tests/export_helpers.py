"""Drafters to export: random ones, and one that has learned a few texts so that its blocks are accepted."""

from dataclasses import dataclass

import torch
from helpers import MASK_TOKEN_ID, load_tiny, make_drafter
from transformers import PreTrainedModel

from dflash_lightning import __version__
from dflash_lightning.blocks import build_blocks
from dflash_lightning.checkpoints import CHECKPOINT_KEY
from dflash_lightning.config import DrafterConfig
from dflash_lightning.decoding.decode import plain_decode
from dflash_lightning.drafter import Drafter
from dflash_lightning.export import TokenIds, Verifier
from dflash_lightning.features import compute_features
from dflash_lightning.target import target_identity
from dflash_lightning.training.losses import LossSettings, score_slots, weighted_loss
from dflash_lightning.visibility import dense_mask

TOKENS = TokenIds(bos=1, eos=2, pad=0)
TEXT_LENGTH = 24
SCALED_ROPE = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


def random_drafter(rope: str, num_kv_heads: int) -> Drafter:
    """A drafter of no target, of whose rotary kind and heads a wrong reader would be noticed."""
    config = DrafterConfig(
        num_layers=2,
        block_size=6,
        mask_token_id=3,
        target_layer_ids=(1, 4, 3),
        num_target_layers=6,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        vocab_size=272,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        rope_parameters=SCALED_ROPE[rope],
    )
    torch.manual_seed(5)
    drafter = Drafter(config).eval().requires_grad_(False)
    for name, weight in drafter.named_parameters():
        if "norm" in name:
            weight.add_(0.2 * torch.randn_like(weight))
    return drafter


def random_verifier(config: DrafterConfig) -> Verifier:
    """Tables of a target that only exists here."""
    generator = torch.Generator().manual_seed(3)
    shape = (config.vocab_size, config.hidden_size)
    embedding, head = (torch.randn(shape, generator=generator) for _ in range(2))
    return Verifier(None, ("Qwen3ForCausalLM",), embedding, head)


def save_checkpoint(path, drafter: Drafter, target_folder) -> None:
    """A plain Lightning checkpoint, as far as an export reads it."""
    ours = {
        "drafter": drafter.config.to_dict(),
        "target": vars(target_identity(str(target_folder))),
        "target_path": str(target_folder),
        "code_version": __version__,
    }
    weights = {f"drafter.{name}": tensor for name, tensor in drafter.state_dict().items()}
    torch.save({"state_dict": weights, "global_step": 7, CHECKPOINT_KEY: ours}, path)


@dataclass(frozen=True)
class Trained:
    """A drafter that knows the target's answers to its first prompts by heart, and not those to the others."""

    target: PreTrainedModel
    drafter: Drafter
    prompts: list[list[int]]


def memorise(target: PreTrainedModel, drafter: Drafter, prompts: list[list[int]], steps: int) -> None:
    """Train on the target's own greedy answers, every position an anchor."""
    samples = []
    for prompt in prompts:
        text = plain_decode(target, prompt, max_new_tokens=TEXT_LENGTH, stop_ids=()).token_ids
        ids = torch.tensor([prompt + text])
        features = compute_features(target, ids, torch.ones_like(ids), drafter.config.target_layer_ids).clone()
        anchors = torch.arange(len(prompt), ids.shape[1] - 1)[None]
        blocks = build_blocks(
            input_ids=ids,
            loss_mask=torch.tensor([[0] * len(prompt) + [1] * len(text)]),
            document_ids=torch.zeros_like(ids),
            anchors=anchors,
            valid=torch.ones_like(anchors, dtype=torch.bool),
            block_size=drafter.config.block_size,
            mask_token_id=MASK_TOKEN_ID,
        )
        samples.append((features, blocks, torch.arange(ids.shape[1])[None]))
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        for features, blocks, positions in samples:
            hidden = drafter(
                target.get_input_embeddings()(blocks.input_ids.flatten(1)),
                blocks.positions.flatten(1),
                drafter.context_key_values(features, positions),
                dense_mask(blocks.layout),
            )
            results = score_slots(hidden, target.get_output_embeddings().weight, blocks)
            (weighted_loss(results, LossSettings()) / 100).backward()
        optimizer.step()
        optimizer.zero_grad()


def make_trained(folder, **settings) -> Trained:
    """For the target in ``folder``; ``settings`` are the drafter's."""
    target = load_tiny(folder)
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(4, 272, (length,), generator=generator).tolist() for length in (1, 2, 9, 5, 30)]
    drafter = make_drafter(target, **settings)
    memorise(target, drafter, prompts[:3], steps=30)
    return Trained(target, drafter.requires_grad_(False), prompts)
