"""The life cycle of the connections of a UCX lane.

A connection starts with a handshake over TCP (the control link): the dialling end sends Hello, the
end that expects it answers Welcome. Both prove that they hold a nonce from the control plane. From
then on the connection is *open*. Each end reports `PeerConnected` once the peer's first message has
arrived through UCX (*confirmed*). A connection is *lost* at most once. It *lingers* in the table
until UCX has released its memory.
"""

import logging
import secrets
import select
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock

from services.common.clock import monotonic_s
from services.common.protocol import PROTOCOL_VERSION
from services.worker.engine.transfer.connection import Bounds, Connection
from services.worker.engine.transfer.control_link import Beat, Bye, Control, ControlLink
from services.worker.engine.transfer.errors import FrameError, VersionMismatch
from services.worker.engine.transfer.frame import FrameCodec
from services.worker.engine.transfer.handshake import (
    ExpectedPeers,
    Facts,
    Hello,
    Welcome,
    check_version,
    is_proven,
    proof_of,
)
from services.worker.engine.transfer.lane import Identity, LaneEvent, PeerConnected, PeerLost
from services.worker.engine.transfer.ucx_config import UcxLaneConfig
from services.worker.engine.transfer.ucx_transport import TAG_MAX, UcxTransport

UNPROVEN_MAX = 64  # incoming and dialled connections in the handshake
REASON_MAX = 300  # characters of a peer's reason for closing

log = logging.getLogger(__name__)


class ConnectionTable:
    """All connections of a lane.

    Any thread may call `expect`, `dial`, `find`, `forget` and `events`. Only the thread that drives
    the lane may call the other methods.
    """

    def __init__(
        self,
        identity: Identity,
        codec: FrameCodec,
        config: UcxLaneConfig,
        transport: UcxTransport,
        poll: select.epoll,
        notify: Callable[[], None],
    ) -> None:
        """`poll` watches the control sockets. `notify` is called after each new event."""
        self._identity = identity
        self._codec = codec
        self._config = config
        self._bounds = Bounds(config.queue_bytes_max, config.frames_in_flight_max)
        self._transport = transport
        self._poll = poll
        self._notify = notify
        self._expected = ExpectedPeers()
        self._lock = Lock()  # guards the two attributes below
        self._peers: dict[str, Connection] = {}  # the newest connection by worker id
        self._events: deque[LaneEvent] = deque()
        self.by_descriptor: dict[int, Connection] = {}  # not lost, by descriptor of the socket
        self.by_tag: dict[int, Connection] = {}  # not lost, by UCX tag of received messages
        self.lingering: list[Connection] = []  # lost, and UCX may still use their memory
        self.lost_in_memory = False  # a lost peer may have left a write in shared memory unfinished

    # --- any thread

    def expect(self, peer: Identity, nonce: bytes) -> None:
        """Accept `peer` once if it proves that it holds `nonce`. Raises LaneFull."""
        now_s = monotonic_s()
        self._expected.expect(peer, nonce, now_s, now_s + self._config.nonce_lifetime_s)

    def dial(self, peer: str, address: str, nonce: bytes) -> Callable[[], None]:
        """Create a connection, to which frames can be queued at once.

        Returns a function that starts the handshake; the driving thread must call it. Raises
        OSError, ValueError as `ControlLink.dial` does.
        """
        connection = self._new(ControlLink.dial(address))
        connection.peer = Identity(peer, "")
        connection.nonce = nonce
        connection.deadline_s = monotonic_s() + self._config.connect_timeout_s
        older = self._register(peer, connection)
        return lambda: self._greet(connection, nonce, older)

    def find(self, peer: str) -> Connection | None:
        """Return the newest connection to a peer, open or not yet; None without one."""
        with self._lock:
            return self._peers.get(peer)

    def forget(self, peer: str) -> Connection | None:
        """Remove and return the connection to a peer, so that `find` does not return it any more.

        The caller ends it with `disconnect`.
        """
        with self._lock:
            return self._peers.pop(peer, None)

    def events(self) -> list[LaneEvent]:
        """Return the events since the last call, in order."""
        with self._lock:
            taken = list(self._events)
            self._events.clear()
        return taken

    # --- the driving thread

    def accept(self, link: ControlLink) -> None:
        """Start the handshake of an incoming connection; closes it if there are too many."""
        unproven = sum(not connection.is_open for connection in self.by_descriptor.values())
        if unproven >= UNPROVEN_MAX:
            link.close()
            return
        connection = self._new(link)
        connection.deadline_s = monotonic_s() + self._config.hello_timeout_s
        self._adopt(connection)

    def attend(self, descriptor: int) -> None:
        """Read and write the control link whose descriptor is ready."""
        connection = self.by_descriptor.get(descriptor)
        if connection is None:
            return
        with self.lose_on_error(connection):
            connection.link.flush()
            for message in connection.link.receive():
                self._handle(connection, message)
        self._watch(connection)

    def disconnect(self, connection: Connection) -> None:
        """Close a connection on this engine's request; only the peer gets an event."""
        with self.lose_on_error(connection):
            if connection.is_open:
                connection.link.send(Bye())
        self._drop(connection, "this engine has closed the connection")

    @contextmanager
    def lose_on_error(self, connection: Connection) -> Iterator[None]:
        """A context that ends the connection on errors that the peer or network can cause."""
        try:
            yield
        except VersionMismatch as error:
            log.warning("%s", error)
            with suppress(OSError):
                connection.link.send(Bye(str(error)))
            self.lose(connection, str(error))
        except (FrameError, OSError) as error:
            self.lose(connection, str(error))

    def lose(self, connection: Connection, reason: str) -> None:
        """End a connection; reports `PeerLost` except for unproven incoming connections."""
        if connection.lost is not None:
            return
        was_open = connection.is_open
        announced = was_open or connection.nonce is not None or bool(connection.peer.incarnation)
        self._drop(connection, reason)
        if announced:
            # A failed dial is normal, because a peer refuses until it expects this worker.
            level, outcome = (
                (logging.WARNING, "is lost") if was_open else (logging.DEBUG, "was not established")
            )
            lane, peer = self._config.name, connection.peer.worker_id
            log.log(level, "the %s to worker %s %s: %s", lane, peer, outcome, reason)
            self._report(PeerLost(connection.peer, reason))

    def lose_all(self, reason: str) -> None:
        """End every connection."""
        for connection in list(self.by_descriptor.values()):
            self.lose(connection, reason)

    def note_confirmed(self, connection: Connection) -> None:
        """Report `PeerConnected` after the peer's first message, once per connection."""
        if connection.deadline_s is not None and connection.lost is None:
            connection.deadline_s = None
            self._report(PeerConnected(connection.peer))

    def forget_released(self) -> None:
        """Remove lost connections whose memory UCX no longer uses."""
        self.lingering = [lost for lost in self.lingering if not lost.is_released]

    def _new(self, link: ControlLink) -> Connection:
        return Connection(link, self._facts(), self._codec, self._bounds)

    def _facts(self) -> Facts:
        own, tag = self._identity, 1 + secrets.randbelow(TAG_MAX)
        return Facts(own.worker_id, own.incarnation, self._transport.address, tag, PROTOCOL_VERSION)

    def _register(self, peer: str, connection: Connection) -> Connection | None:
        """Make it the newest connection to `peer`; returns the previous one, to be lost."""
        with self._lock:
            older = self._peers.get(peer)
            self._peers[peer] = connection
        return older

    def _greet(self, connection: Connection, nonce: bytes, older: Connection | None) -> None:
        """Start the handshake of a dialled connection."""
        self._replace(older)
        if connection.lost is not None:
            return
        connection.facts = self._facts()  # the transport may have been renewed since `dial`
        self._adopt(connection)
        proof = proof_of(Hello, connection.facts, nonce)
        with self.lose_on_error(connection):
            connection.link.send(Hello(connection.facts, proof))
        self._watch(connection)

    def _handle(self, connection: Connection, message: Control) -> None:
        """Handle a control message. Raises FrameError, OSError."""
        connection.heard_s = monotonic_s()
        match message:
            case Hello(facts) if not connection.is_open and connection.nonce is None:
                nonce = self._expected.redeem(message, monotonic_s())
                self._open(connection, facts)
                # The failure of an earlier connection to the peer may not have been noticed yet.
                self._replace(self._register(facts.worker_id, connection))
                # Send Welcome last: the peer may send its first frame as soon as it arrives.
                proof = proof_of(Welcome, connection.facts, nonce)
                connection.link.send(Welcome(connection.facts, proof))
            case Welcome(facts) if connection.nonce is not None:
                check_version(facts)
                matches = facts.worker_id == connection.peer.worker_id
                if not matches or not is_proven(message, connection.nonce):
                    raise FrameError("another worker than the dialled peer answered")
                self._open(connection, facts)
            case Beat(taken) if connection.is_open:
                connection.acknowledge(taken)
            case Bye(reason):
                raise ConnectionError(reason[:REASON_MAX] or "the peer ended the connection")
            case _:
                raise FrameError("the peer sent an unexpected control message")

    def _open(self, connection: Connection, peer: Facts) -> None:
        """Open the connection for frames, and log UCX's routes. Raises ConnectionError."""
        now_s = monotonic_s()
        until_s = now_s + self._config.connect_timeout_s
        names = connection.open(self._transport, peer, now_s, until_s)
        routes = ", ".join(names) or "routes that UCX does not name"
        log.info("the %s to worker %s uses %s", self._config.name, peer.worker_id, routes)

    def _replace(self, older: Connection | None) -> None:
        if older is not None:
            self.lose(older, "a newer connection replaced it")

    def _adopt(self, connection: Connection) -> None:
        self.by_descriptor[connection.link.fileno()] = connection
        self.by_tag[connection.facts.tag] = connection
        self._poll.register(connection.link.fileno(), select.EPOLLIN)

    def _watch(self, connection: Connection) -> None:
        """Poll for writability only while control messages are unsent."""
        if connection.lost is None:
            unsent = select.EPOLLOUT if connection.link.has_unsent else 0
            self._poll.modify(connection.link.fileno(), select.EPOLLIN | unsent)

    def _drop(self, connection: Connection, reason: str) -> None:
        """Remove and close a connection without an event; it lingers while UCX uses its memory."""
        if connection.lost is not None:
            return
        with self._lock:
            if self._peers.get(connection.peer.worker_id) is connection:
                del self._peers[connection.peer.worker_id]
        if self.by_descriptor.pop(connection.link.fileno(), None) is not None:
            self._poll.unregister(connection.link.fileno())
        self.by_tag.pop(connection.facts.tag, None)
        self.lost_in_memory |= connection.shares_memory
        connection.lose(reason)
        self.lingering.append(connection)

    def _report(self, event: LaneEvent) -> None:
        with self._lock:
            self._events.append(event)
        self._notify()
