"""A stage's memory without tensors: it records which sequence's KV is in each block and layer.

It drops, keeps and restores layers as `StageMemory` does, in units: a block of one layer takes one,
a layer's parameters `slab_units`.
"""

from collections.abc import Iterable, Sequence

from services.core.changeover.vocabulary import (
    DepartedReleased,
    KvMapped,
    RestoreMeasured,
    RestoreUndone,
    StageSwitched,
)
from services.core.groups.slab_names import layer_name, stage_slabs
from services.core.planner.block_table import BlockMove

BLOCK_SIZE = 2

Content = tuple[str, tuple[int, ...]]
"""A block of a layer: the sequence, and a number for the KV of each of its tokens there."""


class Violated(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, message: str) -> None:
    """Raise Violated unless it holds."""
    if not holds:
        raise Violated(message)


class FakeMemory:
    """The memory of a worker that starts with all layers, each with `blocks` blocks."""

    def __init__(self, num_layers: int, blocks: int, slab_units: int) -> None:
        self.num_layers = num_layers
        self.layers = range(num_layers)
        self.blocks = dict.fromkeys(self.layers, blocks)
        self.slabs = set(self._slabs_of(0, num_layers))
        self.filling: set[str] = set()
        self.kv: dict[tuple[int, int], Content] = {}
        self._slab_units = slab_units
        self._units = num_layers * (blocks + slab_units)
        self._arriving: set[int] = set()
        self._blocks_max: int | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks per layer of the stage."""
        return min(self.blocks[layer] for layer in self.layers)

    @property
    def departed_layers(self) -> list[int]:
        """Layers that left the stage and have KV."""
        kept = self._arriving.union(self.layers)
        return [layer for layer, blocks in self.blocks.items() if blocks and layer not in kept]

    def check_invariants(self) -> None:
        """Check that the contents fit, and that the stage can run."""
        require(self._free >= 0, "there is more than the memory holds")
        require(self.slabs >= set(self._slabs_of(self.layers.start, self.layers.stop)), "no slab")
        require(all(block < self.blocks[layer] for layer, block in self.kv), "KV without memory")

    # --- a stage

    def set_stage(self, first_layer: int, end_layer: int) -> StageSwitched:
        """Run these layers."""
        needed = set(self._slabs_of(first_layer, end_layer))
        require(needed <= self.slabs, f"the stage lacks {needed - self.slabs}")
        require(not self.filling, "a layer is being restored")
        least = min(self.blocks[layer] for layer in range(first_layer, end_layer))
        require(least >= self.num_blocks, "a layer of the new stage has too few blocks")
        self.slabs = needed
        self.layers = range(first_layer, end_layer)
        self._arriving.clear()
        self._blocks_max = None
        self._grow()
        return StageSwitched(self.num_blocks, bool(self.departed_layers))

    def release_departed(self, blocks: int) -> DepartedReleased:
        """Release the blocks of departed layers from block `blocks` on."""
        for layer in self.departed_layers:
            self._cut(layer, blocks)
        self._grow()
        return DepartedReleased(self.num_blocks, bool(self.departed_layers))

    # --- a restore

    def measure(self, first_layer: int, end_layer: int) -> RestoreMeasured:
        """The memory that a stage of these layers needs beside the current stage."""
        layers = {*self.layers, *range(first_layer, end_layer)}
        missing = [name for name in self._slabs_of(first_layer, end_layer) if not self._has(name)]
        returning = sorted(set(range(first_layer, end_layer)) - set(self.layers))
        blocks = self._units // len(layers) - self._slab_units
        return RestoreMeasured(blocks, tuple(missing), tuple(returning))

    def shrink(self, blocks: int, used: int) -> None:
        """Shrink to `blocks` blocks."""
        require(used <= blocks, "owned blocks would go")
        self._blocks_max = blocks
        for layer in self.layers:
            self._cut(layer, blocks)

    def map_slab(self, name: str) -> None:
        """Map memory for a slab."""
        if not self._has(name) and name not in self.filling:
            self.filling.add(name)
            require(self._free >= 0, f"no memory for {name}")

    def finish_slab(self, name: str) -> None:
        """Mark a slab as loaded."""
        self.filling.remove(name)
        self.slabs.add(name)

    def map_kv(self, layers: Iterable[int]) -> KvMapped:
        """Map as many blocks for restored layers as the stage has."""
        require(not set(layers) & set(self.departed_layers), "old KV of a layer is still here")
        blocks = self.num_blocks
        for layer in layers:
            self.blocks[layer] = blocks
            self._arriving.add(layer)
        require(self._free >= 0, "no memory for the KV of returning layers")
        return KvMapped()

    def undo(self) -> RestoreUndone:
        """Undo a restore."""
        self.slabs &= set(self._slabs_of(self.layers.start, self.layers.stop))
        self.filling.clear()
        for layer in self._arriving:
            self._cut(layer, 0)
        self._arriving.clear()
        self._blocks_max = None
        self._grow()
        return RestoreUndone(self.num_blocks)

    def relocate(self, moves: Iterable[BlockMove]) -> None:
        """Copy blocks to lower ids, in every layer."""
        for move in moves:
            for layer in (*self.layers, *self.departed_layers):
                if move.source < self.blocks[layer] and (layer, move.source) in self.kv:
                    self.kv[layer, move.target] = self.kv.pop((layer, move.source))

    # --- KV

    def read(self, layer: int, block_ids: Sequence[int], name: str, count: int) -> tuple[int, ...]:
        """The KV of a sequence's first `count` positions in this layer."""
        tokens_read: list[int] = []
        for block in block_ids[: -(-count // BLOCK_SIZE)]:
            owner, tokens = self.kv.get((layer, block), ("", ()))
            require(owner == name, f"block {block} of layer {layer} has KV of {owner}, not {name}")
            tokens_read += tokens
        return tuple(tokens_read[:count])

    def write(
        self, layer: int, block_ids: Sequence[int], name: str, start: int, tokens: Sequence[int]
    ) -> None:
        """Store the KV of positions `start` onwards."""
        for position, token in enumerate(tokens, start):
            block = block_ids[position // BLOCK_SIZE]
            require(block < self.blocks[layer], f"layer {layer} has no block {block}")
            offset = position % BLOCK_SIZE
            before = self.kv[layer, block][1][:offset] if offset else ()
            self.kv[layer, block] = (name, (*before, token))

    def pack(self, layer: int, block: int) -> Content:
        """The content of a block to send."""
        require((layer, block) in self.kv, f"block {block} of layer {layer} is sent, and not here")
        return self.kv[layer, block]

    def unpack(self, layer: int, block: int, content: Content) -> None:
        """Store a received block."""
        require(block < self.blocks[layer], f"layer {layer} has no block {block}")
        self.kv[layer, block] = content

    # ---

    @property
    def _free(self) -> int:
        layers = [
            name for name in (*self.slabs, *self.filling) if name.startswith(layer_name(0)[:-1])
        ]
        return self._units - sum(self.blocks.values()) - len(layers) * self._slab_units

    def _has(self, slab: str) -> bool:
        return slab in self.slabs

    def _slabs_of(self, first_layer: int, end_layer: int) -> list[str]:
        return stage_slabs(
            first_layer, end_layer, num_layers=self.num_layers, tied_embeddings=False
        )

    def _cut(self, layer: int, blocks: int) -> None:
        if self.blocks[layer] > blocks:
            self.blocks[layer] = blocks
            self.kv = {k: v for k, v in self.kv.items() if k[0] != layer or k[1] < blocks}

    def _grow(self) -> None:
        for _ in range(self._free):
            lowest = min(self.layers, key=lambda layer: self.blocks[layer])
            if self._blocks_max is not None and self.blocks[lowest] >= self._blocks_max:
                return
            self.blocks[lowest] += 1
