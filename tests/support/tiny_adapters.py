"""Tiny random LoRA adapters in the format of peft: adapter_config.json and safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TARGETS = ("q_proj", "v_proj")


def make_tiny_adapter(
    folder: Path,
    model: Path | Mapping[str, int],
    *,
    rank: int = 8,
    seed: int = 0,
    std: float = 0.5,
    targets: tuple[str, ...] = TARGETS,
    **config: Any,
) -> Path:
    """Write an adapter for attention projections; returns `folder`.

    `model`: folder or configuration of the model. The weights ~ N(0, `std`²) depend on `seed`;
    `config` goes to adapter_config.json.
    """
    sizes = model
    if isinstance(model, Path):
        sizes = json.loads((model / "config.json").read_text())
    assert isinstance(sizes, Mapping)
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head_dim = sizes.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * head_dim, "o_proj": hidden}
    outputs |= dict.fromkeys(("k_proj", "v_proj"), sizes["num_key_value_heads"] * head_dim)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(sizes["num_hidden_layers"]):
        for target in targets:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            inputs = heads * head_dim if target == "o_proj" else hidden
            shapes = {"lora_A": (rank, inputs), "lora_B": (outputs[target], rank)}
            for part, shape in shapes.items():
                values = torch.randn(shape, generator=generator) * std
                tensors[f"{name}.{part}.weight"] = values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2))
    return folder
