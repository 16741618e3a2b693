"""Requests that run at this gateway, to be cancelled; and the ids that clients chose lately."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from services.common.clock import monotonic_s
from services.gateway.errors import DuplicateRequest
from services.gateway.request_record import RequestRecord

REMEMBERED_MAX = 100_000
REMEMBER_S = 600.0

Key = tuple[str, str]
"""Owner and id: nobody cancels, or blocks, the requests of others."""


class RunningRequests:
    """What runs, by the id of its response and by the one that its client chose.

    An id that a client chose is refused for `REMEMBER_S` from its request's beginning, so that a
    request that is sent twice runs once; unless no token came of it, since then it can be sent
    again. The oldest of more than `REMEMBERED_MAX` ids are forgotten earlier. Other gateways do not
    know them.
    """

    def __init__(
        self, remembered_max: int = REMEMBERED_MAX, now_s: Callable[[], float] = monotonic_s
    ) -> None:
        self._remembered_max = remembered_max
        self._now_s = now_s
        self._cancels: dict[Key, asyncio.Event] = {}
        # In the order of their beginning.
        self._began_s: dict[Key, float] = {}

    @contextlib.contextmanager
    def entered(self, record: RequestRecord, chosen_id: str | None) -> Iterator[asyncio.Event]:
        """Count a request in, and out at the end; what it yields is set when it is cancelled.

        Raises:
            DuplicateRequest: if its client chose the id for another one a short time ago.
        """
        cancelled, owner = asyncio.Event(), record.principal.owner
        keys = [(owner, record.response_id)]
        if chosen_id is not None:
            keys.append((owner, chosen_id))
            self._claim(keys[-1])
        for key in keys:
            self._cancels[key] = cancelled
        try:
            yield cancelled
        finally:
            for key in keys:
                self._cancels.pop(key, None)
            if chosen_id is not None and record.first_token_s is None:
                self._began_s.pop(keys[-1], None)

    def cancel(self, owner: str, request_id: str) -> bool:
        """End a request of that owner; whether it was here."""
        found = self._cancels.get((owner, request_id))
        if found is None:
            return False
        found.set()
        return True

    def _claim(self, key: Key) -> None:
        now_s = self._now_s()
        self._forget(now_s)
        if key in self._began_s or key in self._cancels:
            raise DuplicateRequest(
                "a request with this 'request_id' was sent less than"
                f" {REMEMBER_S / 60:g} minutes ago; choose another id for another request",
                param="request_id",
            )
        self._began_s[key] = now_s

    def _forget(self, now_s: float) -> None:
        """Drop what is too old, and the oldest of too many."""
        while self._began_s:
            key, began_s = next(iter(self._began_s.items()))
            if now_s - began_s < REMEMBER_S and len(self._began_s) < self._remembered_max:
                return
            del self._began_s[key]
