"""The memory of a simulated worker: parameters and KV of its layers, in bytes.

Models the arena of a real worker without its chunk granularity. Memory of a dropped layer's
parameters becomes KV cache at once, memory of departed layers' KV as their requests move away.
"""

from collections.abc import Collection

from services.core.groups.layer_map import ModelShape
from services.core.groups.slab_names import EMBEDDING, HEAD, stage_slabs


class MemoryModel:
    """Memory of a stage; each of its layers has `blocks` KV blocks of `block_bytes`."""

    def __init__(self, shape: ModelShape, arena_bytes: int, block_size: int) -> None:
        self.shape = shape
        self.layers = range(shape.num_layers)
        self.departed_layers = 0
        self.departed_blocks = 0
        self._arena_bytes = arena_bytes
        self.block_bytes = block_size * shape.kv_bytes
        self.blocks = self._room(self.layers)

    def switch(self, layers: range) -> None:
        """Switch to these layers; KV of departed layers stays until `release_departed`."""
        # Requests still use the departed layers' KV until it is exchanged.
        self.departed_layers = len(set(self.layers) - set(layers))
        self.departed_blocks = self.blocks if self.departed_layers else 0
        self.layers = layers
        self.blocks = self._room(layers)

    def release_departed(self, blocks_needed: int) -> None:
        """Release the departed layers' KV from block id `blocks_needed` on."""
        self.departed_blocks = min(self.departed_blocks, blocks_needed)
        if not self.departed_blocks:
            self.departed_layers = 0
        self.blocks = max(self.blocks, self._room(self.layers))

    def blocks_after_adding(self, layers: range) -> int:
        """Return the blocks per layer if these layers join the current stage."""
        return self._room({*self.layers, *layers})

    def shrink(self, blocks: int) -> None:
        """Limit the KV cache to `blocks`; a restore takes the rest."""
        self.blocks = min(self.blocks, blocks)

    def abandon_restore(self) -> None:
        """Give the memory of an abandoned restore back to the KV cache."""
        self.blocks = self._room(self.layers)

    def slabs_of(self, layers: range) -> list[str]:
        """Return the names of the slabs of a stage with these layers."""
        shape = self.shape
        return stage_slabs(
            layers.start,
            layers.stop,
            num_layers=shape.num_layers,
            tied_embeddings=shape.tied_embeddings,
        )

    def slab_bytes(self, slab: str) -> int:
        """Return the size of a slab."""
        shape = self.shape
        return {EMBEDDING: shape.embedding_bytes, HEAD: shape.head_bytes}.get(
            slab, shape.layer_bytes
        )

    def parameter_bytes(self, layers: Collection[int]) -> int:
        """Return the size of the parameters of a stage with these layers."""
        shape = self.shape
        kept = shape.kept_bytes(0 in layers, shape.num_layers - 1 in layers)
        return kept + len(layers) * shape.layer_bytes

    def check_invariants(self) -> None:
        """Check that parameters and KV fit into the arena."""
        kv = (len(self.layers) * self.blocks) + self.departed_layers * self.departed_blocks
        used_bytes = self.parameter_bytes(self.layers) + kv * self.block_bytes
        assert used_bytes <= self._arena_bytes, "parameters and KV exceed the arena"
        assert self.blocks > 0, "the stage has no KV"

    def _room(self, layers: Collection[int]) -> int:
        departed_bytes = self.departed_layers * self.departed_blocks * self.block_bytes
        left_bytes = self._arena_bytes - self.parameter_bytes(layers) - departed_bytes
        return left_bytes // (len(layers) * self.block_bytes)
