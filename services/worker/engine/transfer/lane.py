"""The interface of a lane: non-blocking exchange of frames with the engines of other workers.

A worker has two lanes, for activations (small, urgent) and for bulk data (KV blocks, parameters).
Frames of a peer arrive in order and exactly once, or the peer is reported lost. Of two peers, one
calls `connect`, and the other must have called `expect` before.
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
    """The connection to the peer is open in both directions."""

    peer: Identity


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection has ended or was not established; frames in transit are lost.

    Reported once per connection. The incarnation of a peer that was never reached is empty.
    """

    peer: Identity
    reason: str


LaneEvent = PeerConnected | PeerLost


@dataclass(slots=True, eq=False)
class Sent:
    """The future of a sent frame; thread-safe.

    `done` without an error means that the transport has sent the frame; the peer may not have read
    it yet.
    """

    done: bool = False  # the payload may be reused
    error: LaneError | None = None  # why the frame was not sent; set before `done`
    _then: Callable[[], None] | None = None  # callback of `when_done`
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
        """Call `then` once the frame is done: now, or later on the lane's thread.

        `then` must not block. A second callback replaces the first.
        """
        with self._lock:
            if not self.done:
                self._then = then
                return
        then()


class Lane(ABC):
    """A lane. All methods are thread-safe and do not block."""

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

        The peer reports PeerLost; this end reports no event.
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
        """Return the received frames with their senders' worker ids; clears `fileno`.

        Frames of the peers in `leave` stay in the lane and count as in flight. Raises LaneClosed
        if the lane's thread has died.
        """

    @abstractmethod
    def give_back(self, frame: Frame) -> None:
        """Recycle the memory of a received frame, whose payload must not be read any more.

        Optional: otherwise the memory is freed with the frame.
        """

    @abstractmethod
    def events(self) -> list[LaneEvent]:
        """Return the events since the last call, in order."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable while frames or events wait, or after a send.

        Only two kinds of completed sends make it readable: a payload in a `PayloadRoom`, which may
        be reused now, and a send that makes room after frames were refused with LaneFull.
        """

    @contextmanager
    def attended(self) -> Iterator[None]:
        """A context for waiting on `fileno`, in which the transport wakes the caller directly."""
        yield

    @abstractmethod
    def close(self) -> None:
        """Close all connections and release all resources. Idempotent."""
