"""Tells bulk transfers that activations wait, so that they pause."""

from collections.abc import Callable
from threading import Lock

from services.worker.engine.transfer.errors import LaneError
from services.worker.engine.transfer.frame import Frame
from services.worker.engine.transfer.lane import Lane


class ActivationGate:
    """Counts the activations that wait or are being sent; any thread may use it.

    A thread enters before it sends activations, and leaves when they are sent.
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
        """Make activations urgent from now on; needs one `leave` for each call."""
        with self._lock:
            self._inside += 1

    def leave(self) -> None:
        """The counterpart of `enter`. Raises ValueError without one."""
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
        """Have the last thread that leaves call `callback`, each time that the gate clears.

        The callback must return at once. Register it before the first `enter`.
        """
        self._on_clear.append(callback)
