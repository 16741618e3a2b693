"""Caches responses to requests with an Idempotency-Key, to replay them to repeated requests.

The key of an entry is the client's Idempotency-Key with the owner of its API key.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from services.common.clock import monotonic_s
from services.gateway.bounds.shared_response import SharedResponse
from services.gateway.vocabulary.errors import IdempotencyKeyReused

M = TypeVar("M")

ENTRY_BYTES = 1024
"""Approximate overhead of an entry in bytes, without its messages."""


class IdempotencyCache(Generic[M]):
    """Running and recently completed responses, by idempotency key and owner.

    Bounded in number, bytes and time. Evicts the response that completed first, and never a
    running response to make room: if all are running, a further response is not cached.
    """

    def __init__(
        self,
        keep_s: float,
        grace_s: float,
        responses_max: int,
        bytes_max: int,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        """`keep_s`: lifetime from the end of a response; `grace_s`: see `SharedResponse`."""
        self._keep_s = keep_s
        self._grace_s = grace_s
        self._responses_max = responses_max
        self._bytes_max = bytes_max
        self._now_s = now_s
        self._responses: dict[Hashable, SharedResponse[M]] = {}
        self._keys: dict[SharedResponse[M], Hashable] = {}
        # Completion times, in order of completion.
        self._ended_s: dict[SharedResponse[M], float] = {}
        self.bytes_held = 0

    def __len__(self) -> int:
        return len(self._responses)

    def __contains__(self, key: Hashable) -> bool:
        """Whether a response is cached for the key, running or completed."""
        self._expire()
        return key in self._responses

    def claim(
        self, key: Hashable, digest: bytes, response_id: str
    ) -> tuple[SharedResponse[M], bool]:
        """Return the response of a key, and whether it is new: then the caller must produce it.

        `digest`: of the request body. `response_id`: for a new response.

        Raises:
            IdempotencyKeyReused: if the key belongs to a request with another body.
        """
        self._expire()
        cached = self._responses.get(key)
        if cached is None:
            return self._begin(key, digest, response_id), True
        if cached.digest != digest:
            raise IdempotencyKeyReused(
                "this Idempotency-Key was used with another request body; repeat that body, or"
                " choose a new key"
            )
        return cached, False

    def has_room(self, size_bytes: int) -> bool:
        """See `ResponseCache`."""
        while self.bytes_held + size_bytes > self._bytes_max:
            if not self._evict_oldest():
                return False
        return True

    def count(self, size_bytes: int) -> None:
        """See `ResponseCache`."""
        self.bytes_held += size_bytes

    def complete(self, response: SharedResponse[M]) -> None:
        """See `ResponseCache`."""
        self._ended_s[response] = self._now_s()

    def remove(self, response: SharedResponse[M]) -> None:
        """See `ResponseCache`."""
        if response in self._keys:
            del self._responses[self._keys.pop(response)]
            self._ended_s.pop(response, None)
            self.bytes_held -= ENTRY_BYTES

    def _begin(self, key: Hashable, digest: bytes, response_id: str) -> SharedResponse[M]:
        response: SharedResponse[M] = SharedResponse(self, digest, response_id, self._grace_s)
        room = self.has_room(ENTRY_BYTES)
        if room and (len(self._responses) < self._responses_max or self._evict_oldest()):
            self._responses[key] = response
            self._keys[response] = key
            self.bytes_held += ENTRY_BYTES
        else:
            response.evict()
        return response

    def _expire(self) -> None:
        """Evict responses that completed at least `keep_s` ago."""
        now_s = self._now_s()
        while self._ended_s and now_s - next(iter(self._ended_s.values())) >= self._keep_s:
            self._evict_oldest()

    def _evict_oldest(self) -> bool:
        """Evict the response that completed first; return False if there is none."""
        oldest = next(iter(self._ended_s), None)
        if oldest is None:
            return False
        oldest.evict()
        return True
