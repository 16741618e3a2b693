"""Retry times of requests refused for lack of capacity."""

import math

import pytest

from services.core.scheduler.rate import RETRY_AFTER_MAX_S
from services.core.service import ServiceClass
from services.gateway.bounds.body_budget import BodyBudget, RetryEstimator
from services.gateway.bounds.drain import Drain
from services.gateway.vocabulary.errors import Forbidden, QueueFull
from tests.support.clock import Clock


def test_refused_requests_get_staggered_retry_times() -> None:
    clock = Clock()
    turnover = RetryEstimator(clock)
    assert turnover.count_refusal() == RETRY_AFTER_MAX_S, "no request leaves"
    for _ in range(50):
        turnover.count_completion()
    assert turnover.count_refusal() == 1, "five leave in a second"
    waits_s = [turnover.count_refusal() for _ in range(98)]
    assert waits_s[-1] == 20, "a hundred wait"
    clock.now_s += 11
    turnover.count_completion()
    assert turnover.count_refusal() == 10


def test_gateway_limits_set_retry_after() -> None:
    drain, bodies = Drain(inflight_max=1), BodyBudget(100)
    with drain.enter(), pytest.raises(QueueFull) as full, drain.enter():
        pass
    assert full.value.retry_after_s == RETRY_AFTER_MAX_S
    for _ in range(100):
        with drain.enter():
            pass
    with drain.enter(), pytest.raises(QueueFull) as full, drain.enter():
        pass
    assert full.value.retry_after_s is not None and full.value.retry_after_s < 2
    with bodies.lease() as lease, pytest.raises(QueueFull) as full:
        lease.take(2**20)
    assert full.value.retry_after_s == RETRY_AFTER_MAX_S


def test_batch_retry_times_follow_the_batch_turnover() -> None:
    drain = Drain(inflight_max=3, batch_inflight_max=1)
    for _ in range(100):
        with drain.enter() as place:
            place.set_class(ServiceClass.STANDARD)
    with drain.enter() as first, drain.enter() as second:
        first.set_class(ServiceClass.BATCH)
        with pytest.raises(QueueFull) as full:
            second.set_class(ServiceClass.BATCH)
        assert full.value.retry_after_s == RETRY_AFTER_MAX_S, "only online requests have left"
    for _ in range(100):
        with drain.enter() as place:
            place.set_class(ServiceClass.BATCH)
    with drain.enter() as first, drain.enter() as second:
        first.set_class(ServiceClass.BATCH)
        with pytest.raises(QueueFull) as full:
            second.set_class(ServiceClass.BATCH)
        assert full.value.retry_after_s is not None and full.value.retry_after_s < 2


@pytest.mark.parametrize("wait_s", [1.0, 5.0, RETRY_AFTER_MAX_S, 58.0, 600.0])
def test_requests_refused_with_the_same_wait_retry_at_different_times(wait_s: float) -> None:
    """Also at the shortest and the longest wait, and with the whole seconds of HTTP."""
    errors = [QueueFull("full", retry_after_s=wait_s) for _ in range(200)]
    delays_s = [error.retry_delay_s for error in errors if error.retry_delay_s is not None]
    assert len(set(delays_s)) > 100
    assert len({math.ceil(delay_s) for delay_s in delays_s}) >= 2
    assert wait_s <= min(delays_s) and max(delays_s) <= max(60, 1.25 * wait_s)


def test_an_error_without_a_wait_has_no_delay() -> None:
    assert QueueFull("full", retry_after_s=0.0).retry_delay_s == 0
    assert QueueFull("full", retry_after_s=300.0, booked=True).retry_delay_s == 300
    assert Forbidden("no").retry_delay_s is None
