"""Checks the folder of a LoRA adapter against the configuration of its model.

Reads adapter_config.json and the header of adapter_model.safetensors, in the format of peft. The
shapes of all matrices are checked for the modules of Llama, Mistral, Qwen2 and Qwen3; other modules
are left to the worker's engine.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

from services.common.adapter_files import CONFIG, WEIGHTS, AdapterUnreadable, adapter_digest
from services.common.safetensors_header import DAMAGED, read_header

_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(?P<layer>[0-9]{1,6})\.(?P<block>[a-z_]+)\.(?P<module>[a-z_]+)"
    r"\.lora_(?P<part>[AB])(\.default)?\.weight"
)
_UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "bias": ("none", "biases"),
    "use_dora": (False, "DoRA"),
    "lora_bias": (False, "biases"),
    "modules_to_save": (None, "whole modules in 'modules_to_save'"),
    "layer_replication": (None, "replicated layers"),
    "alora_invocation_tokens": (None, "activated LoRA"),
    "use_qalora": (False, "QALoRA"),
    "use_bdlora": (None, "block-diagonal LoRA"),
}
"""Fields of the configuration with the only supported value, and what other values stand for."""
_CHANGES_MODEL = re.compile(r"(pissa|olora|corda|loftq)", re.IGNORECASE)
"""Values of 'init_lora_weights' for which peft changes the weights of the model, too."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter that fits its model; `targets` are the modules that it changes."""

    digest: str
    rank: int
    targets: tuple[str, ...]


def read_adapter(folder: Path, model_dir: Path) -> AdapterFolder:
    """Read and check the adapter in `folder` for the model in `model_dir`.

    Raises:
        AdapterUnreadable: if it is not a LoRA adapter of this model, or changes while it is read.
    """
    digest = adapter_digest(folder)
    config = _configuration(folder / CONFIG)
    try:
        tensors = read_header(folder / WEIGHTS).tensors
        shapes = {name: tuple(map(index, entry["shape"])) for name, entry in tensors.items()}
        model = json.loads((model_dir / "config.json").read_bytes())
    except DAMAGED as error:
        raise AdapterUnreadable(
            f"{WEIGHTS} in {folder} is not a safetensors file ({error}); write the adapter again"
        ) from error
    rank = _rank(config, folder)
    targets = _check_shapes(shapes, rank, model, folder)
    if adapter_digest(folder) != digest:
        raise AdapterUnreadable(
            f"the adapter in {folder} changed while it was read; retry when it is written"
        )
    return AdapterFolder(digest, rank, targets)


def _configuration(path: Path) -> Mapping[str, Any]:
    """The configuration; raises AdapterUnreadable for kinds of adapters that engines refuse."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterUnreadable(f"{path} is not JSON ({error}); write the adapter again") from error
    if not isinstance(config, dict) or config.get("peft_type", "LORA") != "LORA":
        raise AdapterUnreadable(f"{path} is not the configuration of a LoRA adapter; correct it")
    for field, (value, text) in _UNSUPPORTED.items():
        if (config.get(field) or value) != value:
            raise AdapterUnreadable(
                f"the adapter has {text}, which workers do not apply ('{field}' in {path}); train"
                " it without"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and _CHANGES_MODEL.match(start):
        raise AdapterUnreadable(
            f"the adapter is for a model whose weights {start[:32]!a} changed ('init_lora_weights'"
            f" in {path}); convert it with peft's 'path_initial_model_for_weight_conversion'"
        )
    return config


def _rank(config: Mapping[str, Any], folder: Path) -> int:
    """The largest rank in the configuration."""
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise AdapterUnreadable(
            f"'r' and 'rank_pattern' in {folder / CONFIG} must be positive integers; correct them"
        )
    return max(rank for rank in ranks if rank is not None)


def _check_shapes(
    shapes: Mapping[str, tuple[int, ...]], rank: int, model: Mapping[str, Any], folder: Path
) -> tuple[str, ...]:
    """Check the matrices of an adapter; returns the names of its modules."""
    sizes = _module_sizes(model)
    parts: dict[tuple[str, str, str], dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterUnreadable(
                f"{WEIGHTS} in {folder} has the tensor {name[:128]!a}, which is no matrix of a"
                " decoder layer; train the adapter for attention and MLP projections only"
            )
        key = match["layer"], match["block"], match["module"]
        parts.setdefault(key, {})[match["part"]] = shape
    if not parts:
        raise AdapterUnreadable(f"{WEIGHTS} in {folder} has no tensors; write the adapter again")
    for (layer, block, module), pair in parts.items():
        fault = _fault(int(layer), module, pair, rank, model, sizes)
        if fault is not None:
            raise AdapterUnreadable(
                f"layer {layer}, {block}.{module} of the adapter in {folder} {fault}; choose an"
                " adapter of this model"
            )
    return tuple(sorted({module for _, _, module in parts}))


def _fault(
    layer: int,
    module: str,
    pair: Mapping[str, tuple[int, ...]],
    rank: int,
    model: Mapping[str, Any],
    sizes: Mapping[str, tuple[int, int]],
) -> str | None:
    """Why the two matrices of a module do not fit the model, or None."""
    layers = model.get("num_hidden_layers")
    if isinstance(layers, int) and layer >= layers:
        return f"is not in the model, which has {layers} layers"
    first, second = pair.get("A", ()), pair.get("B", ())
    if len(first) != 2 or len(second) != 2 or first[0] != second[1]:
        return f"has no pair of matrices A and B of the same rank, but {first} and {second}"
    if not 1 <= first[0] <= rank:
        return f"has rank {first[0]}, but the configuration says at most {rank}"
    wanted = sizes.get(module)
    if wanted is not None and (first[1], second[0]) != wanted:
        return f"maps {first[1]} to {second[0]} values, but that of the model {wanted}"
    return None


def _module_sizes(model: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the projections of known architectures; empty for others."""
    names: Collection[Any] = model.get("architectures") or ()
    if not any(re.match(r"(Llama|Mistral|Qwen2|Qwen3)ForCausalLM", str(name)) for name in names):
        return {}
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    head = model.get("head_dim") or hidden // heads
    queries, keys = heads * head, (model.get("num_key_value_heads") or heads) * head
    between = model["intermediate_size"]
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, between),
        "up_proj": (hidden, between),
        "down_proj": (between, hidden),
    }
