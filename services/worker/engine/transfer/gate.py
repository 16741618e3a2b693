"""Makes bulk transfers (KV, parameters) pause while activations of a pipeline are being sent."""

from collections.abc import Callable
from threading import Lock

from services.worker.engine.transfer.errors import LaneError
from services.worker.engine.transfer.frame import Frame
from services.worker.engine.transfer.lane import Lane


class ActivationGate:
    """Counts the activation frames being sent; thread-safe.

    A thread calls `enter` before it sends a frame and `leave` when the frame was sent.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._lock = Lock()
        self._on_clear: list[Callable[[], None]] = []

    @property
    def busy(self) -> bool:
        """Whether bulk transfers should pause."""
        return self._inside > 0

    def enter(self) -> None:
        """Make bulk transfers pause from now on; each call needs a `leave`."""
        with self._lock:
            self._inside += 1

    def leave(self) -> None:
        """Undo an `enter`. Raises ValueError without a preceding `enter`."""
        with self._lock:
            if self._inside == 0:
                raise ValueError("left the activation gate without having entered it")
            self._inside -= 1
            clear = self._inside == 0
        if clear:
            for callback in self._on_clear:
                callback()

    def send(self, lane: Lane, peer: str, frame: Frame) -> None:
        """Send an activation frame; bulk transfers pause until the lane has sent it.

        Raises LaneFull, PeerUnknown.
        """
        self.enter()
        try:
            sent = lane.send(peer, frame)
        except LaneError:
            self.leave()
            raise
        sent.when_done(self.leave)

    def on_clear(self, callback: Callable[[], None]) -> None:
        """Register a callback that runs whenever no activation frame is being sent any more.

        Call this before the first `enter`. The callback must return at once: it runs on the thread
        that called `leave`.
        """
        self._on_clear.append(callback)
