"""Tiny random models as complete folders: configuration, safetensors, tokenizer, chat template.

Large weights (standard deviation 0.1) matter: with the usual 0.02 the output hardly depends on
what is in the KV cache, and a comparison of tokens would prove little.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_SPECIAL_TOKENS = ("<unk>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
MIN_VOCAB = 256 + len(_SPECIAL_TOKENS)

ARCHITECTURES: dict[str, tuple[str, str]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    model_dir: Path,
    arch: str = "llama",
    *,
    dtype: torch.dtype = torch.float64,
    std: float = 0.1,
    norm_std: float = 0.0,
    seed: int = 0,
    vocab: int = 320,
    layers: int = 3,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    max_model_len: int = 4096,
    **config_options: Any,
) -> Path:
    """Write a model with weights ~ N(0, `std`²) drawn from `seed`; returns `model_dir`.

    Those of norms are ~ N(1, `norm_std`²).
    `vocab` ≥ `MIN_VOCAB`; every id decodes to text. `config_options` go to the configuration
    (`sliding_window=64`, `tie_word_embeddings=True`, …). Nothing but `EOS_TOKEN_ID` ends a text.
    """
    if vocab < MIN_VOCAB:
        raise ValueError(f"vocab must be at least {MIN_VOCAB}")
    config_name, model_name = ARCHITECTURES[arch]
    options: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": EOS_TOKEN_ID,
    }
    config = getattr(transformers, config_name)(**(options | config_options))
    model = getattr(transformers, model_name)(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                if norm_std:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * norm_std)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    model.save_pretrained(model_dir)
    write_tokenizer(model_dir, vocab)
    return model_dir


def write_tokenizer(model_dir: Path, vocab: int) -> None:
    """A byte-level tokenizer: one token per byte; larger ids decode to short words."""
    tokens = [*_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"Ġword{number}" for number in range(vocab - len(tokens))]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=_SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    tokenizer.save(str(model_dir / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": _SPECIAL_TOKENS[0],
        "eos_token": _SPECIAL_TOKENS[EOS_TOKEN_ID],
        "chat_template": _CHAT_TEMPLATE,
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
