"""Bounds the bytes of request bodies in memory, over all requests."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from services.common.clock import monotonic_s
from services.core.scheduler.rate import RATE_WINDOW_S, DispatchRate, retry_after_s
from services.gateway.vocabulary.errors import QueueFull


class RetryEstimator:
    """Counts the requests that left and the requests that were refused lately.

    Refused clients come again, so they are told to wait until as many requests have left.
    """

    def __init__(self, now_s: Callable[[], float] = monotonic_s) -> None:
        self._now_s = now_s
        self._left = DispatchRate()
        self._refused = DispatchRate()
        self._numbers = itertools.count()

    def leave(self) -> None:
        """A request has left."""
        self._left.note(self._now_s())

    def refuse(self) -> float:
        """Count a refused request; returns the seconds until a retry: 1 to 60, with jitter."""
        now_s = self._now_s()
        self._refused.note(now_s)
        ahead = max(1, round(self._refused.per_s(now_s) * RATE_WINDOW_S))
        return retry_after_s(str(next(self._numbers)), ahead, self._left.per_s(now_s))


T = TypeVar("T")

BODY_BYTES_MAX = 4 * 2**20
"""Largest body of one request, at every door."""
BODY_BYTES_PER_ITEM = 32
"""Parsing is that much faster than the tokenising that the pool's sizes are made for."""
SMALL_BYTES = 8 * 2**10
"""So much of each body is free, so that a few large ones never keep small ones out.

How many requests there are is bounded elsewhere, and with it what is free.
"""


class BodyBudget:
    """What all requests together may hold of their bodies beyond the first `SMALL_BYTES` of each.

    Bytes count as they come and not as a header announces them, so that a client must send what it
    blocks.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._retry = RetryEstimator()
        self.bytes_held = 0

    @contextlib.contextmanager
    def lease(self) -> Iterator["BodyLease"]:
        """One request's share, given back at the end."""
        lease = BodyLease(self)
        try:
            yield lease
        finally:
            lease.keep(0)
            lease.release()

    def take(self, size_bytes: int) -> None:
        """Count bytes in; raises QueueFull if they are too many."""
        if self.bytes_held + size_bytes > self._bytes_max:
            raise QueueFull(
                f"the gateway is reading {self.bytes_held} bytes of request bodies already; "
                "send the request again later",
                retry_after_s=self._retry.refuse(),
            )
        self.bytes_held += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count bytes out."""
        if size_bytes:
            self._retry.leave()
        self.bytes_held -= size_bytes


class BodyLease:
    """What one request holds of its body."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size_bytes = 0
        self._held_bytes = 0
        self._kept_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Count more of the body; raises QueueFull if the gateway holds too much already."""
        self._size_bytes += size_bytes
        wanted_bytes = max(0, self._size_bytes - SMALL_BYTES)
        self._budget.take(wanted_bytes - self._held_bytes)
        self._held_bytes = wanted_bytes

    def keep(self, size_bytes: int) -> None:
        """So much of the body is needed until its request is over."""
        self._kept_bytes = size_bytes

    def release(self) -> None:
        """Hold no more than what is kept."""
        held_bytes = min(self._held_bytes, max(0, self._kept_bytes - SMALL_BYTES))
        self._budget.give_back(self._held_bytes - held_bytes)
        self._held_bytes = held_bytes


class TakenOnce(Generic[T]):
    """What was parsed of a body, on its way to the code that needs it last.

    Its objects may take dozens of times the bytes that a lease counts, so code that passes them on
    has to forget them.
    """

    def __init__(self, value: T) -> None:
        self._value: T | None = value

    @property
    def value(self) -> T:
        """What was parsed; not to be kept."""
        assert self._value is not None, "it was taken"
        return self._value

    def take(self) -> T:
        """What was parsed, which is then no longer here."""
        value, self._value = self.value, None
        return value
