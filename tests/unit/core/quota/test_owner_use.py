"""Use of a single owner at a single gateway: buckets, places, reservations."""

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from services.core.quota.limits import Exceeded, Limit, QuotaLimits
from services.core.quota.owner_use import (
    OUTPUT_GUESS,
    OUTPUT_GUESS_MIN,
    REQUESTS_BURST_MIN,
    TOKENS_BURST_MIN,
    OwnerUse,
    Reservation,
)
from services.core.quota.shared_rate import BURST, SharedRate


def use(
    requests: int | None = None, tokens: int | None = None, places: int | None = None
) -> OwnerUse:
    return OwnerUse.begin(QuotaLimits(requests, tokens, places), 1, 0.0)


def reserved(result: Reservation | Exceeded) -> Reservation:
    assert isinstance(result, Reservation), result
    return result


def exceeded(result: Reservation | Exceeded | None) -> Exceeded:
    assert isinstance(result, Exceeded), result
    return result


def test_all_requests_are_admitted_without_limits() -> None:
    free = use()
    assert all(free.enter(0.0) is None for _ in range(1000))
    assert reserved(free.reserve(10**9, (10**9,), 0.0))
    assert free.remaining_limits(0.0) == {}


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 30)), max_size=60), st.integers(1, 3000))
def test_use_never_exceeds_limit_plus_bucket(
    asks: list[tuple[float, int]], per_minute: int
) -> None:
    rate, now_s, taken = SharedRate(REQUESTS_BURST_MIN, 1), 0.0, 0
    for pause_s, count in asks:
        now_s += pause_s
        for _ in range(count):
            rate.note_demand(1, per_minute, now_s)
            taken += rate.take(1, per_minute, now_s) is None
        bucket = max(BURST * per_minute, min(REQUESTS_BURST_MIN, per_minute), 1)
        assert taken <= bucket + per_minute / 60 * now_s + 1e-6


@given(st.floats(0.01, 100), st.integers(1, 5000), st.integers(1, 20_000))
def test_an_owner_that_waits_for_retry_after_is_admitted(
    first: float, per_minute: int, amount: int
) -> None:
    rate = SharedRate(TOKENS_BURST_MIN, 1)
    rate.take(first, per_minute, 0.0)
    for _ in range(3):
        rate.note_demand(amount, per_minute, 1.0)
        wait_s = rate.take(amount, per_minute, 1.0)
    if wait_s is not None:
        assert rate.take(amount, per_minute, 1.0 + 0.99 * wait_s) is not None
        assert rate.take(amount, per_minute, 1.001 + 1.001 * wait_s) is None


def test_a_lowered_limit_applies_at_once() -> None:
    owner = use(requests=1_000_000)
    assert owner.enter(0.0) is None
    owner.limits = QuotaLimits(requests_per_minute=10)
    assert sum(owner.enter(0.0) is None for _ in range(1000)) <= 2 * REQUESTS_BURST_MIN


def test_returned_tokens_do_not_exceed_the_bucket() -> None:
    owner = use(tokens=60_000)
    for second in range(120):
        for _ in range(10):
            result = owner.reserve(100, (), float(second))
            if isinstance(result, Reservation):
                owner.settle(result, 0, False, second + 0.5)
    standing = owner.remaining_limits(120.0)[Limit.TOKENS]
    assert standing.remaining <= 2 * BURST * 60_000


def test_concurrent_places_and_their_retry_times() -> None:
    owner = use(places=2)
    assert owner.enter(0.0) is None and owner.enter(0.0) is None
    refused = exceeded(owner.enter(0.0))
    assert (refused.limit, refused.maximum, refused.remaining) == (Limit.CONCURRENT, 2, 0)
    for _ in range(50):
        owner.leave(20.0)
        assert owner.enter(0.0) is None
    assert exceeded(owner.enter(0.0)).retry_after_s == approx(10, rel=0.1), "one of two in 20 s"


def test_a_refused_request_takes_nothing() -> None:
    owner = use(requests=60, places=1)
    assert owner.enter(0.0) is None
    left = owner.remaining_limits(0.0)[Limit.REQUESTS].remaining
    for _ in range(10):
        assert exceeded(owner.enter(0.0)).limit is Limit.CONCURRENT
    assert owner.remaining_limits(0.0)[Limit.REQUESTS].remaining == left == REQUESTS_BURST_MIN - 1
    assert owner.running == 1


def test_unserved_requests_are_refunded() -> None:
    owner = use(requests=60)
    for _ in range(100):
        assert owner.enter(0.0) is None
        owner.refund(0.0)
    assert owner.remaining_limits(0.0)[Limit.REQUESTS].remaining == REQUESTS_BURST_MIN


def test_tokens_are_reserved_and_settled() -> None:
    owner = use(tokens=60_000)
    size = int(BURST * 60_000)

    def remaining() -> int:
        return owner.remaining_limits(0.0)[Limit.TOKENS].remaining

    result = reserved(owner.reserve(100, (10, 10_000), 0.0))
    assert result.charged == 100 + 10 + OUTPUT_GUESS
    assert remaining() == size - result.charged
    owner.settle(result, 500, True, 0.0)
    assert remaining() == size - 600
    # One that was not served costs nothing.
    owner.settle(reserved(owner.reserve(100, (1000,), 0.0)), 0, False, 0.0)
    assert remaining() == size - 600
    # The guess follows what outputs were.
    for length, guess in ((500, 500), (20, OUTPUT_GUESS_MIN)):
        for _ in range(100):
            owner.settle(reserved(owner.reserve(0, (10_000,), 0.0)), length, True, 0.0)
            owner.tokens.give_back(length, 60_000, 0.0)
            owner.used.take_back(length, 0.0)
            owner.charged.take_back(length, 0.0)
        assert reserved(owner.reserve(0, (10_000,), 0.0)).charged == guess
    assert reserved(owner.reserve(0, (20,), 0.0)).charged == 20


def test_an_owner_in_debt_is_refused_before_parsing() -> None:
    owner = use(tokens=6000)
    owner.settle(reserved(owner.reserve(100, (10_000,), 0.0)), 5000, True, 0.0)
    refused = exceeded(owner.enter(0.0))
    assert (refused.limit, refused.remaining) == (Limit.TOKENS, 0)
    assert refused.retry_after_s is not None and 28 < refused.retry_after_s < 60
    assert owner.enter(refused.retry_after_s) is None


def test_a_prompt_beyond_the_limit_has_no_retry_after() -> None:
    owner = use(tokens=6000)
    refused = exceeded(owner.reserve(6001, (1,), 0.0))
    assert refused.retry_after_s is None and refused.asked == 6001
    # A large one is served when the bucket is full, and the next ones wait for it.
    assert reserved(owner.reserve(6000, (1,), 0.0))
    wait_s = exceeded(owner.reserve(1, (1,), 0.0)).retry_after_s
    assert wait_s is not None and 35 < wait_s < 45


def test_standings_round_trip() -> None:
    owner = use(requests=60, tokens=6000)
    for _ in range(REQUESTS_BURST_MIN):
        assert owner.enter(0.0) is None
    standing = owner.remaining_limits(0.0)[Limit.REQUESTS]
    assert (standing.maximum, standing.remaining) == (60, 0)
    assert standing.reset_s == approx(5)
    later = owner.remaining_limits(2.0)[Limit.REQUESTS]
    assert (later.remaining, later.reset_s) == (2, approx(3))
