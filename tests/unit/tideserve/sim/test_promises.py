"""Attained targets: groups of tokens, and shares over requests."""

import math

import pytest

from services.core.service import Service, ServiceClass
from tideserve.sim.report import Outcome, Record, targets_met
from tideserve.sim.token_times import NO_TARGETS_MET, TargetsMet, TokenGroups, attainment, goodput

PROMISED = Service(ServiceClass.INTERACTIVE, ttft_s=1.0, tpot_s=0.5, token_group=2)


def test_a_group_is_due_after_its_predecessor() -> None:
    groups = TokenGroups(size=2, tpot_s=0.5, from_s=10.0)
    assert groups.share == 1.0
    for time_s in (10.9, 11.0):  # a slow token and a quick one: in time together
        groups.note(time_s)
    assert (groups.ended, groups.in_time, groups.due_s) == (1, 1, 12.0)
    for time_s in (11.1, 12.1, 12.2, 13.1):  # late, which the next one does not pay for
        groups.note(time_s)
    assert (groups.ended, groups.in_time) == (3, 2)
    groups.note(99.0)  # no whole group: no deadline
    assert groups.share == pytest.approx(2 / 3)


def test_single_tokens_are_groups_of_size_1() -> None:
    groups = TokenGroups(size=1, tpot_s=0.5, from_s=0.0)
    for time_s in (0.5, 1.1, 1.2):
        groups.note(time_s)
    assert (groups.ended, groups.in_time) == (3, 2)


def test_an_unfinished_group_is_late_once_due() -> None:
    groups = TokenGroups(size=2, tpot_s=0.5, from_s=0.0)
    groups.note(0.2)
    groups.give_up(1.0)
    assert groups.ended == 0
    groups.give_up(1.1)
    assert (groups.ended, groups.in_time) == (1, 0)


def test_attainment_is_the_mean_over_requests() -> None:
    kept = [
        TargetsMet(True, True, 1.0),
        TargetsMet(True, False, 0.5),
        NO_TARGETS_MET,
        TargetsMet(None, True, None),
    ]
    assert attainment(kept) == pytest.approx({"ttft": 2 / 3, "tpot": 0.5, "token_group": 0.5})
    assert goodput(kept, 4.0) == {"goodput_requests_per_s": 0.5}
    assert attainment([]) == {"ttft": None, "tpot": None, "token_group": None}
    assert goodput([], 0.0) == {"goodput_requests_per_s": None}


def record(first_s: float, end_s: float, outcome: Outcome, *tokens_s: float) -> Record:
    """A simulated request of `1 + len(tokens_s)` tokens that was sent at 0 s."""
    groups = None
    if not math.isnan(first_s):
        groups = TokenGroups(2, 0.5, first_s)
        for time_s in tokens_s:
            groups.note(time_s)
    count = len(tokens_s) + 1
    return Record(0.0, 9, count, first_s, end_s, outcome, service=PROMISED, groups=groups)


def test_attainment_of_simulated_requests_is_counted() -> None:
    done = record(0.9, 1.9, Outcome.COMPLETED, 1.8, 1.9)
    assert targets_met(done, 50.0) == (True, True, 1.0)
    late = record(1.1, 2.4, Outcome.COMPLETED, 1.2, 2.4)
    assert targets_met(late, 50.0) == (False, False, 0.0)
    running = record(0.5, math.nan, Outcome.RUNNING, 0.9, 1.4)
    assert targets_met(running, 1.5) == (True, True, 1.0)
    assert targets_met(running, 50.0) == (True, False, 0.5)
    assert targets_met(running, 1.5) == (True, True, 1.0), "asking changes nothing"
    waiting = record(math.nan, math.nan, Outcome.RUNNING)
    assert targets_met(waiting, 50.0) == NO_TARGETS_MET
    refused = record(math.nan, 0.1, Outcome.REJECTED)
    assert targets_met(refused, 50.0) == NO_TARGETS_MET


def test_requests_without_targets_are_not_counted() -> None:
    plain = Record(0.0, 9, 3, 5.0, 6.0, Outcome.COMPLETED)
    assert targets_met(plain, 50.0) == (None, None, None)
    waiting = Record(0.0, 9, 3, service=Service(ttft_s=1.0))
    assert targets_met(waiting, 50.0) == (False, None, None)
