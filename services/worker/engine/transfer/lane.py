"""The contract of a lane: frames between this engine and its peers, none of them blocking.

A worker has two: one for activations (small, urgent), one for bulk (KV blocks, parameters). Frames
of one peer arrive in order, each once, or the peer is reported lost. Exactly one side of a pair
connects; the other was told by `expect` whom to let in.
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
    """One process of a worker: a restarted one has another incarnation."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """Frames to and from the peer flow."""

    peer: Identity


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection is gone for good; what was not received is lost. Said once a connection.

    Of a peer that could not be connected to, the incarnation may be empty.
    """

    peer: Identity
    reason: str


LaneEvent = PeerConnected | PeerLost


@dataclass(slots=True, eq=False)
class Sent:
    """What became of a frame; any thread may read it.

    `done`: the payload may be reused. `error`: why the frame did not go out, set before `done`.
    Done without error means that the transport took it, not that the peer has read it.
    """

    done: bool = False
    error: LaneError | None = None
    _then: Callable[[], None] | None = None
    _lock: Lock = field(default_factory=Lock)

    def finish(self, error: LaneError | None = None) -> None:
        """Called by the lane, once."""
        with self._lock:
            self.error = error
            self.done = True
            then = self._then
        if then is not None:
            then()

    def when_done(self, then: Callable[[], None]) -> None:
        """Have `then` called once it is done, perhaps at once, perhaps by the lane's thread.

        It must return at once.
        """
        with self._lock:
            if not self.done:
                self._then = then
                return
        then()


class Lane(ABC):
    """Every method may be called from any thread and returns at once."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where peers connect to."""

    @abstractmethod
    def expect(self, peer: Identity, nonce: bytes) -> None:
        """Let `peer` in, once, if it presents `nonce` before it expires. Raises LaneFull."""

    @abstractmethod
    def connect(self, peer: str, address: str, nonce: bytes) -> None:
        """Connect to a peer that expects us; PeerConnected or PeerLost follows.

        Frames may be sent at once; they wait. An older connection to the peer is lost.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """End the connection; no event follows here, PeerLost at the peer. Frames queued may go
        missing. No effect without a connection."""

    @abstractmethod
    def send(self, peer: str, frame: Frame) -> Sent:
        """Queue a frame. Its payload must stay untouched until the result is done.

        Raises LaneFull, PeerUnknown, LaneClosed; ValueError on a frame that cannot be encoded.
        """

    @abstractmethod
    def receive(self, leave: Collection[str] = ()) -> list[tuple[str, Frame]]:
        """Frames that arrived, with the worker id of their sender; clears `fileno`.

        Those of the peers in `leave` stay, and count against what these may have in flight.
        Raises LaneClosed if the lane's thread has died.
        """

    @abstractmethod
    def events(self) -> list[LaneEvent]:
        """Peers that came and went since the last call, in order."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when a frame, an event or a completed send waits."""

    @contextmanager
    def attended(self) -> Iterator[None]:
        """The caller waits for `fileno` inside, so that no other thread has to wake up first."""
        yield

    @abstractmethod
    def close(self) -> None:
        """End all connections and give everything back. Idempotent."""
