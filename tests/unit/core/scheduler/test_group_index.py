"""The index picks the group that a linear scan would pick."""

import random

import pytest

from services.core.scheduler.dispatch import (
    could_hold,
    has_room,
    kv_share,
    serves,
    start_blocks,
)
from services.core.scheduler.group_index import DIRECT_MAX, GroupIndex
from services.core.scheduler.group_load import GroupLoad
from services.core.scheduler.vocabulary import LoadReported, ServingGroup
from tests.support.reports import load_reported


def best_of_all(
    loads: list[GroupLoad], prompt_tokens: int, max_tokens: int, now_s: float
) -> GroupLoad | None:
    """The rule: filter, steady workers first, score, least; ties go to the smallest name."""
    candidates = [
        load
        for load in loads
        if serves(load, now_s)
        and could_hold(load, prompt_tokens, max_tokens)
        and has_room(load, prompt_tokens, max_tokens, start_blocks)
    ]
    return min(
        candidates,
        key=lambda load: (load.flaps, kv_share(load), load.group.group_id),
        default=None,
    )


def make_load(rng: random.Random, number: int) -> GroupLoad:
    return GroupLoad(
        ServingGroup(
            f"g{number:03d}",
            1,
            f"w{number}",
            "i",
            "address",
            "m",
            rng.choice([20, 40]),
            rng.choice([8, 16]),
            rng.choice([150, 400]),
        )
    )


def report(rng: random.Random, now_s: float, number: int, step: int) -> LoadReported:
    free, wanted = rng.randrange(45), rng.choice([0, 0, 0, 30])
    running, most = rng.randrange(4), rng.choice([0, 0, 2, 5])
    return load_reported(
        now_s, f"w{number}", step, running=running, free=free, wanted=wanted, most=most
    )


@pytest.mark.parametrize("groups", [1, 5, DIRECT_MAX // 2, 3 * DIRECT_MAX])
@pytest.mark.parametrize("seed", range(8))
def test_the_index_equals_a_linear_scan(seed: int, groups: int) -> None:
    rng, now_s = random.Random(seed), 10.0
    index = GroupIndex(kv_share)
    for number in range(groups):
        index.add(make_load(rng, number))
    picked = 0
    for step in range(400):
        now_s += rng.choice([0.0, 0.01, 0.3])
        number = rng.randrange(groups)
        load = index.loads.get(f"g{number:03d}")
        if load is None:
            index.add(make_load(rng, number))
        elif rng.random() < 0.02:
            index.remove(load.group.group_id)
        else:
            load.note_report(report(rng, now_s, number, step))
            load.flaps = rng.random() < 0.2
            index.touch(load)
        index.remove_expired(now_s)
        prompt_tokens, max_tokens = rng.randrange(1, 300), rng.randrange(1, 150)
        from_index = index.pick(prompt_tokens, max_tokens, now_s)
        assert from_index is best_of_all(
            list(index.loads.values()), prompt_tokens, max_tokens, now_s
        )
        if from_index is not None:
            picked += 1
            index.reserve(from_index, f"r{step}", rng.randrange(1, 10), now_s)
        index.check_invariants()
    assert picked > 20


def test_reservations_lapse_in_the_index_too() -> None:
    rng = random.Random(0)
    index = GroupIndex(kv_share)
    load = GroupLoad(ServingGroup("g", 1, "w0", "i", "address", "m", 10, 16, 1000))
    index.add(load)
    for step, now_s in enumerate((0.0, 3.0, 6.0), 1):
        load.note_report(load_reported(now_s, "w0", step, free=10))
        index.touch(load)
        index.remove_expired(now_s)
        picked = index.pick(16 * 8, 1, now_s)
        if now_s == 3.0:
            assert picked is None, "the blocks are still reserved"
        else:
            assert picked is load
            index.reserve(load, f"r{rng.random()}", 9, now_s)
    assert index.tokens_max == 160
    index.remove("g")
    assert index.tokens_max is None and index.pick(1, 1, 6.0) is None
