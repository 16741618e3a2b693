"""Bookings of the scheduler's calendar: properties under random refusals and retries."""

import math
import random
import time
from collections import Counter, defaultdict

import pytest

from services.core.ask import Ask
from services.core.prefix.block_hash import ThinHashes
from services.core.scheduler.calendar import (
    EARLY_S,
    HORIZON_S,
    LAPSE_S,
    RETRIES_MAX,
    SHARE,
    SLOT_S,
    Booking,
    BookingEnd,
    Calendar,
    shape_of,
)

RATE = 1000.0
"""Tokens that start per second."""


def booked(calendar: Calendar, now_s: float, name: int, **given: object) -> Booking:
    """Book 100 tokens for the request `name`."""
    known: dict[str, object] = {"owner": "a", "tokens": 100, "earliest_s": now_s, "rate": RATE}
    booking = calendar.book(now_s, shape=(name,), **known | given)  # type: ignore[arg-type]
    assert booking is not None
    calendar.check_invariants()
    return booking


def test_a_retry_within_the_window_uses_its_booking() -> None:
    calendar = Calendar()
    booking = booked(calendar, 10.25, 1, earliest_s=13.5)
    assert (booking.due_s, booking.retry_after_s(10.25)) == (14.25, 4)
    assert calendar.arrive(booking.due_s - EARLY_S - 0.01, "a", (1,)) is None
    assert calendar.arrive(booking.due_s + LAPSE_S, "a", (1,)) is booking
    assert booking.arrival_s == 10.25
    assert calendar.arrive(booking.due_s + LAPSE_S, "a", (1,)) is None
    assert calendar.ended == {BookingEnd.USED: 1} and len(calendar) == 0


def test_an_early_client_keeps_its_booking() -> None:
    calendar = Calendar()
    booking = booked(calendar, 0.0, 1, earliest_s=5.0)
    assert booked(calendar, 0.5, 1, earliest_s=6.0) is booking
    assert booking.retry_after_s(0.5) == 5 and len(calendar) == 1


def test_a_booking_moves_if_the_wait_has_grown_beyond_its_window() -> None:
    calendar = Calendar()
    first = booked(calendar, 0.0, 1, earliest_s=5.0)
    moved = booked(calendar, 1.0, 1, earliest_s=first.due_s + LAPSE_S + 1)
    assert moved.due_s >= first.due_s + LAPSE_S + 1
    assert moved.arrival_s == 0.0 and len(calendar) == 1
    assert calendar.ended == {BookingEnd.MOVED: 1}


def test_a_lapsed_booking_returns_its_time() -> None:
    calendar = Calendar()
    # 18 requests fill the slots that are due after 1 s, 2 s and so on.
    filled = [booked(calendar, 0.0, name) for name in range(18)]
    assert filled[-1].due_s > filled[0].due_s
    assert calendar.tokens_ahead(0.0, "a", 5000, RATE) == 1800
    late_s = filled[-1].due_s + LAPSE_S + SLOT_S
    assert calendar.arrive(late_s, "a", (0,)) is None
    calendar.check_invariants()
    assert calendar.tokens_ahead(late_s, "a", 10**6, RATE) == 0 and len(calendar) == 0
    assert calendar.ended == {BookingEnd.LAPSED: 18}


def test_a_released_booking_returns_its_time_at_once() -> None:
    calendar = Calendar()
    # The slot one second from now has time for four requests and a part of the fifth.
    first = [booked(calendar, 0.0, name) for name in range(5)]
    assert {booking.due_s for booking in first} == {1.0}
    assert booked(calendar, 0.0, 5).due_s == 2.0
    calendar.release("a", (2,))
    assert booked(calendar, 0.0, 6).due_s == 1.0


def test_requests_similar_to_a_booked_one_count_as_its_retries() -> None:
    calendar = Calendar()
    booked(calendar, 0.0, 1)
    assert not calendar.is_retry("a", (2,))
    assert [calendar.is_retry("a", (1,)) for _ in range(5)] == [True] * 3 + [False] * 2
    calendar.check_invariants()
    calendar.release("a", (1,))
    calendar.check_invariants()
    assert not calendar.is_retry("a", (1,))


def test_a_booking_belongs_to_its_owner() -> None:
    calendar = Calendar()
    booking = booked(calendar, 0.0, 1)
    calendar.release("b", (1,))
    assert calendar.arrive(booking.due_s, "b", (1,)) is None
    assert calendar.arrive(booking.due_s, "a", (1,)) is booking


def test_a_prompt_longer_than_a_slot_takes_the_slots_behind() -> None:
    calendar = Calendar()
    long = booked(calendar, 0.0, 1, tokens=9000)
    assert long.due_s == 1.0
    # 9,000 tokens at 900 per second.
    assert booked(calendar, 0.0, 2).due_s == 11.0
    assert calendar.tokens_ahead(0.0, "a", 1001, RATE) == 9000


def test_a_full_calendar_makes_no_booking() -> None:
    calendar = Calendar()
    due = list[float]()
    while (booking := calendar.book(0.3, "a", (len(due),), 450, 0.3, RATE)) is not None:
        due.append(booking.due_s)
    calendar.check_invariants()
    # A slot of each second is full.
    assert due == [0.3 + second for second in range(1, 601)]
    assert calendar.book(0.3, "a", (-1,), 1, math.inf, RATE) is None


def test_the_shape_falls_back_to_known_fields() -> None:
    ask = Ask("r", "m", 30, 7, prefix=ThinHashes(8, (1, 2)))
    assert shape_of(ask) == (30, 7, 2)
    assert shape_of(Ask("r", "m", 30, 7)) == (30, 7)
    assert shape_of(Ask("r", "m", 31, 7, fingerprint=9)) == (9,)


def refuse(calendar: Calendar, now_s: float, name: int, owner: str = "a") -> Booking | None:
    """Count and refuse a request without a due booking."""
    calendar.is_retry(owner, (name,))
    return calendar.book(now_s, owner, (name,), 100, now_s, RATE)


@pytest.mark.parametrize("seed", range(10))
def test_identical_requests_get_different_return_times(seed: int) -> None:
    """As many identical requests are served per second as different ones."""
    rng = random.Random(seed)
    calendar, returns = Calendar(), list[float]()
    for number in range(60):
        booking = refuse(calendar, number * 0.01, 1)
        assert booking is not None
        returns.append(booking.due_s + rng.uniform(-0.4, 1.0))
        calendar.check_invariants()
    # The first four requests may be one and its retries.
    assert len(calendar) == 60 - RETRIES_MAX
    used = list[Booking]()
    for now_s in sorted(returns):
        if (booking := calendar.arrive(now_s, "a", (1,))) is not None:
            assert -EARLY_S <= now_s - booking.due_s <= LAPSE_S + SLOT_S
            used.append(booking)
        calendar.check_invariants()
    assert len(set(used)) == len(used) >= 50
    # 9 requests per second, in slots that are due at whole seconds.
    per_s = Counter(math.floor(booking.due_s) for booking in used)
    assert max(per_s.values()) <= 10


def test_the_first_of_identical_bookings_is_released() -> None:
    calendar = Calendar()
    bookings = {refuse(calendar, 0.0, 1) for _ in range(30)}
    first, *others = sorted(booking.due_s for booking in bookings if booking is not None)
    calendar.release("a", (1,))
    calendar.check_invariants()
    assert first < others[-1] and len(calendar) == len(others)
    assert calendar.due_booking(others[0] - EARLY_S - 0.01, "a", (1,)) is None
    assert calendar.due_booking(others[0], "a", (1,)) is not None
    # The requests count as retries until the last booking has ended.
    assert not calendar.is_retry("a", (1,))
    calendar.advance(others[-1] + LAPSE_S + SLOT_S)
    calendar.check_invariants()
    assert len(calendar) == 0
    refuse(calendar, others[-1] + LAPSE_S + SLOT_S, 1)
    assert calendar.is_retry("a", (1,))


@pytest.mark.parametrize("seed", range(20))
def test_random_refusals_and_retries_keep_the_invariants(seed: int) -> None:
    """No request has two bookings, no slot is overbooked, no owner uses the booking of another."""
    rng = random.Random(seed)
    calendar, now_s = Calendar(), rng.uniform(0, 1000)
    # The last booking of each client.
    known: dict[tuple[str, tuple[int, ...]], Booking] = {}
    for step in range(800):
        now_s += rng.choice((0.0, 0.01, 0.3, 3.0)) * rng.random()
        owner, shape = rng.choice("abc"), (rng.randrange(60),)
        key, before = (owner, shape), known.get((owner, shape))
        if rng.random() < 0.3 and before is not None:
            now_s = max(now_s, before.due_s + rng.uniform(-EARLY_S, LAPSE_S))
        used = calendar.arrive(now_s, owner, shape)
        if used is not None:
            assert used is before and used.key == key
            assert -EARLY_S <= now_s - used.due_s <= LAPSE_S + SLOT_S
            del known[key]
        elif before is not None and -EARLY_S <= now_s - before.due_s <= LAPSE_S:
            pytest.fail("a retry within its window has no booking")
        tokens = rng.choice((10, 100, 3000))
        earliest_s = now_s + rng.choice((0.0, 1.0, 20.0))
        booking = calendar.book(now_s, owner, shape, tokens, earliest_s, RATE)
        assert booking is not None
        held = before is not None and used is None and now_s <= before.due_s + LAPSE_S
        if booking is not before:
            assert booking.due_s >= earliest_s - 1e-6 and booking.due_s >= now_s + 1 - 1e-6
            assert math.isclose(booking.due_s - now_s, booking.retry_after_s(now_s), abs_tol=1e-5)
            assert math.isclose(sum(part_s for _, part_s in booking.parts), tokens / (SHARE * RATE))
            if held:
                assert before is not None and earliest_s > before.due_s + LAPSE_S
        known[key] = booking
        if step % 10 == 0:
            calendar.check_invariants()
    calendar.check_invariants()
    calendar.advance(now_s + HORIZON_S + LAPSE_S + 1)
    assert len(calendar) == 0 and calendar.tokens_ahead(now_s, "a", 1, RATE) == 0


@pytest.mark.parametrize("seed", range(5))
def test_owners_share_the_slots_equally(seed: int) -> None:
    """Of the first seconds an owner with many refusals gets no more than one with fewer."""
    rng = random.Random(seed)
    calendar, due = Calendar(), defaultdict[str, list[float]](list)
    refused = ["flood"] * 900 + ["b"] * 100 + ["c"] * 100
    rng.shuffle(refused)
    for name, owner in enumerate(refused):
        now_s = name * 0.01
        booking = calendar.book(now_s, owner, (name,), 100, now_s, RATE)
        assert booking is not None
        due[owner].append(booking.due_s)
    calendar.check_invariants()
    # 9 requests per second: those of b and c together with as many of the flood last 33 s.
    assert max(due["b"] + due["c"]) <= 45
    early = Counter(owner for owner in due for due_s in due[owner] if due_s <= 45)
    assert early["b"] == early["c"] == 100 and early["flood"] <= 1.6 * 100


@pytest.mark.parametrize("seed", range(5))
def test_a_late_owner_gets_its_share(seed: int) -> None:
    """An owner that has booked all time delays another no longer than equal shares would."""
    rng = random.Random(seed)
    calendar, due = Calendar(), defaultdict[str, list[float]](list)
    # Bookings are due whole seconds later, and a second has two slots.
    for now_s in (9.5, 10.0):
        while calendar.book(now_s, "flood", (rng.getrandbits(60),), 100, now_s, RATE):
            pass
    for name, owner in enumerate(rng.sample(["b"] * 90 + ["c"] * 45 + ["flood"] * 90, 225)):
        booking = calendar.book(10.0, owner, (name,), 100, 10.0, RATE)
        if booking is not None:
            due[owner].append(booking.due_s)
        if name % 20 == 0:
            calendar.check_invariants()
    assert not due["flood"]
    # 9 requests per second, a third of them for each owner.
    assert len(due["b"]) == 90 and max(due["b"]) <= 10 + 90 / 3 + 3
    assert len(due["c"]) == 45 and max(due["c"]) <= 10 + 45 / 3 + 3
    # Each of the three passes a request of another owner with as many tokens as are before it.
    assert calendar.tokens_ahead(300.0, "new", 100, RATE) == 3 * 100
    calendar.advance(600.0)
    calendar.check_invariants()


@pytest.mark.parametrize("now_s", [5.0, 20.0])
def test_the_retries_of_another_owner_pass_a_request_only_in_their_turn(now_s: float) -> None:
    calendar = Calendar()
    for name in range(400):
        booked(calendar, 0.0, name)
    all_due = calendar.tokens_ahead(now_s, None, 500, RATE)
    assert all_due == calendar.tokens_ahead(now_s, "a", 500, RATE) > 2000
    assert calendar.tokens_ahead(now_s, "b", 500, RATE) == 500
    booked(calendar, 0.0, 1000, owner="b")
    # Its own retry of 100 tokens, and at most as many of the other as it has with it.
    assert calendar.tokens_ahead(now_s, "b", 500, RATE) == 100 + 600


def test_a_single_owner_has_all_slots() -> None:
    calendar, due = Calendar(), list[float]()
    for name in range(900):
        now_s = name * 0.01
        booking = calendar.book(now_s, "", (name,), 100, now_s, RATE)
        assert booking is not None
        due.append(booking.due_s)
    # At 9 requests per second: bookings take all time but that of the first second.
    assert max(due) <= 900 / 9 + 5


def test_cost_of_many_refusals_is_bounded() -> None:
    """A refusal costs a small part of handling its ask, even with a full calendar."""
    calendar = Calendar()
    began_s = time.perf_counter()
    for name in range(20_000):
        now_s = name * 0.001
        calendar.arrive(now_s, "a", (name,))
        calendar.book(now_s, "a", (name,), 40, now_s + 10, RATE)
        calendar.tokens_ahead(now_s, "a", 30_000, RATE)
    # About 20 µs each on the machines of today.
    assert (time.perf_counter() - began_s) / 20_000 < 0.002
