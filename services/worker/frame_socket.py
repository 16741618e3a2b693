"""A ZeroMQ socket on the event loop, for frames that come at every iteration.

`zmq.asyncio` keeps a queue of futures for each direction and looks at all of them whenever anything
happens, which costs a servicer a tenth of its time. Here one reader waits for one frame.
"""

import asyncio

import zmq

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

    def bind(self, address: str) -> None:
        """Listen there."""
        self._socket.bind(address)

    async def recv(self) -> bytes:
        """The next frame."""
        if self._watching is None:
            self._watching = asyncio.get_running_loop()
            self._watching.add_reader(self._socket.fileno(), self._look)
        while not self._readable:
            self._waiting = self._watching.create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return self._socket.recv(zmq.NOBLOCK)

    async def send(self, frame: bytes) -> None:
        """Send a frame once there is room for it."""
        while True:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
                break
            except zmq.Again:
                await asyncio.sleep(FULL_PAUSE_S)
            finally:
                # The descriptor tells once that something has come, and sending takes note of it.
                self._look()

    def close(self) -> None:
        """Close it; what was not sent is dropped."""
        if self._watching is not None:
            self._watching.remove_reader(self._socket.fileno())
            self._watching = None
        self._socket.close()

    @property
    def _readable(self) -> bool:
        """Whether a frame is here; the descriptor is not readable again before the next one."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def _look(self) -> None:
        """There may be a frame."""
        if self._waiting is None:
            self._socket.getsockopt(zmq.EVENTS)  # or the descriptor would stay readable
        elif not self._waiting.done():
            self._waiting.set_result(None)
