"""The division of layers is optimal, compared with brute force."""

from itertools import combinations, pairwise
from random import Random

import pytest

from services.core.groups.layer_map import (
    MemberMemory,
    ModelShape,
    SplitError,
    capacity_tokens,
    split_layers,
)

SMOL = ModelShape(
    num_layers=30,
    layer_bytes=7_000_000,
    embedding_bytes=56_000_000,
    head_bytes=100_000,
    tied_embeddings=True,
    kv_bytes=768,
    layer_cost=7.0,
    head_cost=56.0,
)


def rooms_of(*sizes: int) -> list[MemberMemory]:
    return [MemberMemory(f"w{index}", size) for index, size in enumerate(sizes)]


def times(model: ModelShape, counts: tuple[int, ...]) -> list[float]:
    costs = [count * model.layer_cost for count in counts]
    costs[0] += model.embedding_cost
    costs[-1] += model.head_cost
    return costs


def best_score(
    model: ModelShape, rooms: list[MemberMemory], needed: int
) -> tuple[int, float, int] | None:
    """(tokens up to the demand, -time, tokens) of the best division, None if none fits."""
    best = None
    for cuts in combinations(range(1, model.num_layers), len(rooms) - 1):
        edges = (0, *cuts, model.num_layers)
        counts = tuple(end - first for first, end in pairwise(edges))
        left = []
        for index, (room, count) in enumerate(zip(rooms, counts, strict=True)):
            kept = model.kept_bytes(index == 0, index == len(rooms) - 1)
            left.append((room.arena_bytes - kept - count * model.layer_bytes, count))
        if min(size for size, _ in left) < 0:
            continue
        tokens = min(size // (count * model.kv_bytes) for size, count in left)
        score = (min(tokens, needed), -max(times(model, counts)), tokens)
        best = score if best is None else max(best, score)
    return best


def test_the_division_equals_brute_force() -> None:
    rng = Random(4)
    split = 0
    for _ in range(600):
        layers = rng.randrange(1, 10)
        model = ModelShape(
            num_layers=layers,
            layer_bytes=rng.randrange(1, 40),
            embedding_bytes=rng.randrange(0, 60),
            head_bytes=rng.randrange(0, 60),
            tied_embeddings=rng.random() < 0.5,
            kv_bytes=rng.randrange(1, 4),
            layer_cost=rng.choice([1.0, 0.1, 3.0]),
            embedding_cost=rng.choice([0.0, 0.3]),
            head_cost=rng.choice([0.0, 2.5, 7.0]),
        )
        rooms = rooms_of(*(rng.randrange(20, 400) for _ in range(rng.randrange(1, layers + 1))))
        needed = rng.choice([0, 5, 20, 10**6])
        best = best_score(model, rooms, needed)
        if best is None:
            with pytest.raises(SplitError, match="do not fit"):
                split_layers(model, rooms, needed)
            continue
        stages = split_layers(model, rooms, needed)
        split += 1
        assert [stage.worker_id for stage in stages] == [room.worker_id for room in rooms]
        edges = [0, *(stage.end_layer for stage in stages)]
        assert [stage.first_layer for stage in stages] == edges[:-1]
        assert edges[-1] == layers and all(stage.num_layers >= 1 for stage in stages)
        tokens = min(capacity_tokens(model, rooms, stages))
        slowest = max(times(model, tuple(stage.num_layers for stage in stages)))
        assert (min(tokens, needed), -slowest, tokens) == pytest.approx(best)
    assert split > 300


def test_time_is_minimised_once_the_demand_is_met() -> None:
    """The tied head of SmolLM2 takes as long as eight layers, and its bytes stay at both ends."""
    rooms = rooms_of(1 << 30, 1 << 30)
    by_time = split_layers(SMOL, rooms, needed_tokens=10_000)
    assert [stage.num_layers for stage in by_time] == [19, 11]
    by_memory = split_layers(SMOL, rooms, needed_tokens=10**9)
    assert [stage.num_layers for stage in by_memory] == [15, 15]


def test_a_single_worker_has_all_layers() -> None:
    (stage,) = split_layers(SMOL, rooms_of(1 << 30), 0)
    assert (stage.first_layer, stage.end_layer) == (0, 30)


def test_stages_may_equal_layers_in_number() -> None:
    stages = split_layers(SMOL, rooms_of(*[1 << 30] * 30), 10**9)
    assert [stage.num_layers for stage in stages] == [1] * 30


def test_bytes_that_a_merge_frees() -> None:
    layers, embedding, head = 30 * 7_000_000, 56_000_000, 100_000
    assert SMOL.freed_bytes(1, 1) == layers + head
    assert SMOL.freed_bytes(2, 1) == layers + head + embedding
    assert SMOL.freed_bytes(2, 2) == layers + head + 2 * embedding
    for left, right in ((1, 1), (2, 1), (2, 2)):
        apart = SMOL.parameter_bytes(left) + SMOL.parameter_bytes(right)
        assert apart - SMOL.freed_bytes(left, right) == SMOL.parameter_bytes(left + right)


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_kept_bytes_of_stages_are_summed(stages: int, tied: bool) -> None:
    model = ModelShape(8, 10, 5, 3, tied, 1)
    kept = sum(model.kept_bytes(i == 0, i == stages - 1) for i in range(stages))
    assert kept + 8 * 10 == model.parameter_bytes(stages)


def test_more_members_than_layers_are_refused() -> None:
    with pytest.raises(SplitError, match="31 members cannot share 30 layers"):
        split_layers(SMOL, rooms_of(*[1 << 30] * 31), 0)


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(SplitError, match="no members"):
        split_layers(SMOL, [], 0)
