"""Overload on simulated workers: requests in time, and refusals."""

from functools import cache
from math import inf

import pytest

from services.core.queue_order import Scheduling
from services.core.scheduler import group_table
from services.core.scheduler.lateness import Lateness
from services.core.scheduler.queue import WaitQueue
from tests.support.overload import INTERACTIVE, Served, arrivals, capacity, simulate

SECONDS = 30.0


@cache
def capacity_of(seed: int) -> tuple[float, float]:
    return capacity(seed)


def overloaded(
    factor: float, seed: int, scheduling: Scheduling, interactive: float = 0.0
) -> Served:
    """`factor` × the capacity; `interactive` × the capacity are interactive requests."""
    rate_per_s, _ = capacity_of(seed)
    requests = arrivals(factor * rate_per_s, SECONDS, seed, interactive * rate_per_s)
    return simulate(requests, SECONDS, scheduling)


@pytest.mark.parametrize("scheduling", [Scheduling.FCFS, Scheduling.SLO])
@pytest.mark.parametrize("seed", range(2))
def test_requests_that_are_alike_use_the_capacity(seed: int, scheduling: Scheduling) -> None:
    _, tokens_per_s = capacity_of(seed)
    served = overloaded(5, seed, scheduling)
    assert served.tokens_per_s() >= 0.9 * tokens_per_s
    assert served.findings.checks["I16"] > 1000 and served.findings.broken == 0


@pytest.mark.parametrize("scheduling", [Scheduling.PRIORITY, Scheduling.SLO])
@pytest.mark.parametrize("seed", range(2))
def test_interactive_requests_that_fit_alone_are_in_time(seed: int, scheduling: Scheduling) -> None:
    served = overloaded(10, seed, scheduling, interactive=0.5)
    assert served.in_time_share(INTERACTIVE) >= 0.9
    assert served.findings.broken == 0


@pytest.mark.parametrize("seed", range(2))
def test_a_load_that_fits_is_not_refused(seed: int) -> None:
    served = overloaded(0.9, seed, Scheduling.SLO, interactive=0.45)
    assert len(served.refused) < 0.001 * len(served.records)


def test_refusals_are_immediate() -> None:
    served = overloaded(10, 0, Scheduling.SLO)
    waits_s = sorted(record.end_s - record.sent_s for record in served.refused)
    assert waits_s[int(0.99 * len(waits_s))] <= 0.5


def test_before_a_shortfall_no_request_is_refused_for_memory() -> None:
    rate_per_s, _ = capacity_of(0)
    served = simulate(arrivals(5 * rate_per_s, 10.0, 0), 10.0, blocks=200, short=False)
    assert served.findings.checks["I17"] and served.findings.broken == 0


# --- each rule is needed


def test_the_result_needs_late_requests_behind_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitQueue, "mark_late", lambda *_: None)
    monkeypatch.setattr(Lateness, "late", lambda *_: None)
    monkeypatch.setattr(Lateness, "late_waiting", lambda *_: [])
    _, tokens_per_s = capacity_of(0)
    assert overloaded(5, 0, Scheduling.SLO).tokens_per_s() < 0.5 * tokens_per_s


def test_the_result_needs_short_memory_before_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    late, waiting = Lateness.late, Lateness.late_waiting
    monkeypatch.setattr(Lateness, "late", lambda self, *all: late(self, *all[:-1], True))
    monkeypatch.setattr(
        Lateness,
        "late_waiting",
        lambda self, name, model, _, *rest: waiting(self, name, model, True, *rest),
    )
    rate_per_s, _ = capacity_of(0)
    served = simulate(arrivals(5 * rate_per_s, 10.0, 0), 10.0, blocks=200, short=False)
    assert served.findings.broken


def test_the_result_needs_requests_held_back_from_backlogs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_table, "held_tokens", lambda *_: inf)
    served = overloaded(10, 0, Scheduling.PRIORITY, interactive=0.5)
    assert served.in_time_share(INTERACTIVE) < 0.9
