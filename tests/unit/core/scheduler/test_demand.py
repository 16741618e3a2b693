"""Reported demand of the queue, and changing capacities."""

import itertools
from dataclasses import replace

import pytest

from services.core.ask import RefusalReason
from services.core.demand import ModelDemand
from services.core.scheduler.rate import RecentSum
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import (
    Asked,
    Command,
    GroupJoined,
    GroupLeft,
    SendAssignment,
    SendRefusal,
    ServingGroup,
    Ticked,
    Withdrawn,
)
from services.core.service import Service
from tests.support.reports import load_reported

# Two blocks for the prompt and one for what comes.
START_TOKENS = 3 * 16


class Scheduler:
    """A state with one group of model `m`; invariants are checked after every event."""

    def __init__(self, queue_limit: int = 2, max_model_len: int = 10_000) -> None:
        self.state = SchedulerState(queue_limit, queue_deadline_s=20.0)
        self.group = ServingGroup("g", 1, "w", "i", "a:1", "m", 10, 16, max_model_len)
        self.reports = itertools.count(1)
        self(GroupJoined(0.0, self.group))

    def __call__(self, event: object) -> list[Command]:
        commands = self.state.handle(event)  # type: ignore[arg-type]
        self.state.check_invariants()
        return commands

    def ask(self, name: str, now_s: float, prompt: int = 32, most: int = 64) -> list[Command]:
        return self(Asked(name, "m", prompt, most, now_s=now_s, stream_id=1))

    def report(self, now_s: float, free: int, total: int = 0) -> list[Command]:
        number = next(self.reports)
        return self(load_reported(now_s, "w", number, free=free, total=total))


def test_queued_requests_are_demand_until_they_start() -> None:
    scheduler = Scheduler()
    assert scheduler.state.demands(0.0) == ()
    scheduler.ask("r0", 100.0)
    scheduler.ask("r1", 100.0)
    rate = 2 * START_TOKENS / 2
    wanted = ModelDemand("m", 2, 2 * START_TOKENS, 0, 0, rate, first_queued_tokens=START_TOKENS)
    assert scheduler.state.demands(100.0) == (wanted,)
    scheduler(Withdrawn(100.0, "r0"))
    assert scheduler.state.demands(100.0)[0].queued_tokens == START_TOKENS
    scheduler.report(100.0, free=10)
    (started,) = scheduler.state.demands(100.0)
    assert started.prompt_tokens_per_s > 0 and started.output_tokens_per_s > 0
    queue = replace(started, prompt_tokens_per_s=0.0, output_tokens_per_s=0.0)
    assert queue == ModelDemand("m", 0, 0, 0, 0, rate)
    assert scheduler.state.demands(110.0) == ()


def test_the_mix_covers_started_requests() -> None:
    scheduler = Scheduler(queue_limit=10)
    scheduler.report(100.0, free=10)
    for number, tpot_s in enumerate((0.2, 0.1, None)):
        ask = Asked(f"r{number}", "m", 32, 64, now_s=100.0 + number, stream_id=1)
        scheduler(replace(ask, service=Service(tpot_s=tpot_s)))
    (mix,) = scheduler.state.demands(102.0)
    assert mix.prompt_tokens_per_s == pytest.approx(3 * 32 / 9)
    assert 0 < mix.output_tokens_per_s <= 3 * 64 / 9
    assert mix.tpot_s == 0.1
    # Each counts for ten seconds.
    (mix,) = scheduler.state.demands(110.5)
    assert (mix.tpot_s, mix.prompt_tokens_per_s) == (0.1, pytest.approx(2 * 32 / 9.5))
    (mix,) = scheduler.state.demands(111.5)
    assert (mix.tpot_s, mix.prompt_tokens_per_s) == (0.0, pytest.approx(32 / 9.5))


def test_capacity_refusals_count_for_a_while() -> None:
    scheduler = Scheduler(queue_limit=1)
    scheduler.ask("r0", 100.0)
    scheduler.ask("r1", 100.0)
    assert scheduler.state.demands(105.0) == (
        ModelDemand("m", 1, START_TOKENS, 1, START_TOKENS, 0.0, first_queued_tokens=START_TOKENS),
    )
    (refusal,) = scheduler(Ticked(120.0))
    assert isinstance(refusal, SendRefusal) and refusal.reason is RefusalReason.EXPIRED
    assert scheduler.state.demands(120.0) == (ModelDemand("m", 0, 0, 1, START_TOKENS, 0.0),)
    assert scheduler.state.demands(131.0) == ()


def test_invalid_requests_are_not_demand() -> None:
    scheduler = Scheduler()
    scheduler.ask("r0", 100.0, prompt=100_000)
    scheduler.ask("r1", 100.0, prompt=0)
    scheduler(Asked("r2", "other", 1, 1, now_s=100.0, stream_id=1))
    assert scheduler.state.demands(100.0) == ()


def test_a_removed_model_has_no_demand() -> None:
    scheduler = Scheduler()
    scheduler.ask("r0", 100.0)
    scheduler(GroupLeft(100.0, "g"))
    assert scheduler.state.demands(100.0) == ()
    scheduler(GroupJoined(101.0, scheduler.group))
    assert scheduler.state.demands(101.0)[0].queued == 1


def test_sums_cover_the_last_seconds() -> None:
    recent = RecentSum(window_s=3)
    for second in range(10):
        recent.add(second, second + 0.5)
    assert recent.at(9.9) == (3, 7 + 8 + 9)
    assert recent.at(11.0) == (1, 9)
    assert recent.at(12.0) == (0, 0)


def test_a_reported_capacity_admits_longer_requests() -> None:
    """The group has ten blocks in its leader alone, and twenty while parameters are dropped."""
    scheduler = Scheduler()
    scheduler.report(1.0, free=10)
    assert isinstance(scheduler.ask("r1", 1.0, 200, 100)[0], SendRefusal)
    scheduler.report(2.0, free=20, total=20)
    assert isinstance(scheduler.ask("r2", 2.0, 200, 100)[-1], SendAssignment)
    scheduler.report(3.0, free=10, total=10)
    assert isinstance(scheduler.ask("r3", 3.0, 200, 100)[0], SendRefusal)


@pytest.mark.parametrize("total", [0, 5, 20])
def test_a_request_that_fits_a_single_worker_is_never_too_large(total: int) -> None:
    scheduler = Scheduler()
    scheduler.report(1.0, free=total, total=total)
    assert not isinstance(scheduler.ask("r0", 1.0, 100, 60)[0], SendRefusal)


def test_the_model_length_limits_requests_at_any_capacity() -> None:
    scheduler = Scheduler(max_model_len=100)
    scheduler.report(1.0, free=50, total=50)
    assert isinstance(scheduler.ask("r0", 1.0, 100, 60)[0], SendRefusal)


def test_room_follows_the_reported_capacity() -> None:
    scheduler = Scheduler(queue_limit=10)
    scheduler.report(1.0, free=18, total=20)
    served = [scheduler.ask(f"r{number}", 1.0)[-1] for number in range(6)]
    assert all(isinstance(command, SendAssignment) for command in served)


def test_a_new_epoch_of_the_only_group_keeps_demand() -> None:
    scheduler = Scheduler()
    scheduler.ask("r0", 100.0)
    before = scheduler.state.demands(101.0)
    assert before[0].arriving_tokens_per_s > 0
    scheduler(GroupJoined(101.0, replace(scheduler.group, epoch=2)))
    assert scheduler.state.demands(101.0) == before
