"""Shared fixtures: tiny random targets (Llama and Qwen3 type) with a byte-level tokenizer, built once a session."""

import fcntl
import os
from pathlib import Path

import pytest
import torch
from fit_helpers import forget_launcher
from prepare_helpers import PROMPTS, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash_lightning.errors import TargetError
from dflash_lightning.quickstart.__main__ import find_gguf
from dflash_lightning.target import convert_gguf

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
THINKING_SWITCH = "{% if enable_thinking is defined and not enable_thinking %}{{ '-\n' }}{% endif %}"
SPECIAL_TOKENS = ["<|pad|>", "<|start|>", "<|end|>", "<|mask|>"]
COMMON = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def byte_tokenizer(chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer of 4 special tokens and the 256 bytes: no file, no training."""
    vocab = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|start|>", eos_token="<|end|>"
    )
    fast.chat_template = chat_template
    return fast


def save_target(model, folder: Path, chat_template: str = CHAT_TEMPLATE) -> Path:
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    byte_tokenizer(chat_template).save_pretrained(folder)
    return folder


def pytest_collection_modifyitems(items):
    """The longest files first: with several at a time, none of them is left over for the end."""
    items.sort(key=lambda item: (item.get_closest_marker("real") is None, item.get_closest_marker("slow") is None))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    # Tiny tensors: a second thread only waits, and on a busy machine makes the tests many times slower. Processes that
    # the tests start inherit it.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _credentials():
    # Of nobody: the S3 server on loopback wants signed requests. Processes that the tests start inherit them.
    os.environ |= {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests"}


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory) -> Path:
    """Tiny random Llama with a tied head."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=True))
    return save_target(model, tmp_path_factory.mktemp("targets") / "llama")


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory) -> Path:
    """Tiny random Qwen3 with an untied head and a head dim that isn't hidden_size / heads."""
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=False))
    return save_target(model, tmp_path_factory.mktemp("targets") / "qwen3")


@pytest.fixture(scope="session")
def like_qwen3_8b(tmp_path_factory) -> Path:
    """Tiny random Qwen3 that the commands for Qwen3-8B fit: a thinking switch, and layers for five tapped ones."""
    torch.manual_seed(2)
    config = Qwen3Config(**{**COMMON, "num_hidden_layers": 12}, head_dim=16, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("targets") / "like-qwen3-8b"
    return save_target(Qwen3ForCausalLM(config), folder, CHAT_TEMPLATE + THINKING_SWITCH)


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def target_folder(request) -> Path:
    """Each tiny target in turn."""
    return request.getfixturevalue(f"{request.param}_folder")


def shared_folder(tmp_path_factory) -> Path:
    """A folder that all workers of this run share; without workers, the run's own."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The real SmolLM2-135M-Instruct as the GGUF file of its wheel."""
    try:
        return find_gguf()
    except TargetError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_file, tmp_path_factory) -> Path:
    """The same as a transformers folder."""
    folder = shared_folder(tmp_path_factory) / "smollm2"
    with folder.with_suffix(".lock").open("w") as lock:  # reading the file takes most of a minute: one worker does it
        fcntl.flock(lock, fcntl.LOCK_EX)
        return convert_gguf(smollm2_file, folder)


@pytest.fixture(scope="session")
def _one_group():
    # DeepSpeed keeps the groups it made for good, so that a second default group in one process would break it.
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def process_group(_one_group):
    """For a test that trains under DeepSpeed in this process: leaves no launcher's environment behind."""
    yield
    forget_launcher()


@pytest.fixture
def prompts_file(tmp_path) -> Path:
    return write_rows(tmp_path / "prompts.jsonl", [{"prompt": p, "family": p[0]} for p in PROMPTS])
