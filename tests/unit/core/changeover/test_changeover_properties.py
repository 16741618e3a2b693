"""Random events during changes of groups: requests get the tokens of an undisturbed run."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.changeover_world import World

STEPS = 50
RUNS = 150
CACHED_RUNS = 100
CLASS_RUNS = 60
PARTIAL_RUNS, DIVIDING_STEPS = 40, 100
HOLDER_RUNS = 100
MANY_RUNS = 5_000
MANY_HOLDER_RUNS = 2_000
MANY_CLASS_RUNS = 2_000
MANY_PARTIAL_RUNS = 1_000
OPERATIONS = ("start", "start", "prepare", "commit", "commit", "turns", "turns", "abort", "abandon")
FAULTS = ("lose", "jump")
ONCE_WRONG = (96, 408, 1433, 1670, 2656, 4426)
"""Runs that found a defect of the machine or of the planner."""
ONCE_WRONG_PARTIAL = (51,)
LONG_STEPS, ONCE_WRONG_CACHED = 80, (10876,)
"""The same of longer runs with prefixes in the cache."""


def explore(
    seed: int,
    prefixes: bool = False,
    steps: int = STEPS,
    classes: bool = False,
    holders: bool = False,
    **options: Any,
) -> World:
    """A random run."""
    world = World(seed, prefixes=prefixes, classes=classes, holders=holders, **options)
    for _ in range(steps):
        world.step()
    world.settle()
    return world


def test_random_changes_preserve_tokens_and_free_blocks() -> None:
    worlds = [explore(seed) for seed in (*range(RUNS), *ONCE_WRONG)]
    assert sum(world.committed for world in worlds) > RUNS
    assert sum(world.clients.asked_again for world in worlds) > 0
    assert sum(world.clients.returned for world in worlds) > 0
    preemptions = [m.planner.preemptions_total for w in worlds for m in w.members.values()]
    assert sum(preemptions) > RUNS


def test_random_changes_with_cached_prefixes() -> None:
    """KV that is read belongs to the same tokens of the same tenant."""
    worlds = [explore(seed, prefixes=True) for seed in range(CACHED_RUNS)]
    assert sum(world.committed for world in worlds) > CACHED_RUNS
    loads = [member.planner.load() for world in worlds for member in world.members.values()]
    assert sum(load.preemptions_total for load in loads) > CACHED_RUNS
    assert sum(load.prefix_hits_total for load in loads) > CACHED_RUNS
    for seed in ONCE_WRONG_CACHED:
        explore(seed, True, LONG_STEPS, losses=0)


def test_random_changes_with_parked_batch_work() -> None:
    worlds = [explore(seed, seed % 2 == 1, classes=True) for seed in range(CLASS_RUNS)]
    assert sum(world.committed for world in worlds) > CLASS_RUNS
    loads = [member.planner.load() for world in worlds for member in world.members.values()]
    assert sum(load.preemptions_total for load in loads) > CLASS_RUNS


def explore_partial(seed: int) -> World:
    """Four workers; every second group that can splits into smaller groups."""
    cached, classes = seed % 2 == 1, seed % 3 == 0
    return explore(seed, cached, DIVIDING_STEPS, classes, workers=4, losses=seed % 2, divides=True)


def test_random_changes_with_partial_splits() -> None:
    worlds = [explore_partial(seed) for seed in (*range(PARTIAL_RUNS), *ONCE_WRONG_PARTIAL)]
    assert sum(world.divided for world in worlds) > PARTIAL_RUNS / 4
    assert sum(world.committed for world in worlds) > PARTIAL_RUNS
    assert sum(4 - len(world.members) for world in worlds) >= PARTIAL_RUNS / 4, "workers are lost"


@pytest.mark.slow
def test_many_random_changes_with_partial_splits() -> None:
    for seed in range(PARTIAL_RUNS, MANY_PARTIAL_RUNS):
        explore_partial(seed)


def test_kv_of_a_request_that_was_released_is_not_sent() -> None:
    """Regression seeds: a leader had preempted a request whose KV was in flight."""
    explore(1001389, True, 80)
    explore(9000471, False, 100)


def test_random_changes_with_slabs_of_other_groups() -> None:
    """Holders die, change, or have other weights, and each slab is still restored."""
    worlds = [explore(seed, holders=True, workers=4, losses=2) for seed in range(HOLDER_RUNS)]
    assert sum(world.committed for world in worlds) > HOLDER_RUNS
    survivors = [member for world in worlds for member in world.members.values()]
    assert sum(member.restored["peer"] for member in survivors) > HOLDER_RUNS
    assert sum(member.restored["disk"] for member in survivors) > 0


@pytest.mark.slow
def test_many_random_changes_with_slabs_of_other_groups() -> None:
    for seed in range(HOLDER_RUNS, MANY_HOLDER_RUNS):
        explore(seed, holders=True, workers=3 + seed % 2, losses=2)


@pytest.mark.slow
def test_many_random_changes() -> None:
    for seed in range(RUNS, MANY_RUNS):
        explore(seed, prefixes=seed % 2 == 1)


@pytest.mark.slow
def test_many_random_changes_with_parked_batch_work() -> None:
    for seed in range(CLASS_RUNS, MANY_CLASS_RUNS):
        explore(seed, prefixes=seed % 2 == 1, classes=True)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    workers=st.integers(2, 4),
    operations=st.lists(
        st.tuples(st.sampled_from((*OPERATIONS, *FAULTS)), st.integers(0, 255)), max_size=STEPS
    ),
)
def test_any_order_of_operations_settles(workers: int, operations: list[tuple[str, int]]) -> None:
    """The same with events drawn one at a time, so that a failure shrinks."""
    world = World(workers, workers, losses=2)
    for name, chance in operations:
        world.rng.seed(chance)
        getattr(world, name)()
    world.settle()
