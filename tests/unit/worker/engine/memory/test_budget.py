import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.core.request import blocks_for
from services.worker.engine.memory.budget import (
    CPU_CHUNKS,
    GPU_CHUNKS,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    ChunkRule,
    MemoryDemand,
    choose_chunk_bytes,
    plan_memory,
)
from services.worker.errors import BudgetTooSmall

MIB = 1 << 20

demands = st.builds(
    MemoryDemand,
    slab_bytes=st.lists(st.integers(1, 40 * MIB), min_size=3, max_size=40).map(tuple),
    num_layers=st.integers(1, 80),
    kv_block_bytes=st.integers(1, 4 * MIB),
    block_size=st.sampled_from([1, 8, 16, 128]),
    staging_bytes=st.integers(0, 200 * MIB),
)
chunk_sizes = st.sampled_from([None, 4096, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES])


@given(demands, st.integers(0, 1 << 34), chunk_sizes, st.integers(1, 2000))
def test_a_plan_fits_the_budget(
    demand: MemoryDemand, budget_bytes: int, chunk_bytes: int | None, min_tokens: int
) -> None:
    try:
        plan = plan_memory(budget_bytes, demand, min_tokens=min_tokens, chunk_bytes=chunk_bytes)
    except BudgetTooSmall as error:
        assert error.needed_bytes > budget_bytes
        return
    assert plan.arena_bytes + plan.staging_bytes <= budget_bytes
    kv_chunks = demand.num_layers * plan.kv_chunks_per_layer
    assert 0 <= plan.total_chunks - plan.parameter_chunks - kv_chunks < demand.num_layers
    assert plan.parameter_chunks * plan.chunk_bytes >= sum(demand.slab_bytes)
    assert plan.num_blocks >= blocks_for(min_tokens, demand.block_size)
    assert plan.num_blocks * demand.kv_block_bytes <= plan.kv_chunks_per_layer * plan.chunk_bytes


@given(demands, chunk_sizes, st.integers(1, 2000))
def test_the_named_minimum_is_enough(
    demand: MemoryDemand, chunk_bytes: int | None, min_tokens: int
) -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        plan_memory(0, demand, min_tokens=min_tokens, chunk_bytes=chunk_bytes)
    needed_bytes = caught.value.needed_bytes
    plan = plan_memory(
        needed_bytes,
        demand,
        min_tokens=min_tokens,
        chunk_bytes=MIN_CHUNK_BYTES if chunk_bytes is None else chunk_bytes,
    )
    assert plan.num_blocks >= blocks_for(min_tokens, demand.block_size)
    assume(chunk_bytes is not None)
    with pytest.raises(BudgetTooSmall):
        plan_memory(needed_bytes - 1, demand, min_tokens=min_tokens, chunk_bytes=chunk_bytes)


@given(st.integers(0, 1 << 42), st.integers(1, 200), st.sampled_from([CPU_CHUNKS, GPU_CHUNKS]))
def test_growing_is_a_small_step(kv_bytes: int, num_layers: int, rule: ChunkRule) -> None:
    chunk_bytes = choose_chunk_bytes(kv_bytes, num_layers, rule)
    assert chunk_bytes.bit_count() == 1
    assert rule.least <= chunk_bytes <= rule.most
    if chunk_bytes > rule.least:
        assert num_layers * chunk_bytes * rule.growth_share <= kv_bytes
    if chunk_bytes < rule.most:
        assert num_layers * 2 * chunk_bytes * rule.growth_share > kv_bytes


def test_the_error_names_the_required_memory() -> None:
    demand = MemoryDemand((10 * MIB,) * 4, 2, 16384, 16, 5 * MIB)
    with pytest.raises(BudgetTooSmall, match="raise it to at least 46 MiB") as caught:
        plan_memory(20 * MIB, demand, min_tokens=64)
    assert caught.value.parameter_bytes == 40 * MIB
