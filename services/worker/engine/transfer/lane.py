"""The interface of a lane: non-blocking exchange of frames with peers.

A worker has two lanes, for activations (small, urgent) and for bulk data (KV blocks, parameters).
Frames of a peer arrive in order and exactly once, or the peer is reported lost. Exactly one end of
a pair connects; the other end must have called `expect` before.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from services.worker.engine.transfer.errors import LaneError
from services.worker.engine.transfer.frame import Frame


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker process; a restarted worker has another incarnation."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """The connection to the peer is open: frames flow."""

    peer: Identity


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection has ended, and frames in transit are lost. Reported once per connection.

    The incarnation of a peer that was never reached is empty.
    """

    peer: Identity
    reason: str


LaneEvent = PeerConnected | PeerLost


@dataclass(slots=True, eq=False)
class Sent:
    """The future of a sent frame; thread-safe.

    Done without an error means that the transport has sent the frame, not that the peer read it.
    """

    done: bool = False  # the payload may be reused
    error: LaneError | None = None  # why the frame was not sent; set before `done`
    _then: Callable[[], None] | None = None
    _lock: Lock = field(default_factory=Lock)

    def finish(self, error: LaneError | None = None) -> None:
        """Complete the future. Called once, by the lane."""
        with self._lock:
            self.error = error
            self.done = True
            then = self._then
        if then is not None:
            then()

    def when_done(self, then: Callable[[], None]) -> None:
        """Call `then` once the frame is done: at once, or later on the lane's thread.

        `then` must not block.
        """
        with self._lock:
            if not self.done:
                self._then = then
                return
        then()


class Lane(ABC):
    """All methods are thread-safe and do not block."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address that peers connect to."""

    @abstractmethod
    def expect(self, peer: Identity, nonce: bytes) -> None:
        """Accept `peer` once if it proves in time that it holds `nonce`. Raises LaneFull."""

    @abstractmethod
    def connect(self, peer: str, address: str, nonce: bytes) -> None:
        """Connect to a peer that expects this worker; PeerConnected or PeerLost follows.

        Frames may be sent at once and are queued until the connection is open. An older connection
        to the peer is lost.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Close the connection, if any; queued frames may be lost.

        The peer gets PeerLost; this end gets no event.
        """

    @abstractmethod
    def has(self, peer: str) -> bool:
        """Whether there is a connection to the peer, open or not yet."""

    @abstractmethod
    def send(self, peer: str, frame: Frame) -> Sent:
        """Queue a frame. Its payload must stay untouched until the result is done.

        Raises LaneFull, PeerUnknown, LaneClosed; ValueError on a frame that cannot be encoded.
        """

    @abstractmethod
    def receive(self, leave: Collection[str] = ()) -> list[tuple[str, Frame]]:
        """The received frames with their senders' worker ids; clears `fileno`.

        Frames of the peers in `leave` are kept and count as in flight. Raises LaneClosed if the
        lane's thread has died.
        """

    @abstractmethod
    def give_back(self, frame: Frame) -> None:
        """Recycle the memory of a received frame, whose payload must not be read any more.

        Optional: otherwise the memory is freed with the frame.
        """

    @abstractmethod
    def events(self) -> list[LaneEvent]:
        """The events since the last call, in order."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when there are frames or events, or a send has completed.

        Sends count only if their payload is in a `PayloadRoom`, since others are copied, or if
        frames were refused with LaneFull and there is room again.
        """

    @contextmanager
    def attended(self) -> Iterator[None]:
        """A context for waiting on `fileno`, in which the transport wakes the caller directly."""
        yield

    @abstractmethod
    def close(self) -> None:
        """Close all connections and release all resources. Idempotent."""
