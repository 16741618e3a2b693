"""Decoder layers on a CPU by compiled kernels.

`FusedLayer` runs a layer by two kernels, before and after attention. `CpuLayers` runs a range of
layers by a single kernel that includes attention.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from services.worker.engine.memory.kv_range import KvRange
from services.worker.engine.memory.panels import in_panels, outputs_of
from services.worker.engine.model.attention.paged import AttentionMetadata
from services.worker.engine.model.config import ModelConfig
from services.worker.engine.model.interrupt import Interrupted, WatchedInterrupt

if TYPE_CHECKING:
    from services.worker.engine.model.cpu_kernels.layer_kernel import LayerKernel, LayerWeights
    from services.worker.engine.model.cpu_kernels.layer_range import LayerRange

_WEIGHTS = {
    "input_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_OPTIONAL = {
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
}


class FusedLayer(nn.Module):
    """Replaces a `DecoderLayer`, and calls it for more rows than the kernel supports."""

    def __init__(
        self, layer: nn.Module, kernel: "LayerKernel", *, sliding_window: int | None
    ) -> None:
        super().__init__()
        self._layer = layer
        self.kernel = kernel
        self._sliding_window = sliding_window

    def forward(self, hidden_states: torch.Tensor, **context: Any) -> torch.Tensor:
        """[1, tokens, hidden] → the same shape; `context` comes from `Decoder.run_layers`."""
        hidden = hidden_states[0]
        rows_max = self.kernel.rows_max
        if rows_max is not None and len(hidden) > rows_max:
            output: torch.Tensor = self._layer(hidden_states, **context)
            return output
        cosine, sine = context["position_embeddings"]
        query, key, value = self.kernel.before(hidden, cosine[0], sine[0])
        attended = context["paged"].attend(
            query, key, value, sliding_window=self._sliding_window, scaling=query.shape[-1] ** -0.5
        )
        return self.kernel.after(hidden, attended)[None]


class CpuLayers:
    """Runs a range of layers in a single compiled call; a `LayerRunner`."""

    def __init__(self, kernel: "LayerRange", kv_ranges: Sequence[KvRange]) -> None:
        self._kernel = kernel
        self._kv_ranges = kv_ranges

    def run(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        layers: range,
        interrupted: Callable[[], bool] | None,
    ) -> torch.Tensor:
        """As `Decoder.run_layers`."""
        cache = self._kv_ranges[layers.start]
        # Copy, because the kernel works in place and `hidden` may be a view of a received message.
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        run = self._kernel.bind(
            hidden,
            (rotation[0][0].contiguous(), rotation[1][0].contiguous()),
            (cache.num_blocks, cache.shape.block_size),
            metadata.spans,
            metadata.tables,
        )
        watched = interrupted if isinstance(interrupted, WatchedInterrupt) else None
        descriptor = -1 if watched is None else watched.descriptor
        reached = layers.start
        while reached < layers.stop:
            until = layers.stop
            if interrupted is not None:
                if interrupted():
                    raise Interrupted(hidden, reached)
                # Between layers the kernel can poll a descriptor but cannot call Python. Let it
                # return after each layer if the check does not depend on a descriptor alone.
                if watched is None or watched.time_dependent():
                    until = reached + 1
            reached = run(reached, until, descriptor)
        return hidden


def fused_layer(
    layer: nn.Module,
    views: dict[str, torch.Tensor],
    path: str,
    config: ModelConfig,
    *,
    sliding_window: int | None,
) -> nn.Module:
    """Return `layer` as a `FusedLayer`, or `layer` itself if the kernels do not support it.

    `views`: the parameters of the layer; their names start with `path`.
    """
    from services.worker.engine.model.cpu_kernels.layer_kernel import LayerWeights

    named = {name.removeprefix(f"{path}."): view for name, view in views.items()}
    supported = _WEIGHTS | {field: name for field, name in _OPTIONAL.items() if name in named}
    # Refuse a layer with further parameters, which the kernels would ignore.
    if set(supported.values()) != set(named) or config.hidden_act != "silu":
        return layer
    weights = LayerWeights(**{field: named[name] for field, name in supported.items()})
    kind = _kernel_of(weights)
    head_dim = outputs_of(weights.query) // config.num_attention_heads
    kernel = kind(weights, head_dim, config.rms_norm_eps)
    return FusedLayer(layer, kernel, sliding_window=sliding_window)


def cpu_layers(
    layers: Sequence[nn.Module],
    kv_ranges: Sequence[KvRange],
    sliding_windows: Sequence[int | None],
    config: ModelConfig,
) -> "CpuLayers | None":
    """Return all layers as a single kernel; None unless it supports all of them."""
    from services.worker.engine.model.cpu_kernels import layer_range, paged_attention
    from services.worker.engine.model.cpu_kernels.panel_layer import PanelLayerKernel

    # The kernel includes attention, so it must support the shape of the KV cache, too.
    kernels = [layer.kernel for layer in layers if isinstance(layer, FusedLayer)]
    block = kv_ranges[0].shape
    if not paged_attention.fits(block.block_size, block.head_dim, block.dtype):
        return None
    if len(kernels) < len(layers) or not all(isinstance(k, PanelLayerKernel) for k in kernels):
        return None
    sizes = layer_range.LayerRangeSizes(
        heads=config.num_attention_heads,
        kv_heads=block.num_kv_heads,
        head_dim=block.head_dim,
        hidden=kernels[0].hidden_size,
        gated=kernels[0].gated_size,
        epsilon=config.rms_norm_eps,
    )
    kernel = layer_range.LayerRange(
        [kernel.weights for kernel in kernels],
        [kv_range.address for kv_range in kv_ranges],
        sliding_windows,
        sizes,
    )
    return CpuLayers(kernel, kv_ranges)


def _kernel_of(weights: "LayerWeights") -> "type[LayerKernel]":
    """Return the kernel class for the layout of weights: all in panels, or all row-major."""
    if in_panels(weights.query):
        from services.worker.engine.model.cpu_kernels.panel_layer import PanelLayerKernel

        return PanelLayerKernel
    from services.worker.engine.model.cpu_kernels.decoder_layer import DecoderLayerKernel

    return DecoderLayerKernel
