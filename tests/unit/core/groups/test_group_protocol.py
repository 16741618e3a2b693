"""The group protocol under lost, late and repeated messages, zombies, crashes and restarts.

Removing a rule must show: otherwise nothing here would have seen it.
"""

import pytest

from tests.support.group_store import Violated
from tests.support.group_world import World

STEPS = 600


def walk(seed: int, removed: frozenset[str] = frozenset(), losses: int = 0) -> World:
    world = World(seed, removed, losses_left=losses)
    for _ in range(STEPS):
        world.step()
    world.settle()
    return world


@pytest.mark.parametrize("first_seed", range(0, 160, 20))
def test_the_invariants_hold_and_all_groups_become_stable(first_seed: int) -> None:
    worlds = [walk(seed) for seed in range(first_seed, first_seed + 20)]
    assert sum(world.committed for world in worlds) > 8, "hardly anything was tried"
    assert sum(world.store.removed_workers for world in worlds) > 4, "no worker was gone for long"


@pytest.mark.parametrize("first_seed", range(0, 80, 20))
def test_invariants_hold_if_the_store_loses_writes(first_seed: int) -> None:
    """Restored from an old copy, or empty: no invariant is violated, and groups change again."""
    worlds = [walk(seed, losses=2) for seed in range(first_seed, first_seed + 20)]
    assert sum(world.store.rollbacks for world in worlds) > 20
    assert sum(world.committed for world in worlds) > 8, "hardly anything was tried"


@pytest.mark.parametrize("steps", [20, 80])
@pytest.mark.parametrize("empty", [False, True])
def test_invariants_hold_if_the_store_loses_writes_during_changes(empty: bool, steps: int) -> None:
    """Calls of the lost history still arrive; revisions stay far below those in them."""
    for seed in range(20, 60):
        world = World(seed)
        world.backup = None if empty else world.store.data()
        for _ in range(300):
            world.step()
        world.lose()
        for _ in range(steps):
            world.step()
        world.settle()


# The first seed is near one that shows it, so that the search is short. The leader's token is not
# among them: revisions and consent have the same effect, here as in thousands of other walks.
@pytest.mark.parametrize(
    ("removed", "first_seed"),
    [
        ("free_after_commit", 0),
        ("fetch_before_ack", 0),
        ("epoch", 0),
        ("incarnation", 0),
        ("cas", 0),
        ("attempt", 440),
        ("floor", 0),
        ("known", 0),
    ],
)
def test_every_rule_is_needed(removed: str, first_seed: int) -> None:
    with pytest.raises(Violated):
        for seed in range(first_seed, first_seed + 800):
            walk(seed, frozenset({removed}))


@pytest.mark.parametrize(
    ("removed", "first_seed"), [("layers", 870), ("rollback", 0), ("restored", 0)]
)
def test_every_rule_about_lost_writes_is_needed(removed: str, first_seed: int) -> None:
    with pytest.raises(Violated):
        for seed in range(first_seed, first_seed + 800):
            walk(seed, frozenset({removed}), losses=2)
