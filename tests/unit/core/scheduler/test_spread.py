"""Bursts of resumed requests are spread over the serving groups."""

from services.core.report import OtherRoom
from services.core.scheduler.group_load import BACKLOG_ITERATIONS
from services.core.scheduler.state import SPREAD_S
from services.core.scheduler.vocabulary import Command, SendAssignment, Ticked
from tests.unit.core.scheduler.test_state import Scheduler, assigned

BATCH_TOKENS = 64
FEW = BACKLOG_ITERATIONS * BATCH_TOKENS // 32
"""Requests of 32 tokens that a group gets at once."""


def waiting(requests: int, **settings: object) -> Scheduler:
    """This number of resumed requests, then a new one, wait for groups to return."""
    scheduler = Scheduler(queue_limit=64, **settings)
    scheduler.join()
    scheduler.report(free=0)
    for number in range(requests):
        scheduler.ask(f"r{number}", resumed=True)
    scheduler.ask("new")
    return scheduler


def serves(scheduler: Scheduler, name: str, now_s: float = 0.0, **changes: object) -> list[Command]:
    """A group serves again."""
    scheduler.join(name, now_s=now_s, max_batch_tokens=BATCH_TOKENS)
    return scheduler.report(name, now_s=now_s, **changes)


def test_the_first_serving_group_does_not_get_all_requests() -> None:
    scheduler = waiting(12)
    first = assigned(serves(scheduler, "w1"))
    assert first == [f"r{number}" for number in range(FEW)]
    assert assigned(serves(scheduler, "w2")) == [f"r{FEW + number}" for number in range(FEW)]
    # w1 has computed half of what it got.
    left = scheduler.report("w1", received=tuple(first), prefill=BATCH_TOKENS)
    assert assigned(left) == [f"r{2 * FEW + number}" for number in range(FEW // 2)]


def test_a_merged_group_gets_more_requests() -> None:
    scheduler = waiting(12)
    scheduler.join("w1", max_batch_tokens=BATCH_TOKENS, members=2)
    assert len(assigned(scheduler.report("w1"))) == 2 * FEW


def test_a_group_with_a_backlog_gets_no_requests_while_another_has_few() -> None:
    scheduler = waiting(2)
    assert serves(scheduler, "w1", prefill=BACKLOG_ITERATIONS * BATCH_TOKENS) == []
    commands = serves(scheduler, "w2", free=90)
    places = {
        command.request_id: command.worker_id
        for command in commands
        if isinstance(command, SendAssignment)
    }
    assert places.keys() >= {"r0", "r1"}
    assert {places["r0"], places["r1"]} == {"w2"}


def test_waiting_time_is_bounded_by_the_setting() -> None:
    scheduler = waiting(FEW + 3)
    serves(scheduler, "w1")
    scheduler.report("w1", now_s=SPREAD_S - 0.1, prefill=10_000)
    assert scheduler(Ticked(SPREAD_S - 0.1)) == []
    assert len(assigned(scheduler(Ticked(SPREAD_S)))) == 4, "also that which has not run"


def test_spreading_can_be_disabled() -> None:
    assert len(assigned(serves(waiting(12, spread_s=0.0), "w1"))) == 13


def test_prompts_of_yielding_batch_work_do_not_count() -> None:
    scheduler = waiting(12)
    behind = {"prefill": 10_000, "batch_yields": True}
    assert assigned(serves(scheduler, "w1", **behind)) == []
    commands = serves(scheduler, "w2", batch_waiting=1, waiting=1, **behind)
    assert len(assigned(commands)) == FEW


def test_a_worker_that_leaves_learns_the_room_of_other_groups() -> None:
    scheduler = Scheduler()
    for name, free, prefill in (("w0", 90, 0), ("w1", 50, 0), ("w2", 70, 10_000), ("w3", 0, 0)):
        scheduler.join(name, max_batch_tokens=BATCH_TOKENS)
        scheduler.report(name, free=free, prefill=prefill)
    room = scheduler.state.room("m", "w0", False, 0.0)
    assert room == OtherRoom(), "it still gets requests, and would get those that it returns"
    scheduler.report("w0", epoch=0)
    room = scheduler.state.room("m", "w0", False, 0.0)
    assert room.longest_tokens == 1024
    assert room.group_tokens == (49 * 16,), "w2 has a backlog, w3 is full"
    assert scheduler.state.room("other", "w0", False, 0.0) == OtherRoom()
    assert scheduler.state.room("m", "w0", False, 100.0) == OtherRoom(), "no report is fresh"


def test_a_worker_with_an_outage_learns_the_room_of_other_groups_while_it_reports() -> None:
    scheduler = Scheduler()
    for name, free in (("w0", 90), ("w1", 50)):
        scheduler.join(name, max_batch_tokens=BATCH_TOKENS)
        scheduler.report(name, free=free)
    assert scheduler.state.room("m", "w0", True, 0.0).group_tokens == (49 * 16,), "not its own"
    assert scheduler.state.room("m", "w1", True, 0.0).group_tokens == (89 * 16,)
