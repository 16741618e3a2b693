"""Converts a GGUF file of a Llama model into a folder of bf16 safetensors.

Runs as a process of its own, so that torch and the float32 copies of weights do not stay in the
process that starts the cluster: `python -m tideserve.cli.convert_gguf MODEL.gguf FOLDER
PARENT_PID`.

`from_pretrained` of transformers takes a minute for the same, because it iterates over the
vocabulary three times and dequantizes row by row; the parts of transformers used here take seconds.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PR_SET_PDEATHSIG = 1
ARCHITECTURE = "llama"

_CONFIG = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "rope.dimension_count": "head_dim",
}
_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_MODEL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def end_with_parent(parent_pid: int) -> None:
    """Request SIGKILL at the parent's death, so that no orphan keeps converting."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit("the process that requested the conversion has ended")


def split_digits(tokenizer: Any) -> None:
    """Restore SmolLM's splitting of numbers into digits, which a GGUF file only names.

    Without the split, two spaces before a number become two tokens; the model was trained on one.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )


def convert(source: Path, target: Path) -> None:
    """Write config, generation config, tokenizer, chat template and weights into `target`."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig, TokenizersBackend
    from transformers.integrations.gguf import GgufHeader, read_gguf_metadata

    metadata, names = read_gguf_metadata(str(source))
    if metadata["general.architecture"] != ARCHITECTURE:
        raise SystemExit(f"{source.name} is not a {ARCHITECTURE} model")
    config = LlamaConfig(**config_of(metadata, names))
    config.save_pretrained(target)
    special_ids = {
        f"{kind}_token_id": getattr(config, f"{kind}_token_id") for kind in _SPECIAL_TOKENS
    }
    del special_ids["unk_token_id"]
    GenerationConfig(**special_ids).save_pretrained(target)
    weights = weights_of(GgufHeader.from_file(str(source)), config)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    folder, name = str(source.parent), source.name
    tokenizer: Any = TokenizersBackend.from_pretrained(folder, gguf_file=name)
    split_digits(tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(target)


def config_of(metadata: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of `LlamaConfig` from a file's metadata and names of tensors."""
    shape = {ours: metadata[f"{ARCHITECTURE}.{theirs}"] for theirs, ours in _CONFIG.items()}
    special_ids = {
        f"{ours}_token_id": metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in _SPECIAL_TOKENS.items()
    }
    theta = metadata[f"{ARCHITECTURE}.rope.freq_base"]
    return {
        **shape,
        **special_ids,
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": metadata[f"{ARCHITECTURE}.vocab_size"],
    }


def weights_of(header: Any, config: Any) -> dict[str, "torch.Tensor"]:
    """The file's tensors in bf16, with the names and layout of transformers."""
    import torch
    from transformers.integrations.gguf import load_gguf_state_dict
    from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    weights = {}
    for name, stored in load_gguf_state_dict(header).items():
        values = stored[...]
        if stored.ggml_type in GGML_BLOCK:
            values = dequantize(values, stored.ggml_type).reshape(shapes[name])
        kind = name.split(".")[-2]
        if kind in heads:
            values = split_rotary_halves(values, heads[kind])
        weights[name_of(name)] = values.to(torch.bfloat16)
    return weights


def name_of(name: str) -> str:
    """Name of a tensor in transformers: "blk.3.attn_q.weight" is in "model.layers.3"."""
    *place, kind, suffix = name.split(".")
    if not place:
        return f"{_MODEL_TENSORS[kind]}.{suffix}"
    return f"model.layers.{place[-1]}.{_LAYER_TENSORS[kind]}.{suffix}"


def split_rotary_halves(values: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Reorder the rows of each head for transformers' RoPE: all first halves of pairs, then all
    second.

    A GGUF file interleaves the two rows of a pair. `values`: [heads x head_dim, in].
    """
    pairs = values.reshape(heads, -1, 2, values.shape[1])
    return pairs.transpose(1, 2).reshape(values.shape)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[3]))
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
