"""Bookings: time that is kept for the retries of refused requests, so that a Retry-After holds.

Time is divided into slots. A refused request books the time that the workers need for it in the
first slots that have some left, and its Retry-After is the time until then. Its retry is
recognised by owner and `Shape`, so clients send nothing for it. A booking is *used* by a retry
within its window, *lapses* at the end of the window, and *moves* if the client comes early and the
wait has grown beyond the window. Requests that are alike, such as those of a load test, have
further bookings, and each uses the one that is due first. Bookings are not persisted: after a
restart of the scheduler, retries are new requests.
"""

import math
from bisect import insort
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

from services.core.ask import Ask

SLOT_S = 0.5
HORIZON_S = 600.0
"""Latest time of a booking, in seconds from now."""
EARLY_S, LAPSE_S = 0.5, 2.0
"""The window of a booking: a retry may come this much before and after its time."""
SHARE = 0.9
"""Share of the workers' rate that bookings may take."""
RETRIES_MAX = 3
"""Requests like one with a booking, before its time, that count as its retries."""
BOOKINGS_MAX = 65_536
"""Maximum number of bookings, about those of 100 starts per second within `HORIZON_S`."""

_SLOTS = round(HORIZON_S / SLOT_S)
_NUMBERS = 2 * _SLOTS
"""Number of slots that can have bookings: a booking may extend beyond `HORIZON_S`."""
_WHOLE_SECONDS = sum(1 << slot for slot in range(0, _SLOTS, round(1 / SLOT_S)))
"""Bit mask of slots that are whole seconds apart."""
OVERBOOKED_S = 2.0
"""Delay by other owners from which a booking is due at the turn of its owner instead."""
_ROUNDING_S = 1e-6
"""Tolerance for rounding errors of sums of times."""

Shape = tuple[int, ...]
"""What all tries of a request have in common, see `shape_of`."""
_Key = tuple[str, Shape]
_DUE_S = attrgetter("due_s")


def shape_of(ask: Ask) -> Shape:
    """The fingerprint of a request; without one, its token counts and its last prefix hash."""
    if ask.fingerprint:
        return (ask.fingerprint,)
    return ask.prompt_tokens, ask.max_tokens, *ask.prefix.hashes[-1:]


class BookingEnd(StrEnum):
    """Ends of a booking; `RELEASED`: its request was admitted before the window."""

    USED = "used"
    LAPSED = "lapsed"
    MOVED = "moved"
    RELEASED = "released"


@dataclass(frozen=True, slots=True, eq=False)
class Booking:
    """Time for the retry of a request from `due_s` on; `arrival_s`: when its first try arrived."""

    owner: str
    shape: Shape
    due_s: float
    arrival_s: float
    tokens: int
    # Slot numbers and the seconds booked in each, from that in which it is due on, or later if it
    # is overbooked.
    parts: tuple[tuple[int, float], ...]

    @property
    def key(self) -> _Key:
        """Owner and shape."""
        return self.owner, self.shape

    @property
    def slot(self) -> int:
        """Number of the slot in which the retry is due."""
        return _slot_of(self.due_s)

    def retry_after_s(self, now_s: float) -> int:
        """Whole seconds until the booking is due, at least 1."""
        return max(1, math.ceil(self.due_s - now_s - _ROUNDING_S))


@dataclass(slots=True)
class _Slot:
    """Booked time, and the bookings that are due in this slot, with their sums."""

    seconds: float = 0.0
    parts: int = 0  # number of bookings with time here
    tokens: int = 0
    tokens_of: Counter[str] = field(default_factory=Counter)  # by owner
    due: dict[Booking, None] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Whether no time is left."""
        return self.seconds > SLOT_S - _ROUNDING_S


@dataclass(slots=True)
class _Owner:
    """Number of bookings, and the time until which they take the owner's share of the rates."""

    bookings: int = 0
    share_until_s: float = -math.inf


@dataclass(slots=True)
class Calendar:
    """Bookings of a model. Times are monotonic seconds and never decrease.

    Owners with bookings have equal shares: the next booking of an owner is due once its share of
    the rates has served its earlier bookings (start tags, as in start-time fair queueing). It is
    due then even if an owner that came before has booked all time: the queue takes turns by owner.
    """

    # Number of ended bookings.
    ended: Counter[BookingEnd] = field(default_factory=Counter)
    # By key, in order of their time; and how many there are in all.
    _bookings: dict[_Key, list[Booking]] = field(default_factory=dict)
    _count: int = 0
    _owners: dict[str, _Owner] = field(default_factory=dict)
    # Number of requests before the time of the bookings with their key.
    _retries: Counter[_Key] = field(default_factory=Counter)
    # By slot number, from `_first` on; without empty slots.
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _first: int = 0
    # Bit i: no time is left in slot `_first + i`.
    _full: int = 0

    def __len__(self) -> int:
        """Number of bookings that can still be used."""
        return self._count

    def book(
        self,
        now_s: float,
        owner: str,
        shape: Shape,
        tokens: int,
        earliest_s: float,
        rate: float,
        arrival_s: float | None = None,
    ) -> Booking | None:
        """Book time for the retry of a request that is refused at `now_s`.

        `tokens` (at least 1): what it needs to start, of `rate` per second (above 0) that start.
        `earliest_s`: when the requests that wait now will have started. `arrival_s`: when its first
        try arrived, None for now. A request has at most one booking: an earlier one is returned, or
        moved if its window ends before `earliest_s`. After `RETRIES_MAX` retries, a request with
        this shape is another that is alike, and has a booking of its own.

        Returns None if no slot within `HORIZON_S` has time left.
        """
        self.advance(now_s)
        key = owner, shape
        if self._retries[key] <= RETRIES_MAX and (booking := self._first_of(key)) is not None:
            if earliest_s <= booking.due_s + LAPSE_S:
                return booking
            self._end(booking, BookingEnd.MOVED)
            arrival_s = booking.arrival_s
        if self._count >= BOOKINGS_MAX:
            return None
        seconds = tokens / (SHARE * rate)
        start_s, known = earliest_s, self._owners.get(owner)
        if known is not None and len(self._owners) > 1:
            start_s = max(start_s, known.share_until_s)
        due_s = self._first_due_s(now_s, start_s, self._full)
        # An owner with fewer bookings than others has its turn despite theirs.
        own = known.bookings if known is not None else 0
        few = own * len(self._owners) < self._count
        if few and (due_s is None or due_s > start_s + OVERBOOKED_S):
            due_s = self._first_due_s(now_s, start_s, full=0)
        if due_s is None:
            return None
        parts = self._take(_slot_of(due_s), seconds)
        first_try_s = now_s if arrival_s is None else arrival_s
        booking = Booking(owner, shape, due_s, first_try_s, tokens, parts)
        self._add(booking, earliest_s, seconds)
        return booking

    def arrive(self, now_s: float, owner: str, shape: Shape) -> Booking | None:
        """Use the booking of a request that arrives within its window; None if it has none."""
        booking = self.due_booking(now_s, owner, shape)
        if booking is not None:
            self._end(booking, BookingEnd.USED)
        return booking

    @property
    def used_share(self) -> float:
        """Share of the bookings that their clients use."""
        used, lapsed = self.ended[BookingEnd.USED], self.ended[BookingEnd.LAPSED]
        return (used + 1) / (used + lapsed + 1)

    def is_retry(self, owner: str, shape: Shape) -> bool:
        """Whether a request is a retry before its time, by a client that does not obey.

        Counts the request: a client rarely returns more than `RETRIES_MAX` times, so that further
        ones are other requests that are alike.
        """
        key = owner, shape
        if key not in self._bookings:
            return False
        self._retries[key] += 1
        return self._retries[key] <= RETRIES_MAX

    def due_booking(self, now_s: float, owner: str, shape: Shape) -> Booking | None:
        """The booking that `arrive` would use."""
        self.advance(now_s)
        booking = self._first_of((owner, shape))
        return None if booking is None or now_s < booking.due_s - EARLY_S else booking

    def release(self, owner: str, shape: Shape) -> None:
        """End the booking, if any, of a request that is admitted before its window."""
        if (booking := self._first_of((owner, shape))) is not None:
            self._end(booking, BookingEnd.RELEASED)

    def tokens_ahead(self, now_s: float, owner: str | None, tokens: int, rate: float) -> int:
        """Tokens of the retries that are expected before a request with a lower rank starts.

        `tokens` are before it without them and its own, and `rate` start per second. If owners take
        turns, the retries of each other `owner` have at most as many as its own and these; None if
        they do not.
        """
        if not self._slots:
            return 0
        share, end_s = self.used_share, now_s + tokens / rate
        others = len(self._owners) - (owner in self._owners)
        own = total = booked = 0.0
        for number in range(self._first, self._first + _NUMBERS):
            if number * SLOT_S >= end_s + booked / rate:
                break
            if (slot := self._slots.get(number)) is not None:
                total += share * slot.tokens
                booked = total
                if owner is not None:
                    own += share * slot.tokens_of.get(owner, 0)
                    booked = min(total, own + others * (tokens + own))
        return round(booked)

    def advance(self, now_s: float) -> None:
        """End the bookings whose window is over at `now_s`."""
        first = _slot_of(now_s - LAPSE_S)
        if first <= self._first:
            return
        over = [slot for number, slot in self._slots.items() if number < first]
        for booking in [booking for slot in over for booking in slot.due]:
            self._end(booking, BookingEnd.LAPSED)
        self._full >>= first - self._first
        self._first = first

    def check_invariants(self) -> None:
        """Raise AssertionError if the bookings contradict each other."""
        bookings = [booking for alike in self._bookings.values() for booking in alike]
        assert len(bookings) == self._count <= BOOKINGS_MAX
        assert self._retries.keys() <= self._bookings.keys()
        seconds, parts = defaultdict[int, float](float), Counter[int]()
        for key, alike in self._bookings.items():
            assert alike and alike == sorted(alike, key=_DUE_S)
            assert all(key == booking.key for booking in alike)
        for booking in bookings:
            assert booking in self._slots[booking.slot].due
            for number, part_s in booking.parts:
                seconds[number] += part_s
                parts[number] += 1
        assert sum(len(slot.due) for slot in self._slots.values()) == len(bookings)
        assert parts == Counter({number: slot.parts for number, slot in self._slots.items()})
        for number, slot in self._slots.items():
            assert self._first <= number < self._first + _NUMBERS
            assert math.isclose(slot.seconds, seconds[number], abs_tol=_ROUNDING_S)
            assert slot.seconds <= SLOT_S + _ROUNDING_S
            owned = Counter[str]()
            for booking in slot.due:
                owned[booking.owner] += booking.tokens
            assert slot.tokens == sum(owned.values()) and slot.tokens_of == owned
            assert slot.parts or slot.due
            assert slot.full == bool(self._full >> (number - self._first) & 1)
        owned = Counter(booking.owner for booking in bookings)
        assert owned == {name: owner.bookings for name, owner in self._owners.items()}

    def _first_of(self, key: _Key) -> Booking | None:
        """The booking with this key that is due first; None if there is none."""
        return self._bookings[key][0] if key in self._bookings else None

    def _first_due_s(self, now_s: float, start_s: float, full: int) -> float | None:
        """The first time from `start_s` on, whole seconds from now, whose slot is not `full`."""
        wait_s = max(1, math.ceil(min(start_s - now_s, HORIZON_S + 1) - _ROUNDING_S))
        slots = round((HORIZON_S - wait_s) / SLOT_S) + 1
        if slots <= 0:
            return None
        full >>= _slot_of(now_s + wait_s) - self._first
        free = ~full & _WHOLE_SECONDS & ((1 << slots) - 1)
        if not free:
            return None
        return now_s + wait_s + ((free & -free).bit_length() - 1) * SLOT_S

    def _take(self, number: int, seconds: float) -> tuple[tuple[int, float], ...]:
        """Take `seconds` from the slots from `number` on; returns slot numbers and seconds.

        Time after the last slot is not booked.
        """
        parts = list[tuple[int, float]]()
        while seconds > 0:
            free = ~(self._full >> (number - self._first))
            number += (free & -free).bit_length() - 1
            if number >= self._first + _NUMBERS:
                break
            slot = self._slots.setdefault(number, _Slot())
            part_s = min(seconds, SLOT_S - slot.seconds)
            parts.append((number, part_s))
            slot.seconds += part_s
            slot.parts += 1
            seconds -= part_s
            self._mark(number, slot)
            number += 1
        return tuple(parts)

    def _add(self, booking: Booking, earliest_s: float, seconds: float) -> None:
        """Enter a booking whose parts are taken, and charge its owner."""
        insort(self._bookings.setdefault(booking.key, []), booking, key=_DUE_S)
        self._count += 1
        slot = self._slots.setdefault(booking.slot, _Slot())
        slot.due[booking] = None
        slot.tokens += booking.tokens
        slot.tokens_of[booking.owner] += booking.tokens
        owner = self._owners.setdefault(booking.owner, _Owner())
        owner.bookings += 1
        start_s = max(earliest_s, min(owner.share_until_s, booking.due_s))
        owner.share_until_s = start_s + seconds * len(self._owners)

    def _end(self, booking: Booking, end: BookingEnd) -> None:
        """Remove a booking and return its time."""
        self.ended[end] += 1
        key = booking.key
        self._bookings[key].remove(booking)
        self._count -= 1
        if not self._bookings[key]:
            del self._bookings[key]
            del self._retries[key]  # no error if it has none
        slot = self._slots[booking.slot]
        del slot.due[booking]
        slot.tokens -= booking.tokens
        slot.tokens_of[booking.owner] -= booking.tokens
        for number, part_s in booking.parts:
            slot = self._slots[number]
            slot.seconds -= part_s
            slot.parts -= 1
            self._mark(number, slot)
        for number in {booking.slot, *(number for number, _ in booking.parts)}:
            slot = self._slots[number]
            if not slot.parts and not slot.due:
                del self._slots[number]
        owner = self._owners[booking.owner]
        owner.bookings -= 1
        if not owner.bookings:
            del self._owners[booking.owner]

    def _mark(self, number: int, slot: _Slot) -> None:
        """Note whether a slot is full."""
        bit = 1 << (number - self._first)
        self._full = self._full | bit if slot.full else self._full & ~bit


def _slot_of(time_s: float) -> int:
    """Number of the slot that contains a time."""
    return math.floor(time_s / SLOT_S)
