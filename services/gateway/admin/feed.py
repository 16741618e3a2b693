"""The live feed: one producer, shared by all viewers; without viewers nothing is asked."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec

from services.common.clock import monotonic_s
from services.common.timeouts import wait_set
from services.gateway.vocabulary.errors import ServiceUnavailable

PERIOD_S = 0.25
# Workers whose state is sent in a second; larger clusters are shown less often.
WORKERS_PER_S = 400
HEARTBEAT_S = 2.0
VIEWERS_MAX = 32
RETRY_AFTER_S = 30.0
HEARTBEAT = b": the feed lives\n\n"


class _Viewer:
    """Sees the newest state only, so that nothing piles up for a slow viewer."""

    def __init__(self) -> None:
        self.frame: bytes | None = None
        self.news = asyncio.Event()


class Feed:
    """Looks at the cluster four times a second while there are viewers."""

    def __init__(self, look: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._look = look
        self._viewers: set[_Viewer] = set()
        self._wanted = asyncio.Event()
        self._frame: bytes | None = None
        self._closed = False

    async def run(self) -> None:
        """Produce until cancelled."""
        while True:
            await self._wanted.wait()
            began_s = monotonic_s()
            state = await self._look()
            self._publish(b"data: " + msgspec.json.encode(state) + b"\n\n")
            period_s = max(PERIOD_S, len(state["workers"]) / WORKERS_PER_S)
            await asyncio.sleep(max(0.0, began_s + period_s - monotonic_s()))

    def close(self) -> None:
        """End all streams; there are no new ones."""
        self._closed = True
        for viewer in self._viewers:
            viewer.news.set()

    @contextlib.contextmanager
    def viewer(self) -> Iterator[AsyncIterator[bytes]]:
        """The feed of one viewer, as server-sent events, while the context lasts.

        Raises:
            ServiceUnavailable: if there are too many, or the gateway stops.
        """
        if self._closed or len(self._viewers) >= VIEWERS_MAX:
            raise ServiceUnavailable(
                "this gateway is shutting down; open the page of another"
                if self._closed
                else f"{VIEWERS_MAX} viewers watch already; close a page and try again",
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
        # A later page gets the state at once, without a change.
        yield self._frame or HEARTBEAT
        while not self._closed:
            await wait_set(viewer.news, HEARTBEAT_S)
            frame, viewer.frame = viewer.frame, None
            yield frame or HEARTBEAT

    def _publish(self, frame: bytes) -> None:
        if frame == self._frame:
            return
        self._frame = frame
        for viewer in self._viewers:
            viewer.frame = frame
            viewer.news.set()
