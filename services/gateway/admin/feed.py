"""Feeds the live page of the admin port by server-sent events.

A single task polls the cluster's state for all viewers; it is idle without viewers.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec

from services.common.clock import monotonic_s
from services.common.timeouts import wait_set
from services.gateway.vocabulary.errors import ServiceUnavailable

PERIOD_S = 0.25
# Maximum worker rows sent per second; large clusters are polled less often than `PERIOD_S`.
WORKERS_PER_S = 400
HEARTBEAT_S = 2.0
VIEWERS_MAX = 32
RETRY_AFTER_S = 30.0
HEARTBEAT = b": heartbeat\n\n"


class _Viewer:
    """Holds only the newest state, so that a slow viewer has no backlog."""

    def __init__(self) -> None:
        self.frame: bytes | None = None
        self.changed = asyncio.Event()


class Feed:
    """Polls the cluster's state, at most four times a second, while there are viewers."""

    def __init__(self, poll: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._poll = poll
        self._viewers: set[_Viewer] = set()
        self._wanted = asyncio.Event()
        self._frame: bytes | None = None
        self._closed = False

    async def run(self) -> None:
        """Poll and publish until cancelled."""
        while True:
            await self._wanted.wait()
            began_s = monotonic_s()
            state = await self._poll()
            self._publish(b"data: " + msgspec.json.encode(state) + b"\n\n")
            period_s = max(PERIOD_S, len(state["workers"]) / WORKERS_PER_S)
            await asyncio.sleep(max(0.0, began_s + period_s - monotonic_s()))

    def close(self) -> None:
        """End all streams and refuse new viewers."""
        self._closed = True
        for viewer in self._viewers:
            viewer.changed.set()

    @contextlib.contextmanager
    def viewer(self) -> Iterator[AsyncIterator[bytes]]:
        """The feed of a viewer as server-sent events, while the context lasts.

        Raises:
            ServiceUnavailable: if there are too many viewers, or the gateway stops.
        """
        if self._closed or len(self._viewers) >= VIEWERS_MAX:
            raise ServiceUnavailable(
                "this gateway is shutting down; open the page of another gateway"
                if self._closed
                else f"the feed already has {VIEWERS_MAX} viewers; close a page and retry",
                retry_after_s=RETRY_AFTER_S,
            )
        viewer = _Viewer()
        self._viewers.add(viewer)
        self._wanted.set()
        try:
            yield self._frames(viewer)
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._wanted.clear()
                self._frame = None

    async def _frames(self, viewer: _Viewer) -> AsyncIterator[bytes]:
        # Send the last state at once: a new viewer must not wait for a change.
        yield self._frame or HEARTBEAT
        while not self._closed:
            await wait_set(viewer.changed, HEARTBEAT_S)
            frame, viewer.frame = viewer.frame, None
            yield frame or HEARTBEAT

    def _publish(self, frame: bytes) -> None:
        # Send changes only; heartbeats keep the connections alive.
        if frame == self._frame:
            return
        self._frame = frame
        for viewer in self._viewers:
            viewer.frame = frame
            viewer.changed.set()
