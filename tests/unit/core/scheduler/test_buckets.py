"""Batch requests start by bucket, none starves, and without buckets nothing changes."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from services.core.overtaking import OVERTAKEN_MAX
from services.core.queue_order import Scheduling
from services.core.scheduler.bucket_bounds import SAFE_SHARE
from services.core.scheduler.buckets import (
    CHANGED_SHARE,
    CHANGES,
    LEAST_SHARE,
    PATIENCE,
    Bucketing,
    BucketSort,
)
from services.core.scheduler.class_rules import ClassRules
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import Command, GroupJoined, SendAssignment, Withdrawn
from services.core.service import Service, ServiceClass
from tests.support.reports import load_reported
from tests.unit.core.scheduler.test_class_properties import decide, random_events
from tests.unit.core.scheduler.test_state import ask, group

BATCH = Service(ServiceClass.BATCH)
BLOCKS, BLOCK = 100, 16
OUTPUT = 16
MODES = (Bucketing.ON, Bucketing.PAPER)


class Line:
    """A worker with `BLOCKS` blocks, and requests that wait for it; records the order of starts."""

    def __init__(self, rules: ClassRules, overtaken_max: int = OVERTAKEN_MAX) -> None:
        self.state = SchedulerState(10_000, 1e6, rules=rules, overtaken_max=overtaken_max)
        self.number = 0
        self.lengths: dict[str, int] = {}
        self.waiting: list[str] = []
        self.started: list[str] = []
        self.state.handle(GroupJoined(0.0, group()))
        self.room(0)

    def ask(self, prompt_tokens: int, service: Service = BATCH, **changes: object) -> str:
        self.number += 1
        name = f"r{self.number}"
        self.lengths[name] = prompt_tokens
        self.waiting.append(name)
        self.take(
            self.state.handle(
                ask(
                    name,
                    now_s=0.0,
                    prompt_tokens=prompt_tokens,
                    max_tokens=OUTPUT,
                    service=service,
                    **changes,
                )
            )
        )
        return name

    def withdraw(self, name: str) -> None:
        self.waiting.remove(name)
        self.take(self.state.handle(Withdrawn(0.0, name)))

    def room(self, free: int) -> list[str]:
        """Report this number of free blocks; returns the requests that start."""
        self.number += 1
        before = len(self.started)
        # What runs is batch work, which could give all of its blocks away.
        report = load_reported(
            *(0.0, "w0", self.number),
            incarnation="w0-a",
            received=tuple(self.started),
            free=free,
            total=BLOCKS,
            batch_blocks=BLOCKS - free,
            batch_yields=True,
        )
        self.take(self.state.handle(report))
        return self.started[before:]

    def take(self, commands: list[Command]) -> None:
        self.state.check_invariants()
        for command in commands:
            if isinstance(command, SendAssignment):
                self.waiting.remove(command.request_id)
                self.started.append(command.request_id)


def line(
    buckets: Bucketing = Bucketing.ON,
    order: BucketSort = BucketSort.FIFO,
    scheduling: Scheduling = Scheduling.SLO,
    **settings: int,
) -> Line:
    return Line(ClassRules(scheduling, buckets=buckets, batch_order=order), **settings)


def drain(requests: Line, blocks: int = 20) -> list[int]:
    """Lengths in the order of their starts, `blocks` of room at a time."""
    before = len(requests.started)
    while requests.waiting:
        requests.room(blocks)
    return [requests.lengths[name] for name in requests.started[before:]]


def runs(lengths: list[int]) -> int:
    """The number of changes between the two kinds in the sequence."""
    return sum(length != other for length, other in pairwise(lengths))


@pytest.mark.parametrize("scheduling", [Scheduling.SLO, Scheduling.PRIORITY, Scheduling.FCFS])
@pytest.mark.parametrize("mode", MODES)
def test_similar_requests_start_consecutively(mode: Bucketing, scheduling: Scheduling) -> None:
    mixed = [16, 300] * 100
    # Without overtaking, which groups the short ones while a long one does not fit.
    plain = line(Bucketing.OFF, scheduling=scheduling, overtaken_max=0)
    bucketed = line(mode, scheduling=scheduling, overtaken_max=0)
    for tokens in mixed:
        plain.ask(tokens)
        bucketed.ask(tokens)
    assert runs(drain(plain)) > 150
    assert runs(drain(bucketed)) < 80
    assert Counter(plain.started) == Counter(bucketed.started)


def test_in_a_bucket_the_oldest_goes_first_then_the_order_decides() -> None:
    lengths = [30, 60, 20, 50, 40, 10]
    ordered = {
        BucketSort.FIFO: lengths,
        BucketSort.SJF: [30, 10, 20, 40, 50, 60],
        BucketSort.LJF: [30, 60, 50, 40, 20, 10],
    }
    for order, expected in ordered.items():
        requests = line(order=order)
        for tokens in lengths:
            requests.ask(tokens)
        assert [requests.lengths[name] for name in requests.room(BLOCKS)] == expected


def test_the_bucket_with_the_oldest_head_fills_the_memory() -> None:
    requests = line()
    for tokens in [280, *[20] * 9] * 20:
        requests.ask(tokens)
    lengths = drain(requests)
    # Neither kind has a turn before the memory is full, nor the next when it is and others wait.
    most, least = SAFE_SHARE * BLOCKS * BLOCK, LEAST_SHARE * 200
    first = lengths.index(20)
    assert most / 288 <= first <= most / 288 + 1 + least
    second = lengths.index(280, first) - first
    assert most / 28 <= second <= most / 28 + 1 + least


def test_ranks_come_before_buckets() -> None:
    requests = line()
    later = [requests.ask(tokens, replace(BATCH, rank=1)) for tokens in (20, 300) * 20]
    first = [requests.ask(tokens) for tokens in (20, 300) * 20]
    drain(requests)
    half = len(first)
    assert set(requests.started[:half]) == set(first)
    assert set(requests.started[half:]) == set(later)


def test_online_and_resumed_requests_are_in_no_bucket() -> None:
    requests = line()
    batch = [requests.ask(tokens) for tokens in (20, 300) * 20]
    resumed = requests.ask(300, resumed=True)
    online = [requests.ask(tokens, Service()) for tokens in (300, 20)]
    drain(requests)
    assert requests.started[:3] == [*online, resumed]
    assert set(requests.started[3:]) == set(batch)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", list(BucketSort))
@pytest.mark.parametrize("seed", range(4))
def test_no_request_starves(seed: int, order: BucketSort, mode: Bucketing) -> None:
    """Few others start before a request, beyond those that waited at its arrival."""
    rng = Random(f"{seed} {order}")
    requests = line(mode, order)
    ahead: dict[str, int] = {}
    waits: dict[str, int] = {}
    longest = rng.choice([60, 400])

    def note() -> None:
        for number, name in enumerate(requests.started):
            waits.setdefault(name, number - ahead[name])

    most = 0
    for _ in range(500):
        # Arrivals as fast as starts, with ever more of the lengths that the order prefers.
        for _ in range(rng.randrange(7)):
            tokens = rng.choice([10, 12, 14, longest, rng.randrange(1, longest)])
            before = len(requests.started) + len(requests.waiting)
            ahead[requests.ask(tokens)] = before
        if requests.waiting and rng.random() < 0.1:
            requests.withdraw(rng.choice(requests.waiting))
        most = max(most, len(requests.waiting))
        requests.room(rng.randrange(4, 40))
        note()
    while requests.waiting:
        requests.room(40)
    note()
    # A batch has at most as many requests as minimal ones would fill the memory.
    batch = BLOCKS * BLOCK // (1 + OUTPUT // 2)
    between = max(CHANGES, CHANGED_SHARE * most) + LEAST_SHARE * most + 1
    assert len(waits) > 500
    assert max(waits.values()) <= PATIENCE * batch + between + OVERTAKEN_MAX
    assert not requests.waiting


@pytest.mark.parametrize("order", list(BucketSort))
def test_a_request_of_a_rare_length_starts_despite_steady_arrivals(order: BucketSort) -> None:
    requests = line(order=order)
    for _ in range(100):
        requests.ask(20)
    odd = requests.ask(300 if order is BucketSort.SJF else 5)
    for _ in range(300):
        for _ in range(8):
            requests.ask(20)
        requests.room(25)
        if odd not in requests.waiting:
            break
    assert odd not in requests.waiting
    patience = PATIENCE * BLOCKS * BLOCK // (20 + OUTPUT // 2)
    assert len(requests.started) < 101 + patience + CHANGES + OVERTAKEN_MAX


@pytest.mark.parametrize("scheduling", [Scheduling.FCFS, Scheduling.SLO])
@pytest.mark.parametrize("seed", range(6))
def test_off_keeps_the_order_without_buckets(seed: int, scheduling: Scheduling) -> None:
    events = random_events(seed, services=True)
    plain = decide(ClassRules(scheduling), events)
    for order in BucketSort:
        rules = ClassRules(scheduling, buckets=Bucketing.OFF, batch_order=order)
        assert decide(rules, events) == plain


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheduling", list(Scheduling))
@pytest.mark.parametrize("seed", range(3))
def test_invariants_hold_with_any_policy(
    seed: int, scheduling: Scheduling, mode: Bucketing
) -> None:
    rules = ClassRules(scheduling, buckets=mode, batch_order=BucketSort.SJF)
    answers = decide(rules, random_events(seed, services=True), lateness=1.0)
    starts = [
        command
        for commands in answers
        for command in commands
        if isinstance(command, SendAssignment)
    ]
    assert len(starts) > 20


def test_the_snapshot_lists_the_buckets() -> None:
    requests = line()
    for tokens in [20] * 60 + [300] * 40:
        requests.ask(tokens)
    requests.room(1)
    (stats,) = requests.state.snapshot(0.0).buckets
    assert stats.model == "m"
    assert sum(count for _, count in stats.buckets) == len(requests.waiting)
    assert [upper for upper, _ in stats.buckets] == [28, 308]
    assert stats.padding_share == 0
    waiting = [requests.lengths[name] + OUTPUT // 2 for name in requests.waiting]
    assert stats.mean_tokens == pytest.approx(sum(waiting) / len(waiting))
    assert stats.arrivals_per_s == pytest.approx(100 / 10)
    assert SchedulerState(8, 1.0).snapshot(0.0).buckets == ()
