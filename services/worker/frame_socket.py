"""A ZeroMQ socket for asyncio, for frames that arrive at every engine iteration.

`zmq.asyncio` keeps a queue of futures per direction and checks all of them on every event, which
took a tenth of the servicer's time. Here a single reader waits for a frame.
"""

import asyncio
import contextlib

import zmq

from services.common.timeouts import timeout

_POLLIN = int(zmq.POLLIN)  # comparing the enum flag takes as long as receiving a frame
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
        self._watching: asyncio.AbstractEventLoop | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._sending = asyncio.Lock()
        self._closed = asyncio.Event()

    def bind(self, address: str) -> None:
        """Listen on `address`."""
        self._socket.bind(address)

    def connect(self, address: str) -> None:
        """Connect to `address`."""
        self._socket.connect(address)

    async def recv(self) -> bytes:
        """Receive the next frame; raises CancelledError if the socket is closed meanwhile."""
        if self._watching is None:
            self._watching = asyncio.get_running_loop()
            self._watching.add_reader(self._socket.fileno(), self._on_readable)
        while not self._readable:
            assert self._waiting is None, "only a single task may receive"
            self._waiting = self._watching.create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return self._socket.recv(zmq.NOBLOCK)

    async def send(self, frame: bytes) -> None:
        """Send a frame, after all frames before it, once there is room."""
        async with self._sending:
            while not self._closed.is_set() and not self._sent(frame):
                with contextlib.suppress(TimeoutError):
                    async with timeout(FULL_PAUSE_S):
                        await self._closed.wait()

    def close(self) -> None:
        """Close the socket and drop unsent frames."""
        if self._watching is not None:
            self._watching.remove_reader(self._socket.fileno())
            self._watching = None
        if self._waiting is not None:
            self._waiting.cancel()
        self._closed.set()
        self._socket.close()

    def _sent(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            # ZeroMQ's descriptor is edge-triggered and sending consumes the edge: check for frames.
            self._on_readable()
        return True

    @property
    def _readable(self) -> bool:
        """Whether a frame can be received; also re-arms the descriptor."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def _on_readable(self) -> None:
        """Wake the reader, because a frame may have arrived."""
        if self._waiting is None:
            # Without a reader, re-arm the descriptor, or the event loop would spin.
            self._socket.getsockopt(zmq.EVENTS)
        elif not self._waiting.done():
            self._waiting.set_result(None)
