"""The time for which an unreachable worker is avoided."""

from services.gateway.cluster.worker_link import PAUSE_FIRST_S, PAUSE_MAX_S, CircuitBreaker


def test_open_time_doubles_with_consecutive_failures() -> None:
    breaker, now_s, pauses = CircuitBreaker(), 0.0, []
    for _ in range(8):
        breaker.record_failure("a", now_s)
        avoided, pause_s = breaker.avoided(now_s)
        assert avoided == ("a",)
        breaker.record_failure("a", now_s + pause_s / 2)  # a connection that had begun before
        assert breaker.avoided(now_s)[1] == pause_s
        pauses.append(pause_s)
        now_s += pause_s
        assert breaker.avoided(now_s) == ((), 0.0)
    assert pauses == [min(PAUSE_FIRST_S * 2**count, PAUSE_MAX_S) for count in range(8)]


def test_a_success_resets_the_breaker() -> None:
    breaker = CircuitBreaker()
    breaker.record_failure("a", 0.0)
    breaker.record_failure("a", PAUSE_FIRST_S)
    breaker.record_success("a")
    assert breaker.avoided(PAUSE_FIRST_S) == ((), 0.0)
    breaker.record_failure("a", 9.0)
    assert breaker.avoided(9.0) == (("a",), PAUSE_FIRST_S)


def test_the_shortest_open_time_is_reported() -> None:
    breaker = CircuitBreaker()
    breaker.record_failure("a", 0.0)
    breaker.record_failure("b", 0.5)
    assert breaker.avoided(0.75) == (("a", "b"), PAUSE_FIRST_S - 0.75)
    breaker.keep_only(frozenset({"b"}))
    assert breaker.avoided(0.75) == (("b",), PAUSE_FIRST_S - 0.25)
