from typing import Any

import pytest
import torch

from tideserve.cli.convert_gguf import config_of, name_of, split_rotary_halves

METADATA = {
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.rope.dimension_count": 64,
    "llama.rope.freq_base": 1e5,
    "llama.vocab_size": 49152,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
}


@pytest.mark.parametrize(
    ("gguf_name", "hf_name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.attn_k.bias", "model.layers.0.self_attn.k_proj.bias"),
        ("blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
    ],
)
def test_tensors_get_the_names_of_transformers(gguf_name: str, hf_name: str) -> None:
    assert name_of(gguf_name) == hf_name


def test_rotary_pairs_of_a_head_are_separated() -> None:
    """Two heads of four rows: (a0 b0 a1 b1) of each becomes (a0 a1 b0 b1)."""
    stored = torch.arange(8).reshape(8, 1)
    assert split_rotary_halves(stored, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("names", "tied"), [(("token_embd.weight",), True), (("output.weight",), False)]
)
def test_the_config_is_read_from_the_file(names: tuple[str, ...], tied: bool) -> None:
    config: dict[str, Any] = config_of(METADATA, names)
    assert config["num_key_value_heads"] == 3
    assert config["head_dim"] == 64
    assert config["rope_parameters"]["rope_theta"] == 1e5
    assert (config["bos_token_id"], config["pad_token_id"], config["unk_token_id"]) == (1, 2, None)
    assert config["tie_word_embeddings"] is tied
