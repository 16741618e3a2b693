"""A ZeroMQ socket for asyncio, for the frames between a worker's servicer and engine.

Frames arrive at every engine iteration. `zmq.asyncio` keeps a queue of futures per direction and
checks all of them at every event, which took a tenth of the servicer's time. Here only a single
task may wait for a frame.
"""

import asyncio
import contextlib

import zmq

from services.common.timeouts import timeout

_POLLIN = int(zmq.POLLIN)  # an int, since comparing the enum takes as long as receiving a frame
FULL_PAUSE_S = 0.005
"""Retry interval for sending while the socket's buffer is full."""


class FrameSocket:
    """An end of a connection; a single task may receive, any task may send."""

    def __init__(self, kind: int, frames_max: int) -> None:
        """`kind`: ZeroMQ socket type, such as `zmq.PAIR`; `frames_max`: buffer per direction."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._socket.setsockopt(zmq.SNDHWM, frames_max)
        self._socket.setsockopt(zmq.RCVHWM, frames_max)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: asyncio.Future[None] | None = None
        self._sending = asyncio.Lock()
        self._closed = asyncio.Event()

    def bind(self, address: str) -> None:
        """Listen on `address`."""
        self._socket.bind(address)

    def connect(self, address: str) -> None:
        """Connect to `address`."""
        self._socket.connect(address)

    async def recv(self) -> bytes:
        """Receive the next frame; raises CancelledError if the socket is closed during the wait."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.fileno(), self._on_readable)
        while not self._readable:
            assert self._reader is None, "only a single task may receive"
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._socket.recv(zmq.NOBLOCK)

    async def send(self, frame: bytes) -> None:
        """Send a frame, after all frames before it, once there is room."""
        async with self._sending:
            while not self._closed.is_set() and not self._try_send(frame):
                with contextlib.suppress(TimeoutError):
                    async with timeout(FULL_PAUSE_S):
                        await self._closed.wait()

    def close(self) -> None:
        """Close the socket; unsent frames are discarded."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        if self._reader is not None:
            self._reader.cancel()
        self._closed.set()
        self._socket.close()

    def _try_send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            # ZeroMQ's descriptor is edge-triggered, and sending consumes the edge of a frame that
            # has arrived: check for frames.
            self._on_readable()
        return True

    @property
    def _readable(self) -> bool:
        """Whether a frame can be received; reading the events also re-arms the descriptor."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def _on_readable(self) -> None:
        """Wake the reader, because a frame may have arrived."""
        if self._reader is None:
            # If no task receives, re-arm the descriptor, or the event loop would spin.
            self._socket.getsockopt(zmq.EVENTS)
        elif not self._reader.done():
            self._reader.set_result(None)
