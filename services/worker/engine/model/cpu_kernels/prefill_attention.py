"""Kernel of prefill attention: a chunk of a sequence attends directly over the paged KV cache.

Keys are processed in tiles of `KEYS` positions with an online softmax (FlashAttention-2), so that
scores exist for a single tile at a time. K and V of a tile are packed once for all rows of the
chunk and all query heads of the KV head. A *pair* is `ROWS` rows of the chunk with a query head.

Tiles start at multiples of `KEYS` positions, and the result of a row does not depend on other rows.
So a row has the same bits for every division of a prompt into chunks.
"""

import numpy as np
from numba import float32, uint32

from services.worker.engine.memory.panels import PANEL, WORD_BYTES
from services.worker.engine.model.cpu_kernels.compiler import (
    compiled,
)
from services.worker.engine.model.cpu_kernels.exponential import exponential
from services.worker.engine.model.cpu_kernels.panel_gemm import narrow_rows
from services.worker.engine.model.cpu_kernels.small_product import product
from services.worker.engine.model.cpu_kernels.softmax_row import weigh_row

KEYS = PANEL
"""Positions per tile, as many as a panel has columns."""
ROWS = 64
"""Rows of a pair."""
AMX_PAIRS = 8
"""Pairs that attend to a tile together if products use AMX; otherwise a single pair."""
_CACHE = "STORED[:, :, :, :, ::1]"
_KEYS, _VALUES = "uint32[:, ::1]", "uint32[:, :, ::1]"


@compiled(f"void({_CACHE}, int64[::1], int64, int64, int64, {_KEYS})")
def _pack_keys(blocks, table, kv_head, first, count, packed):  # type: ignore[no-untyped-def]
    """Pack `count` keys from position `first` on into `packed` [head_dim in words, KEYS]."""
    slots = blocks.shape[2]
    block, slot = first // slots, first % slots
    for index in range(count):
        key = blocks[table[block], 0, slot, kv_head].view(np.uint32)
        for word in range(len(packed)):
            packed[word, index] = key[word]
        slot += 1
        if slot == slots:
            block, slot = block + 1, 0
    for word in range(len(packed)):
        packed[word, count:] = 0


@compiled(f"void({_CACHE}, int64[::1], int64, int64, int64, {_VALUES})")
def _pack_values(blocks, table, kv_head, first, count, packed):  # type: ignore[no-untyped-def]
    """Pack the values of the same positions into `packed` [panel, KEYS in words, PANEL].

    Missing positions become 0. The positions of a word are in the same block.
    """
    slots, size = blocks.shape[2], blocks.shape[4]
    per_word = WORD_BYTES // blocks.itemsize
    block, slot = first // slots, first % slots
    for word in range(KEYS // per_word):
        left = count - word * per_word
        if left <= 0:
            packed[:, word] = 0
            continue
        values = blocks[table[block], 1]
        for panel in range(len(packed)):
            begin = panel * PANEL
            width = min(PANEL, size - begin)
            target = packed[panel, word]
            # A word interleaves two positions of a bfloat16 column, as the product expects.
            if per_word == 1:
                whole = values[slot, kv_head].view(np.uint32)
                for k in range(width):
                    target[k] = whole[begin + k]
            elif left == 1:
                even = values[slot, kv_head]
                for k in range(width):
                    target[k] = uint32(even[begin + k])
            else:
                even, odd = values[slot, kv_head], values[slot + 1, kv_head]
                for k in range(width):
                    target[k] = uint32(even[begin + k]) | (uint32(odd[begin + k]) << uint32(16))
        slot += per_word
        if slot == slots:
            block, slot = block + 1, 0


@compiled(
    "void(float32[:, ::1], int64, int64, int64, int64, float32, float32[:, :, ::1], int64, int64,"
    " STORED[:, ::1], float32[:, :, ::1])"
)
def _weigh_tile(  # type: ignore[no-untyped-def]
    scores, begin_row, count, distance, window, scaling, states, head, first_row, weights, output
):
    """Turn `count` rows of `scores` into unnormalized softmax `weights`, 0 for masked positions.

    `states` [head, row, 2]: running maximum and sum of the weights of a row. `output`: the values
    attended to so far.
    """
    size = output.shape[2]
    for m in range(count):
        # Causal mask: row m sees positions before `end`; a window hides those before `begin`.
        end = distance + m + 1
        begin = max(0, end - window) if window else 0
        end = min(KEYS, end)
        if begin >= end:
            weights[begin_row + m] = 0
            continue
        row = first_row + m
        highest = states[head, row, 0]
        place = begin_row + m
        # The constants 1 and 0 select a variant at compile time: most rows see the whole tile.
        if begin == 0 and end == KEYS:
            peak, total = weigh_row(scores, place, KEYS, 1, 0, KEYS, highest, scaling, weights)
        else:
            peak, total = weigh_row(scores, place, KEYS, 0, begin, end, highest, scaling, weights)
        # Online softmax: after a new maximum, rescale the sum and the output accumulated so far.
        if peak > highest:
            shrink = exponential((highest - peak) * scaling)
            states[head, row, 0] = peak
            states[head, row, 1] = states[head, row, 1] * shrink + total
            for k in range(size):
                output[row, head, k] *= shrink
        else:
            states[head, row, 1] += total


@compiled(
    f"void(int64[::1], STORED[:, :, ::1], int64, int64, int64, int64, int64, {_KEYS}, {_VALUES},"
    " int64, int64, float32, float32[:, ::1], STORED[:, ::1], float32[:, :, ::1],"
    " float32[:, :, ::1])"
)
def _attend_tile(  # type: ignore[no-untyped-def]
    calls, inputs, first_head, sharing, first_row, first_pair, last_pair, keys, values, distance,
    window, scaling, scores, weights, states, output,
):  # fmt: skip
    """Attend to a tile with pairs `first_pair` to before `last_pair`.

    Pair 0 starts at `first_row`, which is `distance` positions after the start of the tile, and has
    head `first_head`. The next pairs have the other of the `sharing` heads of the KV head, then
    come further rows. `inputs`, `states` and `output` cover the rows of the chunk.
    """
    rows, heads, size = output.shape
    # Run each phase for all pairs: with AMX, switching between the two products takes 1.5 to 2
    # microseconds, as long as both products.
    for pair in range(first_pair, last_pair):
        row, head = first_row + pair // sharing * ROWS, first_head + pair % sharing
        product(
            calls[0], min(ROWS, rows - row), KEYS, size, heads * size, KEYS, 0, inputs,
            (row * heads + head) * size, keys, 0, scores, (pair - first_pair) * ROWS * KEYS,
        )  # fmt: skip
    for pair in range(first_pair, last_pair):
        row, head = first_row + pair // sharing * ROWS, first_head + pair % sharing
        _weigh_tile(
            scores, (pair - first_pair) * ROWS, min(ROWS, rows - row), distance + row - first_row,
            window, scaling, states, head, row, weights, output,
        )  # fmt: skip
    for pair in range(first_pair, last_pair):
        row, head = first_row + pair // sharing * ROWS, first_head + pair % sharing
        for panel in range(len(values)):
            column = panel * PANEL
            product(
                calls[0], min(ROWS, rows - row), min(PANEL, size - column), KEYS, KEYS,
                heads * size, 1, weights, (pair - first_pair) * ROWS * KEYS, values,
                panel * values.shape[1] * PANEL, output, (row * heads + head) * size + column,
            )  # fmt: skip


@compiled(
    f"void(int64[::1], float32[:, :, ::1], {_CACHE}, int64[::1], int64, int64, float32,"
    f" float32[:, :, ::1], STORED[:, :, ::1], float32[:, :, ::1], {_KEYS}, {_VALUES},"
    " float32[:, ::1], STORED[:, ::1])"
)
def attend_chunk(  # type: ignore[no-untyped-def]
    calls, query, blocks, table, start, window, scaling, output, inputs, states, keys, values,
    scores, weights,
):  # fmt: skip
    """Attend with `query` [rows, head, head_dim] from position `start` on; writes `output`.

    `table`: blocks of the sequence up to the last row. `window`: number of last positions that a
    row sees; 0 for all. `output` has the shape of `query`. Scratch: `inputs` like `query` or
    longer, `states` [head, rows, 2] or longer, `keys` and `values` as packed, `scores` and
    `weights` [batched pairs × ROWS, KEYS].
    """
    rows, heads, size = query.shape
    kv_heads = blocks.shape[3]
    sharing, end = heads // kv_heads, start + rows
    lowest = max(0, start - window + 1) if window else 0
    width, batched = heads * size, len(scores) // ROWS
    # Round the queries to the storage dtype, which products take.
    narrow_rows(query.reshape((rows, width)), inputs[:rows].reshape((rows, width)))
    output[:] = 0
    states[:, :rows, 0] = -np.inf
    states[:, :rows, 1] = 0
    for kv_head in range(kv_heads):
        for first in range(lowest // KEYS * KEYS, end, KEYS):
            positions = min(KEYS, end - first)
            _pack_keys(blocks, table, kv_head, first, positions, keys)
            _pack_values(blocks, table, kv_head, first, positions, values)
            # Skip rows before the tile (causal), and rows whose window starts after the tile.
            first_row = max(0, first - start) // ROWS * ROWS
            last_row = min(rows, first + KEYS - 1 + window - start) if window else rows
            pairs = -(-(last_row - first_row) // ROWS) * sharing
            for pair in range(0, pairs, batched):
                _attend_tile(
                    calls, inputs, kv_head * sharing, sharing, first_row, pair,
                    min(pair + batched, pairs), keys, values, start + first_row - first, window,
                    scaling, scores, weights, states, output,
                )  # fmt: skip
    # Normalize once at the end, by the total weight of each row.
    for m in range(rows):
        for head in range(heads):
            share = float32(1) / states[head, m, 1]
            for k in range(size):
                output[m, head, k] *= share
