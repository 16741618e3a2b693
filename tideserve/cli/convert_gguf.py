"""Turn a GGUF file of a Llama model into a folder of bf16 safetensors, in a process of its own.

A process of its own, because torch and the float32 copies of weights must not stay in the one that
starts the cluster: `python -m tideserve.cli.convert_gguf MODEL.gguf FOLDER PARENT_PID`.

`from_pretrained` of transformers could do it, too, but it walks through the vocabulary three times,
value by value, and dequantizes row by row, which takes a minute; its own parts, used directly, take
seconds.
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
_ENDS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_OF_THE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_A_LAYER = {
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
    """Ask the kernel to kill this process with its parent, so that no orphan keeps converting."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit("the process that asked for the conversion has ended")


def split_digits(tokenizer: Any) -> None:
    """Put back SmolLM's splitting of numbers into digits, which a GGUF file only names.

    Without it two spaces before a number become two tokens, where the model was trained on one.
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
        raise SystemExit(f"{source.name} is not of a {ARCHITECTURE} model")
    config = LlamaConfig(**config_of(metadata, names))
    config.save_pretrained(target)
    ends = {f"{kind}_token_id": getattr(config, f"{kind}_token_id") for kind in _ENDS}
    del ends["unk_token_id"]
    GenerationConfig(**ends).save_pretrained(target)
    weights = weights_of(GgufHeader.from_file(str(source)), config)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    folder, name = str(source.parent), source.name
    tokenizer: Any = TokenizersBackend.from_pretrained(folder, gguf_file=name)
    split_digits(tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(target)


def config_of(metadata: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of `LlamaConfig` that a file's metadata and names of tensors give."""
    shape = {ours: metadata[f"{ARCHITECTURE}.{theirs}"] for theirs, ours in _CONFIG.items()}
    ends = {
        f"{ours}_token_id": metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in _ENDS.items()
    }
    theta = metadata[f"{ARCHITECTURE}.rope.freq_base"]
    return {
        **shape,
        **ends,
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": metadata[f"{ARCHITECTURE}.vocab_size"],
    }


def weights_of(header: Any, config: Any) -> dict[str, "torch.Tensor"]:
    """The file's tensors in bf16, named and laid out as transformers has them."""
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
            values = halves_apart(values, heads[kind])
        weights[name_of(name)] = values.to(torch.bfloat16)
    return weights


def name_of(name: str) -> str:
    """What transformers calls a tensor: "blk.3.attn_q.weight" is in "model.layers.3"."""
    *place, kind, suffix = name.split(".")
    if not place:
        return f"{_OF_THE_MODEL[kind]}.{suffix}"
    return f"model.layers.{place[-1]}.{_OF_A_LAYER[kind]}.{suffix}"


def halves_apart(values: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Rows of a head as transformers rotates them: its first halves of pairs, then the second.

    A GGUF file has the two of a pair side by side. `values`: [heads x head_dim, in].
    """
    pairs = values.reshape(heads, -1, 2, values.shape[1])
    return pairs.transpose(1, 2).reshape(values.shape)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[3]))
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
