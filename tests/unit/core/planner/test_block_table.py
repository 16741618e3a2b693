"""Block tables of a stage: effects of a microbatch, adoption, moves to low ids."""

import random

import pytest

from services.core.planner.block_pool import BlockPool
from services.core.planner.block_table import BlockMove, StageTable


def test_a_microbatch_releases_before_it_allocates() -> None:
    table = StageTable(BlockPool(4))
    table.apply((), [("a", 3)])
    table.apply(("a", "unknown"), [("b", 4)])
    assert table.block_ids("a") == () and table.block_ids("b") == (0, 1, 2, 3)
    table.apply(("b",), [("b", 2)])
    assert table.block_ids("b") == (0, 1), "it runs again from the beginning"
    table.check_invariants()


def test_adoption_allocates_the_counted_blocks() -> None:
    table = StageTable(BlockPool(4))
    assert table.adopt("a", 2) == (0, 1)
    assert table.adopt("a", 2) == table.adopt("a", 1) == (0, 1)
    assert table.adopt("a", 3) == (0, 1, 2)
    with pytest.raises(IndexError):
        table.adopt("b", 2)
    assert "b" not in table and len(table) == 1
    table.append("b")
    assert table.highest_block(["a"]) == 2 and table.highest_block(["b", "c"]) == 3
    assert table.highest_block(["c"]) == -1
    table.check_invariants()


def test_moves_go_below_the_limit_highest_first() -> None:
    table = StageTable(BlockPool(10))
    for name in "abcde":
        table.adopt(name, 2)
    table.release("a")
    table.release("d")
    table.pool.limit(6)
    assert table.relocate(6, most=1) == [BlockMove("e", 9, 0)]
    assert table.relocate(6) == [BlockMove("e", 8, 1)]
    assert table.block_ids("e") == (1, 0)
    assert table.relocate(6) == []
    table.check_invariants()
    table.pool.shrink(6)
    assert table.pool.free_count == 0 and table.pool.num_blocks == 6


@pytest.mark.parametrize("seed", range(10))
def test_random_use_with_moves_and_limits(seed: int) -> None:
    """Each block holds its owner's data, wherever it was moved."""
    rng, table = random.Random(seed), StageTable(BlockPool(30))
    content: dict[int, tuple[str, int]] = {}
    for number in range(300):
        if table.pool.free_count >= 4 and rng.random() < 0.4:
            table.apply((), [(f"r{number}", rng.randint(1, 4))])
            for place, block in enumerate(table.block_ids(f"r{number}")):
                content[block] = (f"r{number}", place)
        elif table.seq_ids and rng.random() < 0.4:
            table.release(rng.choice(table.seq_ids))
        limit = rng.randint(5, table.pool.num_blocks)
        if rng.random() < 0.3:
            table.pool.limit(limit)
        for _, source, target in table.relocate(limit, rng.choice([0, 2, None])):
            assert source >= limit > target
            content[target] = content[source]
        if rng.random() < 0.2:
            table.pool.shrink(max(table.highest_block(table.seq_ids) + 1, 10))
            table.pool.grow(table.pool.num_blocks + rng.randint(0, 6))
        table.check_invariants()
        for name in table.seq_ids:
            for place, block in enumerate(table.block_ids(name)):
                assert content[block] == (name, place)
