"""The memory of a simulated worker: parameters and KV of the layers that it runs, in bytes.

It counts what the arena of a real worker does with chunks, without granularity. A dropped layer's
parameters become KV at once; KV of departed layers does so as their requests move away.
"""

from collections.abc import Collection

from services.core.groups.layer_map import ModelShape
from services.core.groups.slab_names import EMBEDDING, HEAD, stage_slabs


class MemoryModel:
    """`blocks` of `block_bytes` is what every layer of the stage has."""

    def __init__(self, shape: ModelShape, arena_bytes: int, block_size: int) -> None:
        self.shape = shape
        self.layers = range(shape.num_layers)
        self.departed_layers = 0
        self.departed_blocks = 0
        self._arena_bytes = arena_bytes
        self.block_bytes = block_size * shape.kv_bytes
        self.blocks = self._room(self.layers)

    def switch(self, layers: range) -> None:
        """Run these layers; KV of those that leave stays until `release_departed`."""
        self.departed_layers = len(set(self.layers) - set(layers))
        self.departed_blocks = self.blocks if self.departed_layers else 0
        self.layers = layers
        self.blocks = self._room(layers)

    def release_departed(self, blocks_needed: int) -> None:
        """Take departed layers' KV from block id `blocks_needed` on."""
        self.departed_blocks = min(self.departed_blocks, blocks_needed)
        if not self.departed_blocks:
            self.departed_layers = 0
        self.blocks = max(self.blocks, self._room(self.layers))

    def blocks_beside(self, layers: range) -> int:
        """Blocks that remain if parameters and KV of these layers join the present stage's."""
        return self._room({*self.layers, *layers})

    def shrink(self, blocks: int) -> None:
        """Keep no more blocks while a restore needs the rest."""
        self.blocks = min(self.blocks, blocks)

    def abandon_restore(self) -> None:
        """Take what a restore was to have for KV again."""
        self.blocks = self._room(self.layers)

    def slabs_of(self, layers: range) -> list[str]:
        """The slabs that a stage of these layers needs."""
        shape = self.shape
        return stage_slabs(
            layers.start,
            layers.stop,
            num_layers=shape.num_layers,
            tied_embeddings=shape.tied_embeddings,
        )

    def slab_bytes(self, slab: str) -> int:
        """Size of a slab."""
        shape = self.shape
        return {EMBEDDING: shape.embedding_bytes, HEAD: shape.head_bytes}.get(
            slab, shape.layer_bytes
        )

    def parameter_bytes(self, layers: Collection[int]) -> int:
        """Parameters of a stage of these layers."""
        shape = self.shape
        kept = shape.kept_bytes(0 in layers, shape.num_layers - 1 in layers)
        return kept + len(layers) * shape.layer_bytes

    def check_invariants(self) -> None:
        """Parameters and KV fit into the arena."""
        kv = (len(self.layers) * self.blocks) + self.departed_layers * self.departed_blocks
        used_bytes = self.parameter_bytes(self.layers) + kv * self.block_bytes
        assert used_bytes <= self._arena_bytes, "more is mapped than there is"
        assert self.blocks > 0, "the stage has no KV"

    def _room(self, layers: Collection[int]) -> int:
        departed_bytes = self.departed_layers * self.departed_blocks * self.block_bytes
        left_bytes = self._arena_bytes - self.parameter_bytes(layers) - departed_bytes
        return left_bytes // (len(layers) * self.block_bytes)
