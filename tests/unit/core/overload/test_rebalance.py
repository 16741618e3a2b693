"""Requests that move between groups, without moving back and forth."""

from random import Random

import pytest

from services.core.overload.events import Cause, GroupUse, MemberUse
from services.core.overload.rebalance import (
    BACKOFF_S,
    GROWTH_TOKENS,
    MOVE_MAX_S,
    REST_S,
    STAY_S,
    Move,
    Rebalancer,
)

CAPACITY = 10_000
LAYOUT = "weights build 16"


def use(
    name: str,
    used: int,
    running: int = 10,
    waiting_tokens: int = 0,
    layout: str = LAYOUT,
    draining: bool = False,
    capacity: int = CAPACITY,
) -> GroupUse:
    member = MemberUse(f"worker-{name}", capacity, used, capacity)
    return GroupUse(
        name,
        "m",
        (member,),
        waiting=bool(waiting_tokens),
        waiting_tokens=waiting_tokens,
        draining=draining,
        running=running,
        kv_layout=layout,
    )


def moves(
    rebalancer: Rebalancer, groups: list[GroupUse], now_s: float, **how: object
) -> list[Move]:
    rebalancer.note_groups(groups, now_s)
    return rebalancer.choose(groups, now_s, **how)  # type: ignore[arg-type]


def test_a_full_group_hands_over_to_the_emptiest() -> None:
    groups = [use("a", 9900, waiting_tokens=800), use("b", 6000), use("c", 4000)]
    (move,) = moves(Rebalancer(), groups, 0.0)
    assert (move.source_id, move.target_id, move.cause) == ("a", "c", Cause.FULL)
    assert 700 <= move.tokens <= 6000


def test_a_nearly_full_group_moves_requests_before_it_preempts() -> None:
    growth = 10 * GROWTH_TOKENS
    groups = [use("a", CAPACITY - growth), use("b", 2000)]
    assert moves(Rebalancer(), groups, 0.0) == []
    groups[0] = use("a", CAPACITY - growth + 16)
    assert [move.cause for move in moves(Rebalancer(), groups, 0.0)] == [Cause.FULL]


@pytest.mark.parametrize(
    "other",
    [
        use("b", 9000),  # no room
        use("b", 2000, layout="other"),
        use("b", 2000, layout=""),
        use("b", 2000, draining=True),
    ],
)
def test_requests_move_only_to_groups_that_can_run_them(other: GroupUse) -> None:
    groups = [use("a", 9900, waiting_tokens=800), other]
    rebalancer = Rebalancer()
    assert moves(rebalancer, groups, 0.0) == []
    assert not rebalancer.may_help(groups, 5.0, 0.0)


def test_a_merged_group_moves_no_requests() -> None:
    groups = [use("a", 9900, waiting_tokens=800, layout=""), use("b", 2000)]
    assert moves(Rebalancer(), groups, 0.0) == []


def test_moves_are_sequential_with_a_pause() -> None:
    rebalancer = Rebalancer()
    groups = [use("a", 9900, waiting_tokens=800), use("b", 2000)]
    assert len(moves(rebalancer, groups, 0.0)) == 1
    assert moves(rebalancer, groups, 0.5) == []
    rebalancer.note_over("a", "b", 2, 0.6)
    assert moves(rebalancer, groups, 0.6 + REST_S / 2) == []
    assert len(moves(rebalancer, groups, 0.6 + REST_S)) == 1


def test_a_move_whose_end_is_not_reported_is_forgotten() -> None:
    rebalancer = Rebalancer()
    groups = [use("a", 9900, waiting_tokens=800), use("b", 2000)]
    assert len(moves(rebalancer, groups, 0.0)) == 1
    assert moves(rebalancer, groups, MOVE_MAX_S - 1) == []
    assert len(moves(rebalancer, groups, MOVE_MAX_S)) == 1


def test_received_requests_stay_for_a_while() -> None:
    rebalancer = Rebalancer()
    before = [use("a", 9900, waiting_tokens=800), use("b", 2000)]
    assert len(moves(rebalancer, before, 0.0)) == 1
    rebalancer.note_over("a", "b", 3, 0.5)
    after = [use("a", 2000), use("b", 9900)]
    assert moves(rebalancer, after, 0.5 + REST_S) == []
    assert len(moves(rebalancer, after, 0.5 + STAY_S)) == 1


def test_received_requests_do_not_stay_where_others_wait() -> None:
    rebalancer = Rebalancer()
    before = [use("a", 9900, waiting_tokens=800), use("b", 2000)]
    assert len(moves(rebalancer, before, 0.0)) == 1
    rebalancer.note_over("a", "b", 3, 0.5)
    after = [use("a", 2000), use("b", 9900, waiting_tokens=500)]
    (move,) = moves(rebalancer, after, 0.5 + REST_S)
    assert (move.source_id, move.target_id) == ("b", "a")


def test_a_failed_pair_backs_off_and_another_is_tried() -> None:
    rebalancer = Rebalancer()
    groups = [use("a", 9900, waiting_tokens=800), use("b", 2000), use("c", 3000)]
    assert [move.target_id for move in moves(rebalancer, groups, 0.0)] == ["b"]
    rebalancer.note_over("a", "b", 0, 0.1)
    assert [move.target_id for move in moves(rebalancer, groups, 0.1)] == ["c"]
    rebalancer.note_over("a", "c", 0, 0.2)
    assert moves(rebalancer, groups, 0.2) == []
    assert not rebalancer.may_help(groups, STAY_S, 0.2), "a merge need not wait"
    assert [move.target_id for move in moves(rebalancer, groups, 0.1 + BACKOFF_S)] == ["b"]


def test_a_move_that_was_not_tried_causes_no_back_off() -> None:
    """A memory manager makes decisions before its election, too."""
    rebalancer, groups = Rebalancer(), [use("a", 9900, waiting_tokens=800), use("b", 4000)]
    now_s = 0.0
    for _ in range(5):
        assert len(moves(rebalancer, groups, now_s)) == 1
        rebalancer.note_over("a", "b", None, now_s)
        assert rebalancer.may_help(groups, STAY_S * 10, now_s)
        now_s += REST_S


def test_moves_are_useful_until_they_fail_for_long() -> None:
    rebalancer = Rebalancer()
    groups = [use("a", 9900, waiting_tokens=800), use("b", 2000)]
    rebalancer.note_groups(groups, 0.0)
    assert rebalancer.may_help(groups, 5.0, 0.0)
    assert len(rebalancer.choose(groups, 0.0)) == 1
    rebalancer.note_groups(groups, 4.9)
    assert rebalancer.may_help(groups, 5.0, 4.9)
    rebalancer.note_groups(groups, 5.0)
    assert not rebalancer.may_help(groups, 5.0, 5.0)
    # It was not full in between: the time begins again.
    rebalancer.note_groups([use("a", 5000), groups[1]], 6.0)
    rebalancer.note_groups(groups, 7.0)
    assert rebalancer.may_help(groups, 5.0, 7.0)


def test_room_for_a_large_request_is_made_where_most_is_free() -> None:
    groups = [use("a", 6000), use("b", 5500), use("c", 6500)]
    assert moves(Rebalancer(), groups, 0.0) == []
    assert moves(Rebalancer(), groups, 0.0, first_queued_tokens=4000) == []  # it fits
    (move,) = moves(Rebalancer(), groups, 0.0, first_queued_tokens=5000)
    assert (move.source_id, move.target_id, move.cause) == ("b", "a", Cause.LARGE)
    assert 500 <= move.tokens <= 4000
    assert moves(Rebalancer(), groups, 0.0, first_queued_tokens=CAPACITY + 1) == []
    assert moves(Rebalancer(), groups, 0.0, first_queued_tokens=9000) == []  # no room for so much


def test_the_policy_migrate_balances_load() -> None:
    groups = [use("a", 8000, running=20), use("b", 1000, running=2), use("c", 1000, running=2)]
    assert moves(Rebalancer(), groups, 0.0) == []
    (move,) = moves(Rebalancer(), groups, 0.0, evenly=True)
    assert (move.source_id, move.cause) == ("a", Cause.UNEVEN)
    assert move.requests == 8 and 0 < move.tokens <= 4000


@pytest.mark.parametrize("seed", range(50))
def test_no_group_is_in_two_moves_and_no_target_becomes_short(seed: int) -> None:
    """Random loads; moves end at random, and take effect or fail."""
    rng, rebalancer, now_s = Random(seed), Rebalancer(), 0.0
    used = {f"g{n}": rng.randrange(CAPACITY) for n in range(rng.randint(2, 6))}
    under_way: list[Move] = []
    gave: dict[str, float] = {}
    for _ in range(200):
        now_s += rng.choice((0.1, 0.5, 2.0))
        for move in [move for move in under_way if rng.random() < 0.5]:
            under_way.remove(move)
            moved = rng.random() < 0.8
            if moved:
                used[move.source_id] -= move.tokens
                used[move.target_id] = min(CAPACITY, used[move.target_id] + move.tokens)
                gave[move.target_id] = now_s
            rebalancer.note_over(move.source_id, move.target_id, int(moved), now_s)
        groups = [use(name, tokens, running=5) for name, tokens in used.items()]
        for move in moves(rebalancer, groups, now_s, first_queued_tokens=rng.randrange(CAPACITY)):
            assert 0 < move.tokens <= used[move.source_id]
            assert used[move.target_id] + move.tokens <= CAPACITY - 5 * GROWTH_TOKENS
            assert now_s - gave.get(move.source_id, -STAY_S) >= STAY_S
            under_way.append(move)
        busy = [name for move in under_way for name in (move.source_id, move.target_id)]
        assert len(busy) == len(set(busy))
        name = rng.choice(sorted(used))
        used[name] = min(CAPACITY, max(0, used[name] + rng.randint(-2000, 2500)))
