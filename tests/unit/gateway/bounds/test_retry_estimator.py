"""When a request that had no room may come again."""

import pytest

from services.core.service import ServiceClass
from services.gateway.bounds.body_budget import BodyBudget, RetryEstimator
from services.gateway.bounds.drain import Drain
from services.gateway.vocabulary.errors import QueueFull
from tests.support.clock import Clock


def test_refused_requests_are_told_to_come_one_after_another() -> None:
    clock = Clock()
    turnover = RetryEstimator(clock)
    assert turnover.count_refusal() == 60, "nobody leaves"
    for _ in range(50):
        turnover.count_completion()
    assert 1 <= turnover.count_refusal() <= 1.25, "five leave in a second"
    waits_s = [turnover.count_refusal() for _ in range(98)]
    assert 20 <= waits_s[-1] <= 25, "a hundred wait"
    assert len(set(waits_s[-20:])) == 20, "they do not come together"
    clock.now_s += 11
    turnover.count_completion()
    assert 10 <= turnover.count_refusal() <= 12.5


def test_the_gateways_own_limits_say_when_there_is_room() -> None:
    drain, bodies = Drain(inflight_max=1), BodyBudget(100)
    with drain.enter(), pytest.raises(QueueFull) as full, drain.enter():
        pass
    assert full.value.retry_after_s == 60
    for _ in range(100):
        with drain.enter():
            pass
    with drain.enter(), pytest.raises(QueueFull) as full, drain.enter():
        pass
    assert full.value.retry_after_s is not None and full.value.retry_after_s < 2
    with bodies.lease() as lease, pytest.raises(QueueFull) as full:
        lease.take(2**20)
    assert full.value.retry_after_s == 60


def test_a_batch_request_may_come_again_when_batch_requests_have_left() -> None:
    drain = Drain(inflight_max=3, batch_inflight_max=1)
    for _ in range(100):
        with drain.enter() as place:
            place.set_class(ServiceClass.STANDARD)
    with drain.enter() as first, drain.enter() as second:
        first.set_class(ServiceClass.BATCH)
        with pytest.raises(QueueFull) as full:
            second.set_class(ServiceClass.BATCH)
        assert full.value.retry_after_s == 60, "only online requests have left"
    for _ in range(100):
        with drain.enter() as place:
            place.set_class(ServiceClass.BATCH)
    with drain.enter() as first, drain.enter() as second:
        first.set_class(ServiceClass.BATCH)
        with pytest.raises(QueueFull) as full:
            second.set_class(ServiceClass.BATCH)
        assert full.value.retry_after_s is not None and full.value.retry_after_s < 2
