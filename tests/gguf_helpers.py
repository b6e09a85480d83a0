"""A tiny quantised target as a GGUF file: the real one takes most of a minute to read."""

from pathlib import Path

import numpy as np
from conftest import CHAT_TEMPLATE, byte_tokenizer
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 5, 64, 96, 4, 2
MATRICES = {
    **{"attn_q": (HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN)},
    **dict.fromkeys(("attn_k", "attn_v"), (HIDDEN * KV_HEADS // HEADS, HIDDEN)),
    **{"ffn_gate": (INTERMEDIATE, HIDDEN), "ffn_up": (INTERMEDIATE, HIDDEN), "ffn_down": (HIDDEN, INTERMEDIATE)},
}


def write_tiny_gguf(path: Path) -> Path:
    """A random Llama with its matrices in Q4_1, and the byte-level tokenizer with one merge."""
    ids = byte_tokenizer().get_vocab()
    tokens = [*sorted(ids, key=ids.get), "ab"]
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token.startswith("<|") else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    rng = np.random.default_rng(0)

    def matrix(name: str, *shape: int) -> None:
        values = 0.2 * rng.standard_normal(shape, dtype=np.float32)
        kind = GGMLQuantizationType.Q4_1
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", 1 + 0.2 * rng.standard_normal(HIDDEN, dtype=np.float32))

    matrix("token_embd", len(tokens), HIDDEN)
    norm("output_norm")
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            norm(f"blk.{layer}.{name}")
        for name, shape in MATRICES.items():
            matrix(f"blk.{layer}.{name}", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
