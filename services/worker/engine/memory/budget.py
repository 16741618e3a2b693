"""Divides the memory budget of a worker into parameters, KV cache and staging.

The arena (parameters and KV cache) is divided into chunks, the granularity of memory mappings. A
slab is the memory with the parameters of a layer, of the embeddings or of the head. Staging is all
memory outside the arena: scratch, activations and logits.
"""

from dataclasses import dataclass
from typing import NamedTuple

from services.core.request import blocks_for
from services.worker.errors import BudgetTooSmall

MIB = 1 << 20
MIN_CHUNK_BYTES = 64 << 10
MAX_CHUNK_BYTES = 2 * MIB


class ChunkRule(NamedTuple):
    """Bounds of the chunk size in bytes, and the granularity of KV growth.

    The KV cache grows in every layer at once, by at least a chunk each. That step should be at most
    1 / `growth_share` of the KV memory.
    """

    least: int
    most: int
    growth_share: int


CPU_CHUNKS = ChunkRule(MIN_CHUNK_BYTES, MAX_CHUNK_BYTES, 100)
GPU_CHUNKS = ChunkRule(2 * MIB, 32 * MIB, 25)
"""A GPU driver has a minimum chunk size, and its calls take equally long for chunks of any size."""


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """The memory that a model needs.

    `slab_bytes`: size of each slab (embedding, every layer, head). `kv_block_bytes`: K and V of a
    block in a layer.
    """

    slab_bytes: tuple[int, ...]
    num_layers: int
    kv_block_bytes: int
    block_size: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A divided budget. The arena has `total_chunks` chunks of `chunk_bytes`."""

    chunk_bytes: int
    total_chunks: int
    parameter_chunks: int
    kv_chunks_per_layer: int
    num_blocks: int
    staging_bytes: int

    @property
    def arena_bytes(self) -> int:
        """Device memory that the arena owns."""
        return self.total_chunks * self.chunk_bytes


def plan_memory(
    budget_bytes: int,
    demand: MemoryDemand,
    *,
    min_tokens: int,
    chunk_bytes: int | None = None,
    rule: ChunkRule = CPU_CHUNKS,
) -> MemoryPlan:
    """Divide `budget_bytes`: the KV cache of the layers shares what parameters and staging leave.

    `chunk_bytes` None: choose the size by `rule`. Raises BudgetTooSmall, with the minimum budget,
    if the KV cache would hold fewer than `min_tokens` tokens.
    """
    if chunk_bytes is None:
        kv_bytes = budget_bytes - demand.staging_bytes - sum(demand.slab_bytes)
        chunk_bytes = choose_chunk_bytes(kv_bytes, demand.num_layers, rule)
    # A slab occupies whole chunks, so that dropping it frees them.
    parameter_chunks = sum(-(-size // chunk_bytes) for size in demand.slab_bytes)
    min_kv_bytes = blocks_for(min_tokens, demand.block_size) * demand.kv_block_bytes
    min_kv_chunks = -(-min_kv_bytes // chunk_bytes)
    total_chunks = max(0, budget_bytes - demand.staging_bytes) // chunk_bytes
    # A block needs memory in every layer, so all layers get the same number of chunks.
    kv_chunks_per_layer = (total_chunks - parameter_chunks) // demand.num_layers
    if kv_chunks_per_layer < max(1, min_kv_chunks):
        min_chunks = parameter_chunks + demand.num_layers * max(1, min_kv_chunks)
        raise BudgetTooSmall(
            needed_bytes=demand.staging_bytes + min_chunks * chunk_bytes,
            budget_bytes=budget_bytes,
            parameter_bytes=parameter_chunks * chunk_bytes,
            staging_bytes=demand.staging_bytes,
        )
    return MemoryPlan(
        chunk_bytes=chunk_bytes,
        total_chunks=total_chunks,
        parameter_chunks=parameter_chunks,
        kv_chunks_per_layer=kv_chunks_per_layer,
        num_blocks=kv_chunks_per_layer * chunk_bytes // demand.kv_block_bytes,
        staging_bytes=demand.staging_bytes,
    )


def choose_chunk_bytes(kv_bytes: int, num_layers: int, rule: ChunkRule = CPU_CHUNKS) -> int:
    """Halve the rule's maximum chunk size until the growth step is small enough."""
    # Large chunks need fewer mapping calls; small chunks leave less memory unused.
    chunk_bytes = rule.most
    while chunk_bytes > rule.least and (num_layers * chunk_bytes * rule.growth_share > kv_bytes):
        chunk_bytes //= 2
    return chunk_bytes
