"""Figures of `overload` from synthetic records."""

import pytest
from msgspec.structs import replace

from benchmarks.overload.figures import (
    Measured,
    Probe,
    in_time,
    load_figures,
    recovery_s,
    tokens_within,
)
from benchmarks.overload.load import targets_for
from benchmarks.stats import Figures
from tideserve.load.client import UNFINISHED
from tideserve.load.record import ClientAttempt, RequestOutcome, SentRequest
from tideserve.load.workload import BATCH_CLASS

TARGETS = targets_for(4.0, mixed=False)
"""2 s to the first token and 0.4 s per token of interactive requests, 4 s of standard ones."""


def served(
    due_s: float, first_s: float = 1.0, slo_class: str = "standard", gap_s: float = 0.1
) -> SentRequest:
    """A completed request of 100 prompt and 11 output tokens."""
    times_s = tuple(due_s + first_s + gap_s * index for index in range(11))
    return SentRequest(
        *(due_s, due_s, times_s[-1], RequestOutcome.COMPLETED, 100, 11, times_s),
        slo_class=slo_class,
    )


def refused(due_s: float, after_s: float = 0.1, slo_class: str = "standard") -> SentRequest:
    """A refused request."""
    return SentRequest(
        *(due_s, due_s, due_s + after_s, RequestOutcome.REJECTED, 100),
        slo_class=slo_class,
        retry_after_s=5.0,
    )


def figures_of(*records: SentRequest, with_room_s: tuple[float, ...] = ()) -> Figures:
    """Figures of a load whose steady state is from 10 to 20 s."""
    measured = Measured(TARGETS, 0.2, records, (10.0, 20.0), gateway_bytes=[100, 110, 105])
    return load_figures(measured, with_room_s)


def test_a_request_is_in_time_within_the_targets_of_its_class() -> None:
    assert in_time(served(0.0, 2.0, "interactive"), TARGETS)
    assert not in_time(served(0.0, 2.1, "interactive"), TARGETS)
    assert not in_time(served(0.0, 1.0, "interactive", gap_s=0.41), TARGETS)
    assert in_time(served(0.0, 4.0, gap_s=2.0), TARGETS)
    assert not in_time(served(0.0, 4.1), TARGETS)
    assert in_time(served(0.0, 100.0, BATCH_CLASS), TARGETS)
    assert not in_time(refused(0.0), TARGETS)
    cut_off = replace(served(0.0), outcome=RequestOutcome.FAILED, error=UNFINISHED)
    assert not in_time(cut_off, TARGETS)


def test_tokens_count_when_they_arrive() -> None:
    record = served(9.0, 0.9)  # tokens at 9.9, 10.0, …, 10.9
    assert tokens_within(record, 0.0, 20.0) == 111
    assert tokens_within(record, 9.95, 20.0) == pytest.approx(10)
    assert tokens_within(record, 0.0, 9.95) == pytest.approx(101)
    assert tokens_within(refused(9.0), 0.0, 20.0) == 0


def test_only_tokens_in_time_and_in_the_steady_state_count() -> None:
    figures = figures_of(served(12.0), served(13.0, 5.0), served(0.0), served(12.0, 1.0, "batch"))
    assert figures["in_time_tokens_s"] == pytest.approx(11.1)
    assert figures["tokens_s"] == pytest.approx(33.3)


def test_refusals_include_requests_that_waited_in_vain() -> None:
    expired = replace(refused(1.0, 30.0), outcome=RequestOutcome.FAILED, error="HTTP 504: late")
    broken = replace(refused(1.0), outcome=RequestOutcome.FAILED, error="HTTP 500: broken")
    figures = figures_of(refused(1.0), expired, broken, served(12.0))
    assert (figures["refused"], figures["expired"], figures["failed"]) == (2, 1, 1)
    assert figures["refusal_s"]["p99"] > 29
    assert figures["retry_after_s"]["p50"] == 5.0


def test_returns_after_retry_after_are_in_time_from_their_due_time() -> None:
    obeying = [replace(served(15.0, late_s), attempt=ClientAttempt(1)) for late_s in (3.9, 4.1)]
    again = replace(refused(16.0), attempt=ClientAttempt(2))
    at_once = replace(served(15.0), attempt=ClientAttempt(1, at_once=True))
    figures = figures_of(served(12.0), *obeying, again, at_once)
    assert (figures["obeying_due"], figures["obeying_served"], figures["returns"]) == (3, 1, 4)


def test_the_interactive_share_is_of_first_attempts_in_the_steady_state() -> None:
    kind = "interactive"
    returned = replace(served(13.0, 1.0, kind), attempt=ClientAttempt(1))
    records = [served(12.0, 1.0, kind), served(12.0, 2.5, kind), refused(14.0, 0.1, kind)]
    figures = figures_of(*records, returned, served(5.0, 1.0, kind), served(12.0))
    assert figures["interactive_in_time_share"] == pytest.approx(1 / 3)
    assert figures_of(served(12.0))["interactive_in_time_share"] is None


def test_recovery_is_counted_from_the_last_arrival_returns_included() -> None:
    records = (served(12.0), replace(refused(19.0), attempt=ClientAttempt(2)))
    measured = Measured(TARGETS, 0.2, records, (10.0, 20.0))
    cases: list[tuple[list[float | None], float | None]] = [
        ([0.1, 0.1, 0.1], 1.1),
        ([0.3, None, 0.3], 1.3),
        # A single fast probe between slow probes is no recovery.
        ([None, 0.1, 0.31, None, 0.2, 0.2], 5.2),
        ([0.1, 0.31, 0.31, 0.1], None),
        ([None, 0.1], None),
        ([0.1, 0.1], None),
    ]
    for ttfts_s, expected in cases:
        measured.probes = [Probe(20.0 + n, ttft_s) for n, ttft_s in enumerate(ttfts_s)]
        assert recovery_s(measured) == (None if expected is None else pytest.approx(expected))
    measured.probes = [Probe(18.0 + n, 0.1) for n in range(3)]
    assert recovery_s(measured) == 0.0


def test_refusals_with_room_belong_to_the_load_in_which_they_happened() -> None:
    figures = figures_of(served(12.0), refused(15.0), with_room_s=(5.0, 12.5, 15.05, 15.2))
    assert figures["refused_with_room"] == 2
    assert figures["gateway_growth"] == pytest.approx(1.1)
