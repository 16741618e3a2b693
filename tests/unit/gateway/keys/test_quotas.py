"""Requests within the limits of their owners, and the headers of responses."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.core.quota.limits import Limit, QuotaLimits
from services.gateway.keys.principal import ANYONE, Principal
from services.gateway.keys.quotas import QuotaMetrics, Quotas, duration
from services.gateway.vocabulary.errors import ClientDeadline, Expired, OverQuota, QueueFull
from tests.support.clock import Clock
from tests.support.exposition import samples, value


class Case:
    def __init__(self, **limits: int) -> None:
        self.clock = Clock()
        self.registry = CollectorRegistry()
        metrics = QuotaMetrics(self.registry)
        self.quotas = Quotas(metrics, self.clock)
        self.alice = Principal("alice", limits=QuotaLimits(**limits))
        given = self.alice.limits.given().items()
        metrics.set_limits({("alice", limit): value for limit, value in given})

    def send(self, fails: type[Exception] | None = None, output_tokens: int = 0) -> None:
        """A whole request."""
        with self.quotas.entered(self.alice) as lease:
            assert lease is not None
            lease.reserve(100, [50], lambda error: None)
            if output_tokens:
                assert lease.count_output(output_tokens)
            if fails is not None:
                raise fails("it broke")

    def metric(self, name: str, **labels: str) -> float | None:
        """A metric of the owner."""
        exported = samples(generate_latest(self.registry).decode())
        return value(exported, f"tideserve_gateway_quota_{name}", owner="alice", **labels)

    def remaining(self, limit: str) -> int:
        return int(dict(self.quotas.headers(self.alice))[f"x-ratelimit-remaining-{limit}"])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.012, "12ms"),
        (0.9995, "1s"),
        (1, "1s"),
        (1.5, "1.5s"),
        (8.64, "8.64s"),
        (60, "1m0s"),
        (86.4, "1m26.4s"),
        (360, "6m0s"),
        (3600, "1h0m0s"),
        (3661.25, "1h1m1.25s"),
    ],
)
def test_times_are_formatted_as_by_openai(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_no_headers_are_sent_without_limits() -> None:
    case = Case()
    assert case.quotas.headers(case.alice) == case.quotas.headers(ANYONE) == ()
    with case.quotas.entered(case.alice) as lease:
        assert lease is None


def test_every_response_has_limit_headers() -> None:
    case = Case(requests_per_minute=60, tokens_per_minute=60_000)
    case.send(output_tokens=10)
    assert dict(case.quotas.headers(case.alice)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "60000",
        "x-ratelimit-remaining-tokens": str(3000 - 110),
        "x-ratelimit-reset-tokens": "110ms",
    }
    only_places = Case(concurrent=3)
    assert only_places.quotas.headers(only_places.alice) == ()


def test_a_refusal_has_retry_after_and_is_counted() -> None:
    case = Case(requests_per_minute=60)
    for _ in range(5):
        case.send()
    with pytest.raises(OverQuota, match="limit of 60 requests per minute") as caught:
        case.send()
    error = caught.value
    assert (error.status, error.code, error.kind) == (429, "rate_limit_exceeded", "requests")
    assert error.retry_after_s == pytest.approx(1)
    assert case.metric("refusals_total", limit="requests") == 1
    assert case.metric("used_total", limit="requests") == 5
    case.clock.now_s += error.retry_after_s
    case.send()


def test_concurrent_places_are_released_however_a_request_ends() -> None:
    case = Case(concurrent=1)
    for fails in (None, QueueFull, Expired, ValueError, KeyboardInterrupt):
        if fails is None:
            case.send()
        else:
            with pytest.raises(fails), case.quotas.entered(case.alice):
                raise fails("it broke")
    assert case.metric("running") == 0
    with (
        case.quotas.entered(case.alice),
        pytest.raises(OverQuota, match=r"alice has reached its limit of 1 concurrent"),
        case.quotas.entered(case.alice),
    ):
        pass
    assert case.metric("refusals_total", limit="concurrent") == 1
    with case.quotas.entered(case.alice):
        assert case.metric("running") == 1
    assert case.metric("running") == 0


def test_unserved_requests_are_not_charged() -> None:
    case = Case(requests_per_minute=60, tokens_per_minute=60_000)
    for fails in (QueueFull, Expired):
        with pytest.raises(fails):
            case.send(fails)
        assert (case.remaining("requests"), case.remaining("tokens")) == (5, 3000)
        assert case.metric("used_total", limit="requests") == 0
    # The requests before the failure were served.
    with pytest.raises(QueueFull):
        case.send(QueueFull, output_tokens=20)
    assert (case.remaining("requests"), case.remaining("tokens")) == (4, 2880)
    assert case.metric("used_total", limit="requests") == 1
    assert case.metric("used_total", limit="tokens") == 120
    # The prompt of a client that hangs up, or waits too briefly, has been read.
    with pytest.raises(ValueError):
        case.send(ValueError)
    assert (case.remaining("requests"), case.remaining("tokens")) == (3, 2780)
    with pytest.raises(ClientDeadline):
        case.send(ClientDeadline)
    assert (case.remaining("requests"), case.remaining("tokens")) == (2, 2680)


def test_tokens_are_refused_after_they_are_counted_and_the_place_is_free_again() -> None:
    case = Case(tokens_per_minute=60_000, concurrent=1)
    with case.quotas.entered(case.alice) as lease:
        assert lease is not None
        with pytest.raises(OverQuota, match="the prompt has 60001 tokens") as caught:
            lease.reserve(60_001, [1], lambda error: None)
        assert caught.value.retry_after_s is None
    for _ in range(20):
        case.send()
        case.clock.now_s += 0.1
    with pytest.raises(OverQuota, match="this request may need") as caught:
        for _ in range(100):
            case.send()
    assert caught.value.kind == "tokens" and caught.value.retry_after_s
    case.clock.now_s += caught.value.retry_after_s
    case.send()


def test_a_token_of_a_heavy_model_costs_more() -> None:
    case = Case(tokens_per_minute=60_000)
    with case.quotas.entered(case.alice) as lease:
        assert lease is not None
        lease.reserve(100, [50], lambda error: None, 2.5)
        for _ in range(3):
            assert lease.count_output(1)
    assert case.metric("used_total", limit="tokens") == 250 + 8
    with case.quotas.entered(case.alice) as lease:
        assert lease is not None
        with pytest.raises(OverQuota):
            lease.reserve(24_001, [1], lambda error: None, 2.5)


def test_changed_limits_apply_at_once() -> None:
    case = Case(requests_per_minute=5)
    for _ in range(5):
        case.send()
    with pytest.raises(OverQuota):
        case.send()
    case.alice = Principal("alice", limits=QuotaLimits(requests_per_minute=100_000))
    case.clock.now_s += 1
    for _ in range(1000):
        case.send()


def test_owners_without_limits_are_forgotten() -> None:
    registry = CollectorRegistry()
    metrics = QuotaMetrics(registry)
    metrics.set_limits({("alice", Limit.TOKENS): 1000, ("alice", Limit.CONCURRENT): 3})
    metrics.count_usage("alice", Limit.TOKENS, 7)
    # Owners without limits do not query their state.
    metrics.count_usage("alice", Limit.REQUESTS, 1)
    metrics.set_running("bob", 1)
    exported = samples(generate_latest(registry).decode())
    assert value(exported, "tideserve_gateway_quota_limit", owner="alice", limit="concurrent") == 3
    assert value(exported, "tideserve_gateway_quota_used_total", owner="alice", limit="tokens") == 7
    assert {dict(labels).get("owner") for _, labels in exported} == {"alice"}
    metrics.set_limits({("bob", Limit.REQUESTS): 5})
    metrics.count_refusal("alice", Limit.TOKENS)
    metrics.set_running("alice", 1)
    exported = samples(generate_latest(registry).decode())
    assert {dict(labels).get("owner") for _, labels in exported} == {"bob"}
