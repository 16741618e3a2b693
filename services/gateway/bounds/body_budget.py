"""Bounds the bytes of request bodies in memory, over all requests of the gateway."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from services.common.clock import monotonic_s
from services.core.scheduler.rate import RATE_WINDOW_S, DispatchRate, retry_after_s
from services.gateway.vocabulary.errors import QueueFull


class RetryEstimator:
    """Estimates Retry-After from the recent rates of completed and refused requests.

    Assumes that refused clients retry in order: each waits until as many requests have completed
    as were refused before it.
    """

    def __init__(self, now_s: Callable[[], float] = monotonic_s) -> None:
        self._now_s = now_s
        self._completed = DispatchRate()
        self._refused = DispatchRate()

    def count_completion(self) -> None:
        """Count a completed request."""
        self._completed.note(self._now_s())

    def count_refusal(self) -> float:
        """Count a refused request; returns the seconds until its retry."""
        now_s = self._now_s()
        self._refused.note(now_s)
        ahead = max(1, round(self._refused.per_s(now_s) * RATE_WINDOW_S))
        return retry_after_s(ahead, self._completed.per_s(now_s))


T = TypeVar("T")

BODY_BYTES_MAX = 4 * 2**20
"""Maximum size of a request body in bytes, for HTTP and gRPC."""
BODY_BYTES_PER_ITEM = 32
"""Bytes of JSON that are parsed in the time of tokenizing a character, the unit of `TextPool`."""
SMALL_BYTES = 8 * 2**10
"""Bytes of each body that do not count, so that a few large bodies cannot block small bodies.

The limit of concurrent requests (`Drain`) bounds the sum of these bytes.
"""


class BodyBudget:
    """Bounds the bytes of all request bodies beyond the first `SMALL_BYTES` of each.

    Bytes count on arrival, not by Content-Length: a client cannot reserve bytes without sending
    them.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._retry = RetryEstimator()
        self.bytes_held = 0

    @contextlib.contextmanager
    def lease(self) -> Iterator["BodyLease"]:
        """The bytes of a request's body, released at the end of the block."""
        lease = BodyLease(self)
        try:
            yield lease
        finally:
            lease.keep(0)
            lease.release()

    def take(self, size_bytes: int) -> None:
        """Add bytes. Raises QueueFull if the budget is exhausted."""
        if self.bytes_held + size_bytes > self._bytes_max:
            raise QueueFull(
                f"the gateway already holds {self.bytes_held} bytes of request bodies; retry later",
                retry_after_s=self._retry.count_refusal(),
            )
        self.bytes_held += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Subtract bytes."""
        if size_bytes:
            self._retry.count_completion()
        self.bytes_held -= size_bytes


class BodyLease:
    """The bytes of the budget that a request's body occupies."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size_bytes = 0
        self._held_bytes = 0
        self._kept_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Count further bytes of the body. Raises QueueFull if the budget is exhausted."""
        self._size_bytes += size_bytes
        wanted_bytes = max(0, self._size_bytes - SMALL_BYTES)
        self._budget.take(wanted_bytes - self._held_bytes)
        self._held_bytes = wanted_bytes

    def keep(self, size_bytes: int) -> None:
        """Let `release` keep `size_bytes` of the body until the request ends."""
        self._kept_bytes = size_bytes

    def release(self) -> None:
        """Give back all bytes but the retained ones."""
        held_bytes = min(self._held_bytes, max(0, self._kept_bytes - SMALL_BYTES))
        self._budget.give_back(self._held_bytes - held_bytes)
        self._held_bytes = held_bytes


class TakenOnce(Generic[T]):
    """Holds a parsed body until its last consumer takes it, so that its memory is freed early.

    The parsed objects may occupy dozens of times the bytes that the lease counts, so the callers of
    the consumer hold this object, and no reference to the body.
    """

    def __init__(self, value: T) -> None:
        self._value: T | None = value

    @property
    def value(self) -> T:
        """The parsed body. The caller must not keep a reference."""
        assert self._value is not None, "the parsed body was taken already"
        return self._value

    def take(self) -> T:
        """Remove and return the parsed body."""
        value, self._value = self.value, None
        return value
