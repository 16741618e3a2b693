"""All layers of a model on a GPU, nine kernels each, or ten where contexts are split.

A layer is: norm; one product for q, k and v; rotation, which stores K and V; attention; product;
residual and norm; one product for gate and up; gate; product. Products are those of torch (cuBLAS).
The residual stream is rounded once for each half of a layer, as in `transformers`; all between two
products is computed in float32.

Kernels run later than the host launches them, so that an interruption would only be seen once all
layers are launched. Where an iteration can be interrupted, the host is therefore no more than
`AHEAD` layers ahead: on an H200, 2,048 tokens of a 14B model stop within 6.1 ms so, and take 3 %
longer (benchmarks/results/gpu-engine-h200.json).

All kernels and copies, those of other threads too, are in torch's default stream. That is why
memory may change hands between two iterations without a wait.
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
from services.worker.engine.model.attention.gpu import SHARE_MIN, GpuPagedAttention, Work
from services.worker.engine.model.attention.paged import AttentionMetadata
from services.worker.engine.model.config import ModelConfig
from services.worker.engine.model.gpu_graphs import Captured, DecodeGraphs, Turn
from services.worker.engine.model.gpu_kernels import layer as kernels
from services.worker.engine.model.gpu_kernels.launcher import Launcher
from services.worker.engine.model.interrupt import Interrupted

AHEAD = 2
WARM_CONTEXT = 4 * SHARE_MIN
"""A context that several programs share."""
GATE_WIDTH = 1024
"""Values that one program of `gate` computes."""


@dataclass(frozen=True, slots=True)
class GpuLayerWeights:
    """The parameters of a layer; q, k and v are one matrix, and so are gate and up."""

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
        """From the parameters of a layer by name, None if there are others or they do not join."""
        projections = [f"self_attn.{one}_proj" for one in "qkv"]
        used = {
            "input_layernorm.weight",
            "self_attn.o_proj.weight",
            "post_attention_layernorm.weight",
            *(f"{one}.weight" for one in projections),
            *(f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")),
        }
        biases = [f"{one}.bias" for one in projections if f"{one}.bias" in named]
        optional = {*biases, "self_attn.q_norm.weight", "self_attn.k_norm.weight"}
        qkv = joined([named[f"{one}.weight"] for one in projections])
        gate_up = joined([named["mlp.gate_proj.weight"], named["mlp.up_proj.weight"]])
        bias = joined([named[one] for one in biases]) if biases else None
        unjoined = qkv is None or gate_up is None or (bias is None and biases)
        if not used <= named.keys() <= used | optional or len(biases) not in (0, 3) or unjoined:
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


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor over `parts`, one after the other in memory, by their first dimension.

    None if there is a gap between two of them.
    """
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end:
            return None
        end += part.numel() * part.element_size()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride())


class GpuLayerSizes(NamedTuple):
    """What layers need to know of their model; `windows`: see `ModelGeometry`."""

    hidden: int
    gated: int
    epsilon: float
    windows: tuple[int | None, ...]


class Blocks(Protocol):
    """The KV cache of a layer, as a `KvRange`."""

    def blocks(self) -> torch.Tensor: ...


class GpuLayers:
    """Runs layers of these sizes, whose K and V lie in `kv_ranges`."""

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
        self._rotate = Launcher(kernels.rotate_and_store, num_warps=1)
        self._graphs: DecodeGraphs | None = None

    def run(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        layers: range,
        interrupted: Callable[[], bool] | None,
    ) -> torch.Tensor:
        """As `Decoder.run_layers`; `rotation` is twice [1, tokens, head_dim]."""
        turn = (rotation[0][0].contiguous(), rotation[1][0].contiguous())
        if self._graphs is not None and self._graphs.fit(metadata):
            if interrupted is not None and interrupted():
                raise Interrupted(hidden, layers.start)
            return self._graphs.run(hidden, turn, metadata, layers)
        rest = hidden.clone(memory_format=torch.contiguous_format)
        return self.all_of(layers, rest, turn, self._attention.work(metadata), interrupted)

    def all_of(
        self,
        layers: range,
        rest: torch.Tensor,
        turn: Turn,
        work: Work,
        interrupted: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        """`layers` over `rest`, which is overwritten; `interrupted` as in `Decoder.run_layers`."""
        added: torch.Tensor | None = None
        pace = _Pace() if interrupted is not None else None
        for index in layers:
            if interrupted is not None and interrupted():
                raise Interrupted(rest if added is None else rest + added, index)
            added = self._layer(index, rest, added, turn, work)
            if pace is not None:
                pace.step()
        return rest if added is None else rest + added

    def use_graphs(self, capture: Callable[[Callable[[], torch.Tensor]], Captured]) -> None:
        """Run iterations that only decode as graphs from now on."""
        like = self._weights[0].input_norm
        self._graphs = DecodeGraphs(self, self._attention, like, capture)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile all kernels, which takes a second each; overwrites blocks of the cache."""
        like = self._weights[0].input_norm
        block_size = self._attention.block_size
        for index in {window: index for index, window in enumerate(self._windows)}.values():
            for rows, start in product((1, 2), (0, WARM_CONTEXT)):
                needed = blocks_for(start + rows, block_size)
                if needed > len(self._kv_ranges[index].blocks()):
                    continue
                spans = np.array([[0, rows, start, 0, rows == 1]], np.int64)
                tables = np.arange(needed)
                metadata = AttentionMetadata(spans, tables, block_size, like.device, like.dtype)
                rest = like.new_zeros(rows, len(like))
                turn = like.new_zeros(rows, self._attention.head_dim)
                work = self._attention.work(metadata)
                self._layer(index, rest, None, (turn, turn), work)
                self._layer(index, rest, rest, (turn, turn), work)

    def _layer(
        self,
        index: int,
        rest: torch.Tensor,
        added: torch.Tensor | None,
        turn: Turn,
        work: Work,
    ) -> torch.Tensor:
        """Layer `index` over `rest` + `added`, which becomes `rest`; returns what comes to it."""
        weights, blocks = self._weights[index], self._kv_ranges[index].blocks()
        normed = self._normed(rest, added, weights.input_norm)
        qkv = functional.linear(normed, weights.qkv, weights.qkv_bias)
        query = self._rotate_and_store(qkv, turn, weights, blocks, work)
        attended = self._attention.attend(query, blocks, work, self._windows[index], self._scaling)
        added = functional.linear(attended.view(len(attended), -1), weights.output)
        normed = self._normed(rest, added, weights.post_attention_norm)
        both = functional.linear(normed, weights.gate_up)
        inner = both.new_empty(len(both), self._gated)
        grid = (len(both), triton.cdiv(self._gated, GATE_WIDTH))
        self._gate(grid, (both, inner, self._gated), GATE_WIDTH)
        return functional.linear(inner, weights.down)

    def _normed(
        self, rest: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """`rest` += `added`; returns its norm."""
        normed, sizes = torch.empty_like(rest), (rest.shape[1], self._epsilon)
        if added is None:
            self._norm((len(rest),), (rest, weight, normed, *sizes), self._norm_width)
        else:
            arguments = (added, rest, weight, normed, *sizes)
            self._add_norm((len(rest),), arguments, self._norm_width)
        return normed

    def _rotate_and_store(
        self,
        qkv: torch.Tensor,
        turn: Turn,
        weights: GpuLayerWeights,
        blocks: torch.Tensor,
        work: Work,
    ) -> torch.Tensor:
        """The queries, turned: [tokens, head, head_dim]."""
        one = self._attention
        query = qkv.new_empty(len(qkv), one.num_heads, one.head_dim)
        norms = weights.query_norm is not None
        self._rotate(
            (len(qkv), one.num_heads + 2 * one.num_kv_heads),
            (
                *(qkv, *turn, work.slots),
                *(weights.query_norm if norms else qkv, weights.key_norm if norms else qkv),
                *(query, blocks, self._epsilon),
            ),
            *(one.num_heads, one.num_kv_heads, one.head_dim, one.block_size, norms),
        )
        return query


def gpu_layers(
    views: Sequence[Mapping[str, torch.Tensor]],
    kv_ranges: Sequence[KvRange],
    config: ModelConfig,
    attention: GpuPagedAttention,
) -> GpuLayers | None:
    """All layers of a model, None if the kernels cannot compute them.

    `views` are the parameters of each layer, by the names that checkpoints have for them.
    """
    if config.hidden_act not in ("silu", "swish"):
        return None
    weights = []
    for index, parameters in enumerate(views):
        prefix = f"{layer_name(index)}."
        named = {name.removeprefix(prefix): view for name, view in parameters.items()}
        found = GpuLayerWeights.of(named)
        if found is None:
            return None
        weights.append(found)
    sizes = GpuLayerSizes(
        config.hidden_size, config.intermediate_size, config.rms_norm_eps, config.sliding_windows
    )
    return GpuLayers(weights, kv_ranges, sizes, attention)


class _Pace:
    """Lets the host be no more than `AHEAD` layers ahead of the device."""

    def __init__(self) -> None:
        self._ended: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """A layer has been launched; returns once few enough are unfinished."""
        event = torch.cuda.Event()
        event.record()
        self._ended.append(event)
        if len(self._ended) > AHEAD:
            self._ended.popleft().synchronize()
