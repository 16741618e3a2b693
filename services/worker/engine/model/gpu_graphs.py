"""Iterations in which every sequence decodes one token, as captured CUDA graphs.

The host takes longer to launch the kernels of a layer than the device to run them for few
tokens. A graph is launched at once. It is captured for a number of rows, and for a way to split
contexts; fewer rows are padded, with tokens that store nothing and see nothing. Its inputs are
copied to where they were when it was captured. Weights and KV keep their addresses as layers come
and go, so a graph stays valid; one is of the layers of a stage.
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
    GpuPagedAttention,
    Tiles,
    Work,
    single_tiles,
    split_contexts,
)
from services.worker.engine.model.attention.paged import AttentionMetadata

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256)
"""The numbers of rows to capture."""
TABLE_BLOCKS = 1 << 16
"""Blocks of all sequences at most; with more, an iteration is launched kernel by kernel."""
GRAPHS_MAX = 64
COLUMNS = 5
"""Inputs of each row: starts, counts, positions and firsts of tiles, and slots."""

Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of each token, [tokens, head_dim]."""


class Layers(Protocol):
    """As `GpuLayers`."""

    def all_of(self, layers: range, rest: torch.Tensor, turn: Turn, work: Work) -> torch.Tensor: ...


class _Key(NamedTuple):
    """What a graph is for."""

    start: int
    stop: int
    rows: int
    share: int
    splits: int


def rounded_split(lengths: np.ndarray, rows: int, kv_heads: int) -> tuple[int, int]:
    """(share, splits) of `split_contexts` as powers of two, so that few graphs fit all contexts."""
    share, _ = split_contexts(lengths, rows, kv_heads, PROGRAMS_WANTED)
    share, longest = triton.next_power_of_2(share), int(lengths.max())
    while True:
        splits = triton.next_power_of_2(-(-longest // share))
        if splits == 1 or splits * rows <= PARTS_ROWS:
            return share, splits
        share *= 2


class Captured(NamedTuple):
    """Kernels that `replay` launches again; their result is where it was."""

    replay: Callable[[], None]
    output: torch.Tensor


class Capture:
    """Captures kernels on the GPU.

    All graphs share memory, since none runs beside another, and one stream: torch keeps a workspace
    of cuBLAS for each.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, work: Callable[[], torch.Tensor]) -> Captured:
        """`work` runs once before, for what the first call of a kernel has to do."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        where = {"pool": self._pool, "stream": self._stream}
        with torch.cuda.graph(graph, **where, capture_error_mode="thread_local"):
            output = work()
        return Captured(graph.replay, output)


class DecodeGraphs:
    """Captures graphs when they are needed first, and keeps the latest.

    `like`: a tensor of the device and the dtype of activations, as long as a hidden state.
    """

    def __init__(
        self,
        layers: Layers,
        attention: GpuPagedAttention,
        like: torch.Tensor,
        capture: Callable[[Callable[[], torch.Tensor]], Captured],
    ) -> None:
        self._layers = layers
        self._attention = attention
        self._capture = capture
        self._graphs: OrderedDict[_Key, Captured] = OrderedDict()
        most = ROWS[-1]
        self._rest = like.new_zeros(most, len(like))
        self._turn = tuple(like.new_zeros(most, attention.head_dim) for _ in range(2))
        self._columns = torch.zeros(COLUMNS, most, dtype=torch.int64, device=like.device)
        self._tables = torch.zeros(TABLE_BLOCKS, dtype=torch.int64, device=like.device)

    def fit(self, metadata: AttentionMetadata) -> bool:
        """Whether an iteration can be a graph."""
        spans = metadata.spans
        few = len(spans) <= ROWS[-1] and len(metadata.tables) <= TABLE_BLOCKS
        return few and bool((spans[:, 1] == 1).all())

    def run(
        self, hidden: torch.Tensor, turn: Turn, metadata: AttentionMetadata, layers: range
    ) -> torch.Tensor:
        """As `JoinedLayers.run`."""
        count = len(hidden)
        rows = next(rows for rows in ROWS if rows >= count)
        starts, counts, positions, firsts = single_tiles(metadata.spans)
        share, splits = rounded_split(positions + counts, rows, self._attention.num_kv_heads)
        key = _Key(layers.start, layers.stop, rows, share, splits)
        columns = np.zeros((COLUMNS, ROWS[-1]), np.int64)
        columns[-1] = -1
        columns[:, :count] = starts, counts, positions, firsts, metadata.slots_of_keys
        self._fill(columns, metadata.tables)

        def inputs() -> None:
            self._rest[:count] = hidden
            for kept, given in zip(self._turn, turn, strict=True):
                kept[:count] = given

        graph = self._graphs.get(key)
        if graph is None:
            inputs()
            graph = self._captured(key, layers)
        self._graphs.move_to_end(key)
        inputs()
        graph.replay()
        return graph.output[:count].clone()

    def _captured(self, key: _Key, layers: range) -> Captured:
        """A new graph, in place of the one that was not used for longest."""
        work, rest = self._work(key), self._rest[: key.rows]
        turn = (self._turn[0][: key.rows], self._turn[1][: key.rows])
        if len(self._graphs) == GRAPHS_MAX:
            self._graphs.popitem(last=False)
        made = self._capture(lambda: self._layers.all_of(layers, rest, turn, work))
        self._graphs[key] = made
        return made

    def _fill(self, columns: np.ndarray, tables: np.ndarray) -> None:
        """Put the inputs of attention where graphs read them."""
        for target, values in (
            (self._columns.view(-1), columns.reshape(-1)),
            (self._tables, tables),
        ):
            host = torch.empty(len(values), dtype=torch.int64, pin_memory=target.is_cuda)
            host.numpy()[:] = values
            target[: len(values)].copy_(host, non_blocking=True)

    def _work(self, key: _Key) -> Work:
        starts, counts, positions, firsts, slots = self._columns[:, : key.rows]
        tiles = Tiles(
            starts,
            counts,
            positions,
            firsts,
            lengths=np.empty(0),
            rows=self._attention.decode_rows,
            most=1,
            shares=(key.share, key.splits),
        )
        return Work(slots, self._tables, (tiles,))
