"""The sizes of a model, for the rest of the engine and the planner."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from services.core.groups.layer_map import ModelShape
from services.core.groups.slab_names import EMBEDDING, HEAD, layer_name
from services.worker.engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The sizes of a model. `max_model_len` limits prompt and output tokens together."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    tied_embeddings: bool
    dtype: torch.dtype
    sliding_windows: tuple[int | None, ...]
    """Per layer: number of last positions that a token attends to, itself included; None: all."""

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Bytes of K and V of a token in a layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def geometry_of(config: ModelConfig, dtype: torch.dtype) -> ModelGeometry:
    """Return the sizes of the model in `config` with weights in `dtype`."""
    return ModelGeometry(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        tied_embeddings=config.tie_word_embeddings,
        dtype=dtype,
        sliding_windows=config.sliding_windows,
    )


def shape_of(geometry: ModelGeometry, slab_bytes: Mapping[str, int]) -> ModelShape:
    """Return the shape of a model, from which the layers of pipeline stages are planned.

    `slab_bytes`: memory of the parameters of each layer, the embedding and the head, by name.
    """
    # The cost of a layer is proportional to the bytes of its parameters, because an iteration reads
    # all of them. The embedding is a lookup without cost. A tied head reads the embedding's weight.
    layer_bytes = max(slab_bytes[layer_name(index)] for index in range(geometry.num_layers))
    read_by_head = slab_bytes[EMBEDDING] if geometry.tied_embeddings else slab_bytes[HEAD]
    return ModelShape(
        num_layers=geometry.num_layers,
        layer_bytes=layer_bytes,
        embedding_bytes=slab_bytes[EMBEDDING],
        head_bytes=slab_bytes[HEAD],
        tied_embeddings=geometry.tied_embeddings,
        kv_bytes=geometry.kv_bytes_per_token_layer,
        layer_cost=float(layer_bytes),
        embedding_cost=0.0,
        head_cost=float(read_by_head),
    )
