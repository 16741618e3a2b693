"""Runs decode-only iterations as CUDA graphs.

For few tokens, the host takes longer to launch the kernels of a layer than the device to run them.
A graph launches all kernels of a stage (a range of layers) in a single call. There is a graph per
stage, number of rows and split of contexts (attention divides a long context into `splits` parts of
`share` tokens). Smaller batches are padded with tokens that store nothing and attend to nothing.
Inputs are copied to the addresses of the capture. Weights and KV keep their addresses when layers
leave a stage or return, so graphs stay valid.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
import triton

from services.worker.engine.model.attention.gpu import (
    PARTS_ROWS,
    PROGRAMS_WANTED,
    AttentionInputs,
    GpuPagedAttention,
    Tiles,
    single_tiles,
    split_contexts,
)
from services.worker.engine.model.attention.paged import AttentionMetadata

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256)
"""The numbers of rows (tokens) of graphs."""
TABLE_BLOCKS = 1 << 16
"""Maximum number of KV blocks of all sequences; larger iterations run without a graph."""
GRAPHS_MAX = 64  # graphs in memory
COLUMNS = 6
"""Inputs per row: the first five tensors of `Tiles`, and the K slot."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of each token's position, [tokens, head_dim] each."""


class Layers(Protocol):
    """The interface of `GpuLayers`."""

    def run_all(
        self, layers: range, residual: torch.Tensor, rotation: Rotation, inputs: AttentionInputs
    ) -> torch.Tensor: ...


class _GraphKey(NamedTuple):
    """The launch parameters that a graph fixes."""

    start: int
    stop: int
    rows: int
    share: int
    splits: int


def rounded_split(lengths: np.ndarray, rows: int, kv_heads: int) -> tuple[int, int]:
    """Return (share, splits) of `split_contexts`, rounded up to powers of two."""
    # Both are part of the graph's key. Rounding them lets few graphs cover all contexts.
    share, _ = split_contexts(lengths, rows, kv_heads, PROGRAMS_WANTED)
    share, longest = triton.next_power_of_2(share), int(lengths.max())
    while True:
        splits = triton.next_power_of_2(-(-longest // share))
        if splits == 1 or splits * rows <= PARTS_ROWS:
            return share, splits
        share *= 2


class CapturedGraph(NamedTuple):
    """A captured graph; `replay` launches its kernels, which write to `output`."""

    replay: Callable[[], None]
    output: torch.Tensor


class CudaGraphCapture:
    """Captures kernels as CUDA graphs."""

    def __init__(self) -> None:
        # Graphs never run concurrently, so they share a memory pool. They also share a stream,
        # because torch keeps a cuBLAS workspace per stream.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, launch: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Capture the kernels that `launch` launches; its result is the graph's output."""
        # Warm up, because the first call of a kernel may allocate or compile, which is not allowed
        # in a capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            launch()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        where = {"pool": self._pool, "stream": self._stream}
        # "thread_local": other threads may call CUDA during the capture.
        with torch.cuda.graph(graph, **where, capture_error_mode="thread_local"):
            output = launch()
        return CapturedGraph(graph.replay, output)


class DecodeGraphs:
    """Captures graphs on first use and keeps the `GRAPHS_MAX` most recently used.

    `like`: a hidden state vector with the device and dtype of activations.
    """

    def __init__(
        self,
        layers: Layers,
        attention: GpuPagedAttention,
        like: torch.Tensor,
        capture: Callable[[Callable[[], torch.Tensor]], CapturedGraph],
    ) -> None:
        self._layers = layers
        self._attention = attention
        self._capture = capture
        self._graphs: OrderedDict[_GraphKey, CapturedGraph] = OrderedDict()
        # Graphs read their inputs at the fixed addresses of these buffers.
        most = ROWS[-1]
        self._residual = like.new_zeros(most, len(like))
        self._rotation = tuple(like.new_zeros(most, attention.head_dim) for _ in range(2))
        self._columns = torch.zeros(COLUMNS, most, dtype=torch.int64, device=like.device)
        self._tables = torch.zeros(TABLE_BLOCKS, dtype=torch.int64, device=like.device)

    def fit(self, metadata: AttentionMetadata) -> bool:
        """Whether an iteration can run as a graph: decode steps only, within the limits."""
        spans = metadata.spans
        few = len(spans) <= ROWS[-1] and len(metadata.tables) <= TABLE_BLOCKS
        return few and bool((spans[:, 1] == 1).all())

    def run(
        self, hidden: torch.Tensor, rotation: Rotation, metadata: AttentionMetadata, layers: range
    ) -> torch.Tensor:
        """As `LayerRunner.run`, for an iteration that `fit`s."""
        count = len(hidden)
        rows = next(rows for rows in ROWS if rows >= count)
        starts, counts, positions, firsts, lowests = single_tiles(metadata.spans)
        share, splits = rounded_split(positions + counts, rows, self._attention.num_kv_heads)
        key = _GraphKey(layers.start, layers.stop, rows, share, splits)
        columns = np.zeros((COLUMNS, ROWS[-1]), np.int64)
        columns[-1] = -1  # padding rows: slot -1 stores nothing, count 0 attends to nothing
        slots = metadata.slots_of_keys
        columns[:, :count] = starts, counts, positions, firsts, lowests, slots
        self._fill(columns, metadata.tables)

        def copy_inputs() -> None:
            self._residual[:count] = hidden
            for buffer, values in zip(self._rotation, rotation, strict=True):
                buffer[:count] = values

        graph = self._graphs.get(key)
        if graph is None:
            # Copy the inputs twice: the warm-up of the capture overwrites the residual.
            copy_inputs()
            graph = self._captured(key, layers)
        self._graphs.move_to_end(key)
        copy_inputs()
        graph.replay()
        # Copy the output, which the next replay overwrites.
        return graph.output[:count].clone()

    def _captured(self, key: _GraphKey, layers: range) -> CapturedGraph:
        """Capture a graph; evicts the least recently used graph if there are too many."""
        inputs, residual = self._inputs(key), self._residual[: key.rows]
        rotation = (self._rotation[0][: key.rows], self._rotation[1][: key.rows])
        if len(self._graphs) == GRAPHS_MAX:
            self._graphs.popitem(last=False)
        graph = self._capture(lambda: self._layers.run_all(layers, residual, rotation, inputs))
        self._graphs[key] = graph
        return graph

    def _fill(self, columns: np.ndarray, tables: np.ndarray) -> None:
        """Copy the inputs of attention to the static buffers."""
        for target, values in (
            (self._columns.view(-1), columns.reshape(-1)),
            (self._tables, tables),
        ):
            # Pinned memory makes the copy asynchronous.
            host = torch.empty(len(values), dtype=torch.int64, pin_memory=target.is_cuda)
            host.numpy()[:] = values
            target[: len(values)].copy_(host, non_blocking=True)

    def _inputs(self, key: _GraphKey) -> AttentionInputs:
        starts, counts, positions, firsts, lowests, slots = self._columns[:, : key.rows]
        tiles = Tiles(
            starts,
            counts,
            positions,
            firsts,
            lowests,
            lengths=np.empty(0),
            rows=self._attention.decode_rows,
            most=1,
            shares=(key.share, key.splits),
        )
        return AttentionInputs(slots, self._tables, (tiles,))
