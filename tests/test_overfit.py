"""A drafter that has learnt one text by heart: decoding that text must accept whole blocks (spec.md 5.5)."""

import numpy as np
import pytest
import torch
from helpers import MASK_TOKEN_ID, load_tiny
from training_helpers import DealtData, GivenSample, make_trainer

from dflash_lightning.cache import Sample
from dflash_lightning.config import DrafterSettings
from dflash_lightning.decoding.decode import plain_decode, speculative_decode
from dflash_lightning.features import compute_features
from dflash_lightning.training.module import DFlashModule, OptimizerSettings

BLOCK_SIZE, ROUNDS, STEPS = 6, 5, 120
PROMPT = [9, 77, 140, 23, 201, 12, 99]


@pytest.fixture
def target(target_folder):
    return load_tiny(target_folder)


def test_a_memorised_text_is_decoded_in_whole_blocks(target, target_folder):
    # The answer goes on for a block beyond what is decoded, so that the last anchors have whole blocks as well.
    limit = 1 + ROUNDS * BLOCK_SIZE
    text = plain_decode(target, PROMPT, max_new_tokens=limit + BLOCK_SIZE, stop_ids=()).token_ids
    assert len(set(text)) > 4, "the text is too plain to prove anything"
    tokens = torch.tensor([PROMPT + text])
    layers = [1, 3]
    sample = Sample(
        sample_id="text",
        input_ids=tokens[0].numpy().astype(np.int32),
        loss_mask=(np.arange(tokens.shape[1]) >= len(PROMPT)).astype(np.uint8),
        features=compute_features(target, tokens, torch.ones_like(tokens), layers)[0].bfloat16(),
    )
    anchors = np.arange(len(PROMPT), tokens.shape[1] - BLOCK_SIZE + 1)

    torch.manual_seed(0)
    module = DFlashModule(
        str(target_folder),
        DrafterSettings(num_layers=2, block_size=BLOCK_SIZE, target_layer_ids=layers, mask_token_id=MASK_TOKEN_ID),
        optimizer=OptimizerSettings(lr=5e-3),
    )
    module.configure_model()

    def decode():
        return speculative_decode(target, module.drafter, PROMPT, max_new_tokens=limit, stop_ids=())

    before = decode()
    assert before.token_ids == text[:limit]
    assert sum(before.committed) / len(before.committed) < 2

    trainer = make_trainer("plain", max_steps=STEPS, gradient_clip_val=1.0)
    trainer.fit(module, datamodule=DealtData([[GivenSample(sample, anchors)]] * STEPS))
    assert trainer.callback_metrics["train/teacher_forced_tau"] == BLOCK_SIZE

    after = decode()
    assert after.token_ids == text[:limit]
    assert after.committed == [BLOCK_SIZE] * ROUNDS
