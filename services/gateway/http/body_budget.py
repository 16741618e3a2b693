"""Bounds the bytes of request bodies in memory, over all requests."""

import contextlib
from collections.abc import Iterator

from services.gateway.errors import QueueFull


class BodyBudget:
    """What all requests together may hold of their bodies.

    Bytes count as they come and not as a header announces them, so that a client must send what it
    blocks.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes_held = 0

    @contextlib.contextmanager
    def lease(self) -> Iterator["BodyLease"]:
        """One request's share, given back at the end."""
        lease = BodyLease(self)
        try:
            yield lease
        finally:
            lease.release()

    def take(self, size_bytes: int) -> None:
        """Count bytes in; raises QueueFull if they are too many."""
        if self.bytes_held + size_bytes > self._bytes_max:
            raise QueueFull(
                f"the gateway is reading {self.bytes_held} bytes of request bodies already; "
                "send the request again shortly"
            )
        self.bytes_held += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count bytes out."""
        self.bytes_held -= size_bytes


class BodyLease:
    """What one request holds of its body."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Hold more; raises QueueFull if the gateway holds too much already."""
        self._budget.take(size_bytes)
        self._held_bytes += size_bytes

    def release(self) -> None:
        """Hold nothing any more."""
        self._budget.give_back(self._held_bytes)
        self._held_bytes = 0
