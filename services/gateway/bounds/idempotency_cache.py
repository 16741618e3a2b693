"""Cache of responses to requests with an Idempotency-Key, replayed to repeated requests."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from services.common.clock import monotonic_s
from services.gateway.bounds.shared_response import SharedResponse
from services.gateway.vocabulary.errors import IdempotencyKeyReused

M = TypeVar("M")

NAME_BYTES = 1024
"""Approximate overhead of an entry in bytes, without its messages."""


class IdempotencyCache(Generic[M]):
    """Running and recently completed responses, by idempotency key and owner.

    Bounded in number, bytes and time. Evicts the response that completed first. Running responses
    are never evicted for others: if only such are left, a response without room is not cached.
    """

    def __init__(
        self,
        keep_s: float,
        grace_s: float,
        answers_max: int,
        bytes_max: int,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        """`keep_s`: lifetime from the end of a response; `grace_s`: see `SharedResponse`."""
        self._keep_s = keep_s
        self._grace_s = grace_s
        self._answers_max = answers_max
        self._bytes_max = bytes_max
        self._now_s = now_s
        self._answers: dict[Hashable, SharedResponse[M]] = {}
        self._names: dict[SharedResponse[M], Hashable] = {}
        # Completion times, in order of completion.
        self._ended_s: dict[SharedResponse[M], float] = {}
        self.bytes_held = 0

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, name: Hashable) -> bool:
        """Whether the key has a response."""
        self._expire()
        return name in self._answers

    def claim(
        self, name: Hashable, digest: bytes, response_id: str
    ) -> tuple[SharedResponse[M], bool]:
        """The response of a key, and whether it is new: then the caller produces it.

        `digest`: of the request body. `response_id`: for a new response.

        Raises:
            IdempotencyKeyReused: if the key belongs to a request with another body.
        """
        self._expire()
        cached = self._answers.get(name)
        if cached is None:
            return self._begin(name, digest, response_id), True
        if cached.digest != digest:
            raise IdempotencyKeyReused(
                "this Idempotency-Key was used with another request body; repeat that body, or"
                " choose a new key"
            )
        return cached, False

    def has_room(self, size_bytes: int) -> bool:
        """See `ResponseCache`."""
        while self.bytes_held + size_bytes > self._bytes_max:
            if not self._forget_oldest():
                return False
        return True

    def count(self, size_bytes: int) -> None:
        """See `ResponseCache`."""
        self.bytes_held += size_bytes

    def ended(self, answer: SharedResponse[M]) -> None:
        """See `ResponseCache`."""
        self._ended_s[answer] = self._now_s()

    def forget(self, answer: SharedResponse[M]) -> None:
        """See `ResponseCache`."""
        if answer in self._names:
            del self._answers[self._names.pop(answer)]
            self._ended_s.pop(answer, None)
            self.bytes_held -= NAME_BYTES

    def _begin(self, name: Hashable, digest: bytes, response_id: str) -> SharedResponse[M]:
        answer: SharedResponse[M] = SharedResponse(self, digest, response_id, self._grace_s)
        room = self.has_room(NAME_BYTES)
        if room and (len(self._answers) < self._answers_max or self._forget_oldest()):
            self._answers[name] = answer
            self._names[answer] = name
            self.bytes_held += NAME_BYTES
        else:
            answer.evict()
        return answer

    def _expire(self) -> None:
        """Evict responses that completed at least `keep_s` ago."""
        now_s = self._now_s()
        while self._ended_s and now_s - next(iter(self._ended_s.values())) >= self._keep_s:
            self._forget_oldest()

    def _forget_oldest(self) -> bool:
        """Evict the response that completed first; return False if there is none."""
        oldest = next(iter(self._ended_s), None)
        if oldest is None:
            return False
        oldest.evict()
        return True
