"""A ZeroMQ socket on the event loop, for frames that come at every iteration.

`zmq.asyncio` keeps a queue of futures for each direction and looks at all of them whenever anything
happens, which costs a servicer a tenth of its time. Here one reader waits for one frame.
"""

import asyncio
import contextlib

import zmq

from services.common.timeouts import timeout

_POLLIN = int(zmq.POLLIN)  # the flag itself takes as long to compare as a frame to receive
FULL_PAUSE_S = 0.005
"""Between looks at a socket that takes no frame."""


class FrameSocket:
    """One end of a connection; one task may receive, any may send."""

    def __init__(self, kind: int, frames_max: int) -> None:
        """`kind`: of ZeroMQ, such as `zmq.PAIR`; `frames_max`: may wait in each direction."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._socket.setsockopt(zmq.SNDHWM, frames_max)
        self._socket.setsockopt(zmq.RCVHWM, frames_max)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._watching: asyncio.AbstractEventLoop | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._sending = asyncio.Lock()
        self._closed = asyncio.Event()

    def bind(self, address: str) -> None:
        """Listen there."""
        self._socket.bind(address)

    def connect(self, address: str) -> None:
        """Reach the other end there."""
        self._socket.connect(address)

    async def recv(self) -> bytes:
        """The next frame; cancelled if the socket is closed meanwhile."""
        if self._watching is None:
            self._watching = asyncio.get_running_loop()
            self._watching.add_reader(self._socket.fileno(), self._on_readable)
        while not self._readable:
            assert self._waiting is None, "one task receives"
            self._waiting = self._watching.create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return self._socket.recv(zmq.NOBLOCK)

    async def send(self, frame: bytes) -> None:
        """Send a frame once there is room for it, and all before it are sent."""
        async with self._sending:
            while not self._closed.is_set() and not self._sent(frame):
                with contextlib.suppress(TimeoutError):
                    async with timeout(FULL_PAUSE_S):
                        await self._closed.wait()

    def close(self) -> None:
        """Close it; what was not sent is dropped."""
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
            # The descriptor tells once that something has come, and sending takes note of it.
            self._on_readable()
        return True

    @property
    def _readable(self) -> bool:
        """Whether a frame is here; the descriptor is not readable again before the next one."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def _on_readable(self) -> None:
        """There may be a frame."""
        if self._waiting is None:
            self._socket.getsockopt(zmq.EVENTS)  # or the descriptor would stay readable
        elif not self._waiting.done():
            self._waiting.set_result(None)
