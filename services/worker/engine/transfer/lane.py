"""The contract of a lane: frames between this engine and its peers, none of them blocking.

A worker has two: one for activations (small, urgent), one for bulk (KV blocks, parameters). Frames
of one peer arrive in order, each once, or the peer is reported lost. Exactly one end of a pair
connects; the other end has called `expect` before.
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
    """The connection has ended; frames that were not received are lost. Once per connection.

    The incarnation of a peer that was never reached is empty.
    """

    peer: Identity
    reason: str


LaneEvent = PeerConnected | PeerLost


@dataclass(slots=True, eq=False)
class Sent:
    """The fate of a frame; any thread may read it.

    `done`: the payload may be reused. `error`: why the frame was not sent, set before `done`.
    Done without error means that the transport has sent it, not that the peer has read it.
    """

    done: bool = False
    error: LaneError | None = None
    _then: Callable[[], None] | None = None
    _lock: Lock = field(default_factory=Lock)

    def finish(self, error: LaneError | None = None) -> None:
        """Mark the frame as done. The lane calls this once."""
        with self._lock:
            self.error = error
            self.done = True
            then = self._then
        if then is not None:
            then()

    def when_done(self, then: Callable[[], None]) -> None:
        """Call `then` once the frame is done: now, or later by the lane's thread.

        `then` must return at once.
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
        """Accept `peer` once if it proves in time to hold `nonce`. Raises LaneFull."""

    @abstractmethod
    def connect(self, peer: str, address: str, nonce: bytes) -> None:
        """Connect to a peer that expects this worker; PeerConnected or PeerLost follows.

        Frames may be sent at once; they wait for the connection. An older connection to the peer
        is lost.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """End the connection, if there is one; queued frames may be lost.

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
        """The frames that arrived, with the worker id of their sender; clears `fileno`.

        Frames of the peers in `leave` stay, and count as in flight. Raises LaneClosed if the lane's
        thread has died.
        """

    @abstractmethod
    def give_back(self, frame: Frame) -> None:
        """Let the memory of a received frame be used again: nobody reads its payload any more.

        Memory that is not given back is freed with its frame.
        """

    @abstractmethod
    def events(self) -> list[LaneEvent]:
        """The events since the last call, in order."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when a frame or an event waits, or a send has completed.

        The latter only if its payload lay in a `PayloadRoom`, since of any other there is a copy,
        or if frames were refused for want of room, and there is some again.
        """

    @contextmanager
    def attended(self) -> Iterator[None]:
        """A context in which the caller waits for `fileno`: the transport wakes it directly."""
        yield

    @abstractmethod
    def close(self) -> None:
        """End all connections and give everything back. Idempotent."""
