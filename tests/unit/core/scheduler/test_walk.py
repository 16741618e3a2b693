"""The walk of the queue refuses the same requests as a rule without shortcuts."""

import math
from random import Random
from typing import Any

import pytest

from services.core.ask import FailedAssignment
from services.core.prefix.block_hash import ThinHashes
from services.core.queue_order import Scheduling
from services.core.scheduler.class_rules import ONLINE, ClassRules
from services.core.scheduler.group_table import ModelGroups
from services.core.scheduler.lateness import LENIENT, Lateness, has_memory
from services.core.scheduler.queue import Waiting
from services.core.scheduler.vocabulary import Late, Ticked, WaitLimit
from services.core.service import Service, ServiceClass
from tests.support.overload import arrivals, simulate
from tests.unit.core.scheduler.test_lateness import Overloaded, waits_of

WALK = Lateness.late_waiting


def is_refusable(
    lateness: Lateness, w: Waiting, model: ModelGroups, short: bool, now_s: float
) -> bool:
    if w.latest_s == math.inf or w.was_assigned or w.ask.failed is not None:
        return False
    if not model.can_hold(w.ask) or lateness.could_start(w.ask, model, now_s):
        return False
    return short or has_memory(w.ask, model)


def plain_walk(
    self: Lateness, name: str, model: ModelGroups, short: bool, now_s: float, walk: bool
) -> list[tuple[Waiting, Late]]:
    """The same as `Lateness.late_waiting`, one request at a time."""
    overloaded = [
        cls for cls in ONLINE if self.factor and self.is_overloaded(Service(cls), model, now_s)
    ]
    late, ahead = list[tuple[Waiting, Late]](), 0
    queue = self.queue.in_order(name) if walk else self.queue.late(name)
    for waiting in queue if overloaded else ():
        cls = waiting.ask.service.service_class
        rate = self._rate(cls, model, now_s)
        assert rate
        wait_s = (ahead + waiting.start_tokens) / rate
        _, likely_s, _ = model.meter.waits.ratios[cls].corrected(wait_s, now_s)
        if waiting.booked:
            likely_s /= LENIENT
        left_s = waiting.latest_s - now_s
        in_time = likely_s <= left_s or not (waiting.late or cls in overloaded)
        if in_time or not is_refusable(self, waiting, model, short, now_s):
            ahead += waiting.start_tokens
            continue
        by = WaitLimit.COMPUTE if has_memory(waiting.ask, model) else WaitLimit.MEMORY
        late.append((waiting, Late(ahead, rate, likely_s, left_s, by)))
    return late


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Compare every walk and collect the refusals."""
    refused = list[Late]()

    def both(self: Lateness, *arguments: Any) -> list[tuple[Waiting, Late]]:
        # First, since the refusals of a walk correct the predictions of the next.
        plain = plain_walk(self, *arguments)
        late = WALK(self, *arguments)
        assert late == plain
        refused.extend(reason for _, reason in late)
        return late

    monkeypatch.setattr(Lateness, "late_waiting", both)
    return refused


@pytest.mark.parametrize("scheduling", [Scheduling.FCFS, Scheduling.SLO])
@pytest.mark.parametrize(("blocks", "short"), [(2000, True), (200, True), (200, False)])
def test_the_walks_of_simulated_overloads_are_equal(
    scheduling: Scheduling, blocks: int, short: bool, refused: list[Late]
) -> None:
    simulate(arrivals(60.0, 10.0, 0, 20.0), 10.0, scheduling, blocks, short)
    assert refused or not short


def random_service(rng: Random) -> Service:
    cls = rng.choice(list(ServiceClass))
    ttft_s = rng.choice([None, 0.01, 1.0, 3.0, 30.0]) if cls is not ServiceClass.BATCH else None
    return Service(cls, ttft_s, rank=rng.randrange(3), tenant=rng.choice(["", "a", "b"]))


@pytest.mark.parametrize("scheduling", [Scheduling.FCFS, Scheduling.PRIORITY, Scheduling.SLO])
@pytest.mark.parametrize("seed", range(6))
def test_the_walks_of_random_queues_are_equal(
    scheduling: Scheduling, seed: int, refused: list[Late]
) -> None:
    rng = Random(seed)
    short = bool(seed % 2)
    scheduler = Overloaded(short=short, rules=ClassRules(scheduling))
    scheduler.serve("w1", now_s=scheduler.now_s)
    for ratios in waits_of(scheduler).ratios.values():
        for _ in range(rng.choice([0, 30])):
            ratios.note(rng.uniform(0.1, 20.0), rng.uniform(0.0, 40.0), scheduler.now_s)
    for number in range(400):
        scheduler.now_s += rng.choice([0.0, 0.0, 0.01, 0.1])
        prompt_tokens = rng.choice([1, 15, 16, 100, 700])
        prefix = ThinHashes(2, tuple(rng.randrange(9) for _ in range(prompt_tokens // 32)))
        failed = FailedAssignment("group-w0", 1) if rng.random() < 0.05 else None
        scheduler.arrive(
            f"r{number}",
            fingerprint=1 + number,
            service=random_service(rng),
            prompt_tokens=prompt_tokens,
            max_tokens=rng.choice([1, 5, 300]),
            prefix=prefix,
            failed=failed,
            resumed=failed is not None and rng.random() < 0.5,
        )
        if rng.random() < 0.2:
            load = {"free": rng.choice([0, 3, 8, 50]), "prefill": rng.choice([0, 100_000])}
            scheduler.report(rng.choice(["w0", "w1"]), now_s=scheduler.now_s, running=10, **load)
        if rng.random() < 0.3:
            scheduler(Ticked(scheduler.now_s))
    assert short in {reason.by is WaitLimit.MEMORY for reason in refused}
