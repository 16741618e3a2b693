"""Conditions under which a group counts as stuck."""

from services.core.changeover.state import DRAINED_TIMEOUT_S
from services.core.stall_limit import STALLED_FACTOR, STALLED_S
from services.worker.engine.pipeline.group_health import GroupHealth


def test_a_lost_member_is_named_until_the_next_configuration() -> None:
    health = GroupHealth()
    assert health.trouble(0.0) == ""
    health.note_lost({"w2", "w1"})
    assert health.trouble(0.0) == "the connection to w1, w2 is lost"
    health.enter(0.0)
    assert health.trouble(1.0) == ""


def test_a_lost_microbatch_is_detected() -> None:
    health = GroupHealth()
    health.note_launched(0.0)
    health.note_launched(1.0)
    assert health.trouble(STALLED_S) == ""
    assert health.trouble(STALLED_S + 1) == "a microbatch has not returned for 6 s"
    health.enter(0.0)
    assert health.trouble(100.0) == "", "nothing is in flight"


def test_microbatches_that_are_slow_raise_the_limit() -> None:
    health = GroupHealth()
    health.note_launched(0.0)
    health.note_returned(3.0)
    health.note_launched(3.0)
    assert health.trouble(3.0 + 3.0 * STALLED_FACTOR) == ""
    assert health.trouble(3.5 + 3.0 * STALLED_FACTOR) != ""


def test_a_repeated_microbatch_has_twice_the_time() -> None:
    """Otherwise one that is slow once would be discarded forever."""
    health = GroupHealth()
    for limit_s in (STALLED_S, 2 * STALLED_S, 4 * STALLED_S):
        health.note_launched(0.0)
        assert health.trouble(limit_s) == ""
        assert health.trouble(limit_s + 0.1) != ""
        assert health.trouble(limit_s + 0.2) != "", "it is one alarm"
        health.enter(0.0)
    health.note_launched(0.0)
    health.note_returned(1.0)
    health.note_launched(1.0)
    assert health.trouble(1.1 + max(STALLED_S, STALLED_FACTOR)) != "", "the limit is as before"


def test_a_single_delayed_microbatch_raises_the_limit_only_temporarily() -> None:
    health = GroupHealth()
    health.note_launched(0.0)
    health.note_returned(4.0)  # a member stood still for a moment
    now_s = 4.0
    for _ in range(500):
        health.note_launched(now_s)
        now_s += 0.1
        health.note_returned(now_s)
    health.note_launched(now_s)
    assert health.trouble(now_s + STALLED_S + 0.1) != ""


def test_an_alarm_ends_when_the_microbatch_returns() -> None:
    health = GroupHealth()
    health.note_launched(0.0)
    assert health.trouble(STALLED_S + 1) != ""
    health.note_returned(STALLED_S + 2)
    health.note_launched(STALLED_S + 2)
    assert health.trouble(STALLED_S + 3) == ""


def test_a_stage_that_does_not_join_is_detected() -> None:
    health = GroupHealth()
    health.enter(10.0)
    limit_s = DRAINED_TIMEOUT_S + STALLED_S
    assert health.trouble(10.0 + limit_s, joining=True) == ""
    assert health.trouble(1000.0) == "", "all have joined"
    assert health.trouble(11.0 + limit_s, joining=True).startswith("not every stage has joined")
    health.note_launched(1000.0)
    assert health.trouble(1000.1) == "", "a microbatch has its own time"
    health.enter(1000.0)
    assert health.trouble(1001.0, joining=True) == ""
    assert health.trouble(1001.0 + limit_s, joining=True) == "", "it has longer this time"


def test_a_stage_in_the_middle_of_slow_iterations_has_longer_to_join() -> None:
    health = GroupHealth()
    health.note_launched(0.0)
    health.note_returned(2.0)
    health.enter(10.0)
    limit_s = DRAINED_TIMEOUT_S + 2.0 * STALLED_FACTOR
    assert health.trouble(10.0 + limit_s, joining=True) == ""
    assert health.trouble(11.0 + limit_s, joining=True) != ""
