"""Runs the layers of a model on a GPU, by nine kernels per layer (ten with split contexts).

A layer is: norm; fused QKV product; rotation, which stores K and V; attention; output product;
residual and norm; fused gate and up product; gate; down product. Products are torch's (cuBLAS). The
residual stream is rounded once per half of a layer, as in `transformers`; the steps between two
products compute in float32.

All kernels run in torch's default stream; `memory.device_copies` orders the copies of the mover's
thread with it. So memory may be moved between parameters and KV between two iterations without
synchronization.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Protocol

import numpy as np
import torch
import triton
from torch.nn import functional

from services.core.groups.slab_names import layer_name
from services.core.request import blocks_for
from services.worker.engine.memory.kv_range import KvRange
from services.worker.engine.model.attention.gpu import SHARE_MIN, AttentionInputs, GpuPagedAttention
from services.worker.engine.model.attention.paged import AttentionMetadata
from services.worker.engine.model.config import ModelConfig
from services.worker.engine.model.gpu_graphs import CapturedGraph, DecodeGraphs, Rotation
from services.worker.engine.model.gpu_kernels import layer as kernels
from services.worker.engine.model.gpu_kernels.launcher import Launcher
from services.worker.engine.model.interrupt import Interrupted

AHEAD = 2
"""Maximum layers launched ahead of the device while an iteration can be interrupted."""
WARM_CONTEXT = 4 * SHARE_MIN
"""A context length that attention splits over several programs."""
GATE_WIDTH = 1024
"""Values that a program of `gate` computes."""


@dataclass(frozen=True, slots=True)
class GpuLayerWeights:
    """The parameters of a layer, with fused QKV and fused gate and up matrices."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    post_attention_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor]) -> "GpuLayerWeights | None":
        """Fuse the parameters of a layer; None if their names or addresses do not allow it."""
        projections = [f"self_attn.{letter}_proj" for letter in "qkv"]
        used = {
            "input_layernorm.weight",
            "self_attn.o_proj.weight",
            "post_attention_layernorm.weight",
            *(f"{name}.weight" for name in projections),
            *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        }
        biases = [f"{name}.bias" for name in projections if f"{name}.bias" in named]
        optional = {*biases, "self_attn.q_norm.weight", "self_attn.k_norm.weight"}
        # Fuse without a copy: `decoder.slab_layouts` places these weights consecutively.
        qkv = contiguous_view([named[f"{name}.weight"] for name in projections])
        gate_up = contiguous_view([named["mlp.gate_proj.weight"], named["mlp.up_proj.weight"]])
        bias = contiguous_view([named[name] for name in biases]) if biases else None
        unfused = qkv is None or gate_up is None or (bias is None and biases)
        if not used <= named.keys() <= used | optional or len(biases) not in (0, 3) or unfused:
            return None
        assert qkv is not None and gate_up is not None
        return cls(
            input_norm=named["input_layernorm.weight"],
            qkv=qkv,
            qkv_bias=bias,
            query_norm=named.get("self_attn.q_norm.weight"),
            key_norm=named.get("self_attn.k_norm.weight"),
            output=named["self_attn.o_proj.weight"],
            post_attention_norm=named["post_attention_layernorm.weight"],
            gate_up=gate_up,
            down=named["mlp.down_proj.weight"],
        )


def contiguous_view(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """View adjacent `parts` as a single tensor, concatenated along their first dimension.

    None if there is a gap in memory between two parts.
    """
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end:
            return None
        end += part.numel() * part.element_size()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride())


class GpuLayerSizes(NamedTuple):
    """Sizes that all layers share. `windows`: sliding window per layer, None for full attention."""

    hidden: int
    gated: int
    epsilon: float
    windows: tuple[int | None, ...]


class Blocks(Protocol):
    """The KV cache of a layer; the interface of `KvRange`."""

    def blocks(self) -> torch.Tensor: ...


class GpuLayers:
    """Runs layers with K and V in `kv_ranges`; a `LayerRunner` of the decoder."""

    def __init__(
        self,
        weights: Sequence[GpuLayerWeights],
        kv_ranges: Sequence[Blocks],
        sizes: GpuLayerSizes,
        attention: GpuPagedAttention,
    ) -> None:
        self._weights = weights
        self._kv_ranges = kv_ranges
        self._attention = attention
        hidden, self._gated, self._epsilon, self._windows = sizes
        self._scaling = attention.head_dim**-0.5
        self._norm_width = triton.next_power_of_2(hidden)
        self._norm, self._add_norm, self._gate = (
            Launcher(kernel) for kernel in (kernels.norm, kernels.add_norm, kernels.gate)
        )
        self._rotate = Launcher(kernels.rotate_and_store, num_warps=1)  # a program is a head
        self._graphs: DecodeGraphs | None = None

    def run(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        layers: range,
        interrupted: Callable[[], bool] | None,
    ) -> torch.Tensor:
        """As `Decoder.run_layers`; `rotation` is cosine and sine, [1, tokens, head_dim] each."""
        angles = (rotation[0][0].contiguous(), rotation[1][0].contiguous())
        if self._graphs is not None and self._graphs.fit(metadata):
            # A graph launches all layers at once, so it can only be interrupted before the first.
            if interrupted is not None and interrupted():
                raise Interrupted(hidden, layers.start)
            return self._graphs.run(hidden, angles, metadata, layers)
        residual = hidden.clone(memory_format=torch.contiguous_format)
        return self.run_all(layers, residual, angles, self._attention.inputs(metadata), interrupted)

    def run_all(
        self,
        layers: range,
        residual: torch.Tensor,
        rotation: Rotation,
        inputs: AttentionInputs,
        interrupted: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        """Run `layers` over `residual`, which is overwritten.

        `interrupted`: as in `Decoder.run_layers`.
        """
        # `update` is the output of a layer's MLP, which the next layer's norm kernel adds.
        update: torch.Tensor | None = None
        limiter = _LaunchLimiter() if interrupted is not None else None
        for index in layers:
            if interrupted is not None and interrupted():
                raise Interrupted(residual if update is None else residual + update, index)
            update = self._layer(index, residual, update, rotation, inputs)
            if limiter is not None:
                limiter.step()
        return residual if update is None else residual + update

    def use_graphs(self, capture: Callable[[Callable[[], torch.Tensor]], CapturedGraph]) -> None:
        """Run decode-only iterations as CUDA graphs from now on; `capture` captures kernels."""
        like = self._weights[0].input_norm
        self._graphs = DecodeGraphs(self, self._attention, like, capture)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile all kernels, about a second each; overwrites blocks of the KV cache."""
        like = self._weights[0].input_norm
        block_size = self._attention.block_size
        # Each variant has its own kernel constants: run a layer per sliding window, decode and
        # prefill, with whole and split contexts.
        for index in {window: index for index, window in enumerate(self._windows)}.values():
            for rows, start in product((1, 2), (0, WARM_CONTEXT)):
                needed = blocks_for(start + rows, block_size)
                if needed > len(self._kv_ranges[index].blocks()):
                    continue
                spans = np.array([[0, rows, start, 0, rows == 1, 0]], np.int64)
                tables = np.arange(needed)
                metadata = AttentionMetadata(spans, tables, block_size, like.device, like.dtype)
                residual = like.new_zeros(rows, len(like))
                angles = like.new_zeros(rows, self._attention.head_dim)
                inputs = self._attention.inputs(metadata)
                # Only the first layer of a stage has no update to add.
                self._layer(index, residual, None, (angles, angles), inputs)
                self._layer(index, residual, residual, (angles, angles), inputs)
        self._attention.compile_combine(like)

    def _layer(
        self,
        index: int,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        rotation: Rotation,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """Add `update` to `residual` and run layer `index`; returns the output of its MLP."""
        weights, blocks = self._weights[index], self._kv_ranges[index].blocks()
        normed = self._add_and_norm(residual, update, weights.input_norm)  # [tokens, hidden]
        qkv = functional.linear(normed, weights.qkv, weights.qkv_bias)
        query = self._rotate_and_store(qkv, rotation, weights, blocks, inputs)
        attended = self._attention.attend(
            query, blocks, inputs, self._windows[index], self._scaling
        )
        update = functional.linear(attended.view(len(attended), -1), weights.output)
        normed = self._add_and_norm(residual, update, weights.post_attention_norm)
        gate_up = functional.linear(normed, weights.gate_up)
        inner = gate_up.new_empty(len(gate_up), self._gated)
        grid = (len(gate_up), triton.cdiv(self._gated, GATE_WIDTH))
        self._gate(grid, (gate_up, inner, self._gated), GATE_WIDTH)
        return functional.linear(inner, weights.down)

    def _add_and_norm(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add `update` to `residual`, in place; returns the RMS norm of the sum."""
        normed, sizes = torch.empty_like(residual), (residual.shape[1], self._epsilon)
        if update is None:
            self._norm((len(residual),), (residual, weight, normed, *sizes), self._norm_width)
        else:
            arguments = (update, residual, weight, normed, *sizes)
            self._add_norm((len(residual),), arguments, self._norm_width)
        return normed

    def _rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        weights: GpuLayerWeights,
        blocks: torch.Tensor,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """Rotate queries and keys and store K and V; returns queries [tokens, head, head_dim]."""
        sizes = self._attention
        query = qkv.new_empty(len(qkv), sizes.num_heads, sizes.head_dim)
        # Without head norms, pass `qkv` for the unused norm arguments.
        norms = weights.query_norm is not None
        self._rotate(
            (len(qkv), sizes.num_heads + 2 * sizes.num_kv_heads),
            (
                *(qkv, *rotation, inputs.slots),
                *(weights.query_norm if norms else qkv, weights.key_norm if norms else qkv),
                *(query, blocks, self._epsilon),
            ),
            *(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.block_size, norms),
        )
        return query


def gpu_layers(
    views: Sequence[Mapping[str, torch.Tensor]],
    kv_ranges: Sequence[KvRange],
    config: ModelConfig,
    attention: GpuPagedAttention,
) -> GpuLayers | None:
    """Return a runner of all layers of a model; None if the kernels do not support them.

    `views`: the parameters of each layer by their checkpoint names.
    """
    if config.hidden_act not in ("silu", "swish"):
        return None
    weights = []
    for index, parameters in enumerate(views):
        prefix = f"{layer_name(index)}."
        named = {name.removeprefix(prefix): view for name, view in parameters.items()}
        layer_weights = GpuLayerWeights.of(named)
        if layer_weights is None:
            return None
        weights.append(layer_weights)
    sizes = GpuLayerSizes(
        config.hidden_size, config.intermediate_size, config.rms_norm_eps, config.sliding_windows
    )
    return GpuLayers(weights, kv_ranges, sizes, attention)


class _LaunchLimiter:
    """Keeps the host at most `AHEAD` layers ahead of the device."""

    # Launches are asynchronous: without a limit, the host would check for an interrupt only before
    # it has launched all layers. With it, on an H200, 2,048 tokens of a 14B model stop within 6.1
    # ms and take 3 % longer (benchmarks/results/gpu-engine-h200.json).
    def __init__(self) -> None:
        self._ended: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """Record the launch of a layer; block until at most `AHEAD` layers are unfinished."""
        event = torch.cuda.Event()
        event.record()
        self._ended.append(event)
        if len(self._ended) > AHEAD:
            self._ended.popleft().synchronize()
