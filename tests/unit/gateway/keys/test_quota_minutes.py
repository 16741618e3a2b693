"""Tokens of an owner in any minute, whatever its requests are."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.quota.minute_use import MINUTE_MAX, OUTPUT_PER_S
from services.core.quota.state import FORGET_S
from tests.support.quota_load import MINUTE_S, Ask, QuotaLoad, run

LIMIT = 6000
CONTEXT = 131_072
LENGTHS = st.sampled_from([1, 16, 200, 2000, 8000])


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    longest = draw(LENGTHS)
    return Ask(
        prompt_tokens=draw(st.sampled_from([1, 50, 1000])),
        choices=draw(st.sampled_from([1, 2, 16])),
        length_max=longest,
        length=min(longest, draw(LENGTHS)),
        tokens_per_s=draw(st.sampled_from([5.0, 30.0, OUTPUT_PER_S])),
    )


PAUSES = st.sampled_from([0.0, 0.3, 2.0, 10.0, 61.0])


@settings(max_examples=60)
@given(
    st.sampled_from([1000, 6000, 60_000, 400_000]),
    st.lists(st.tuples(PAUSES, st.sampled_from([1, 3, 100]), asks()), min_size=1, max_size=15),
)
def test_a_minute_has_at_most_a_tenth_more_than_the_limit(
    limit: int, steps: list[tuple[float, int, Ask]]
) -> None:
    """Beyond the largest request that began alone at a full bucket."""
    assert run(limit, steps).excess() <= 1.1


def test_short_outputs_do_not_open_the_door_for_many_long_ones() -> None:
    load = QuotaLoad(LIMIT)
    for _ in range(60):
        assert load.send(Ask())
        load.wait(0.5)
    # Each of them may generate 2000 tokens.
    assert load.flood(Ask(length_max=2000, length=2000), 100) == 3
    load.finish()
    assert load.excess() <= 1.1


def test_choices_count_as_outputs() -> None:
    for ask, admitted in (
        (Ask(choices=8, length_max=200), 4),
        (Ask(choices=128, length_max=40), 1),
    ):
        load = QuotaLoad(LIMIT)
        for _ in range(60):
            assert load.send(Ask())
            load.wait(0.5)
        assert load.flood(ask, 100) == admitted


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
    """The part of requests at a rate that is admitted, for five minutes, `at_once` each time."""
    load, outcomes = QuotaLoad(limit), list[bool]()
    for _ in range(int(5 * MINUTE_S * per_s / at_once)):
        load.wait(at_once / per_s)
        outcomes += [load.send(ask) for _ in range(at_once)]
    load.finish()
    return sum(outcomes) / len(outcomes)


def test_a_client_within_its_limit_is_served_whatever_its_maximum_is() -> None:
    # 100 tokens each, and seven of them run at a time: 48,000 a minute of 60,000.
    short = Ask(prompt_tokens=50, length_max=1000, length=50, tokens_per_s=50)
    assert served(60_000, short, 2, 8) == 1
    # Without a maximum, half of the limit: an output counts with 6,000 at a time.
    unbounded = Ask(prompt_tokens=50, length_max=CONTEXT, length=50, tokens_per_s=50)
    assert served(60_000, unbounded, 1, 5) == 1
    # One after the other always have room, even if one may exceed the limit of a minute.
    assert served(LIMIT, Ask(50, 1, CONTEXT, 50, 50), 1, 0.5) == 1


def test_running_outputs_are_charged_as_they_grow() -> None:
    load = QuotaLoad(LIMIT)
    assert load.send(Ask(length_max=CONTEXT, length=CONTEXT, tokens_per_s=150))
    load.wait(2)
    assert load.full is False
    load.wait(60)
    # 9,300 tokens so far, 6,200 of them paid.
    assert not load.send(Ask())
    assert load.excess() <= MINUTE_MAX
