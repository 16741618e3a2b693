"""Tokens of an owner in any minute, for all kinds of requests."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.quota.minute_use import MINUTE_MAX
from services.core.quota.state import FORGET_S
from tests.support.quota_load import MINUTE_S, Ask, QuotaLoad, run

LIMIT = 6000
CONTEXT = 131_072
SPEEDS = st.sampled_from([5.0, 30.0, 100.0, 300.0, 1000.0, 10_000.0, 1_000_000.0])
LENGTHS = st.sampled_from([1, 16, 200, 2000, 8000, 100_000])


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    longest = draw(LENGTHS)
    return Ask(
        prompt_tokens=draw(st.sampled_from([1, 50, 1000])),
        choices=draw(st.sampled_from([1, 2, 16])),
        length_max=longest,
        length=min(longest, draw(LENGTHS)),
        tokens_per_s=draw(SPEEDS),
        piece=draw(st.sampled_from([1, 40, 1000])),
    )


PAUSES = st.sampled_from([0.0, 0.3, 2.0, 10.0, 61.0])


@settings(max_examples=60)
@given(
    st.sampled_from([1000, 6000, 60_000, 400_000]),
    st.sampled_from([0, 80]),
    st.lists(st.tuples(PAUSES, st.sampled_from([1, 3, 100]), asks()), min_size=1, max_size=15),
)
def test_any_minute_exceeds_the_limit_by_at_most_a_tenth(
    limit: int, short: int, steps: list[tuple[float, int, Ask]]
) -> None:
    """Beyond the largest request that began alone at a full bucket; some short outputs first, so
    that short ones are expected.
    """
    load = run(limit, [(0.5, 1, Ask())] * short + [(MINUTE_S, 1, Ask()), *steps])
    assert load.excess() <= MINUTE_MAX


@pytest.mark.parametrize("tokens_per_s", [100, 300, 1000, 100_000])
@pytest.mark.parametrize("limit", [6000, 100_000, 400_000])
@pytest.mark.parametrize("choices", [1, 4])
def test_short_outputs_do_not_admit_many_long_ones(
    limit: int, tokens_per_s: float, choices: int
) -> None:
    load = QuotaLoad(limit)
    for _ in range(80):
        load.send(Ask())
        load.wait(0.5)
    load.wait(MINUTE_S + 1)
    # The long ones do not start alone.
    assert load.send(Ask())
    load.flood(Ask(5, choices, 32_000, 32_000, tokens_per_s), 500)
    load.finish()
    assert load.excess() <= MINUTE_MAX
    # Part of the minute is used, and the client learns why the rest is not.
    assert sum(tokens for _, _, tokens in load.used) > 0.5 * limit
    assert load.ended_early or tokens_per_s == 100
    for request in load.ended_early:
        assert request.error is not None and request.error.retry_after_s is not None
        assert "this output ended early" in request.error.message


def test_debt_is_paid_before_it_is_forgotten() -> None:
    load = QuotaLoad(LIMIT)
    assert load.send(Ask(length_max=CONTEXT, length=CONTEXT, tokens_per_s=10_000))
    load.finish()
    load.wait(FORGET_S + 60)
    assert not load.send(Ask()), "ten more minutes of debt"
    load.wait(CONTEXT / LIMIT * MINUTE_S)
    assert load.send(Ask())
    load.wait(FORGET_S + 60)
    assert "alice" not in load.quotas.state._uses


def served(limit: int, ask: Ask, at_once: int, per_s: float) -> float:
    """The served part of requests at a rate, for five minutes, `at_once` each time."""
    load, outcomes = QuotaLoad(limit), list[bool]()
    for _ in range(int(5 * MINUTE_S * per_s / at_once)):
        load.wait(at_once / per_s)
        outcomes += [load.send(ask) for _ in range(at_once)]
    load.finish()
    assert not load.ended_early
    return sum(outcomes) / len(outcomes)


def test_max_tokens_does_not_block_a_client_within_its_limit() -> None:
    # 100 tokens each, and seven of them run at a time: 48,000 a minute of 60,000.
    for longest in (50, 1000, CONTEXT):
        ask = Ask(prompt_tokens=50, length_max=longest, length=50, tokens_per_s=50)
        assert served(60_000, ask, 2, 8) == 1
    assert served(LIMIT, Ask(50, 1, CONTEXT, 50, 50), 1, 0.5) == 1


@settings(max_examples=60)
@given(
    limit=st.sampled_from([6000, 60_000, 400_000]),
    length=st.sampled_from([1, 50, 300, 1500]),
    tokens_per_s=SPEEDS,
    longest=st.sampled_from([1500, CONTEXT]),
    piece=st.sampled_from([1, 40, 1000]),
)
def test_outputs_within_the_limit_never_end_early(
    limit: int, length: int, tokens_per_s: float, longest: int, piece: int
) -> None:
    """A steady 90 % of the limit is served, mostly at once."""
    ask = Ask(20, 1, longest, length, tokens_per_s, piece)
    per_s = min(10.0, 0.9 * limit / MINUTE_S / (20 + length))
    assert served(limit, ask, 1, per_s) >= 0.9


def test_few_outputs_start_after_some_have_ended_early() -> None:
    """Twelve at a time, while the quota of a minute covers five."""
    load = QuotaLoad(1000)
    for _ in range(60):
        assert load.send(Ask())
        load.wait(0.5)
    ended_early, served = [], []
    for _ in range(6):
        load.wait(2 * MINUTE_S)
        before = len(load.ended_early)
        admitted = load.flood(Ask(2, 1, 200, 200), 12)
        load.finish()
        ended_early.append(len(load.ended_early) - before)
        served.append(admitted - ended_early[-1])
    assert ended_early[0] > 0 and ended_early[-1] == 0
    assert served[-1] >= 3


@pytest.mark.parametrize("limit", [6000, 10_000])
@pytest.mark.parametrize("tokens_per_s", [50, 1000])
def test_small_requests_do_not_starve_those_without_a_maximum(
    limit: int, tokens_per_s: float
) -> None:
    """One client sends a small request each second; another one of the same owner long ones."""
    load, outcomes = QuotaLoad(limit), list[bool]()
    small = Ask(10, 1, 16, 16, 11)
    long = Ask(20, 1, 32_748, 100, tokens_per_s)
    for second in range(1200):
        load.wait(1)
        load.send(small)
        if second % 2 == 0:
            outcomes.append(load.send(long))
    load.finish()
    assert not load.ended_early
    # 5,160 tokens a minute.
    assert sum(outcomes) >= 0.98 * len(outcomes)


def test_running_outputs_are_charged_as_they_grow() -> None:
    load = QuotaLoad(LIMIT)
    assert load.send(Ask(length_max=CONTEXT, length=CONTEXT, tokens_per_s=150))
    load.wait(2)
    assert load.full is False
    load.wait(60)
    # 9,300 tokens so far, 6,200 of them paid.
    assert not load.send(Ask())
    assert load.excess() <= MINUTE_MAX
