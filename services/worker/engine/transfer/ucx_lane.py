"""A lane over UCX: one UCX worker and one thread, which sleeps until there is something to do.

UCX is driven by one thread at a time. Mostly that is the lane's, so that peers are heard while the
engine computes. Each handover to another thread may cost as long as a processor is busy. Hence a
thread that sends tries to drive UCX itself, and so does one that waits (`attended`).

A lane for activations and one for bulk are two of these, because beside bulk transfers small
messages of the same UCX worker wait for milliseconds.
"""

import logging
import secrets
import select
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Thread, current_thread

import numpy as np

from services.common.address import join_address, listen
from services.common.clock import monotonic_s
from services.common.protocol import PROTOCOL_VERSION
from services.common.scheduling import run_soon
from services.worker.engine.transfer.connection import Bounds, Connection
from services.worker.engine.transfer.control_link import Beat, Bye, Control, ControlLink
from services.worker.engine.transfer.doorbell import Doorbell
from services.worker.engine.transfer.errors import (
    FrameError,
    LaneClosed,
    PeerUnknown,
    VersionMismatch,
)
from services.worker.engine.transfer.frame import Frame, FrameCodec
from services.worker.engine.transfer.handshake import (
    Facts,
    GuestList,
    Hello,
    Welcome,
    check_version,
    is_proven,
    proof_of,
)
from services.worker.engine.transfer.lane import (
    Identity,
    Lane,
    LaneEvent,
    PeerConnected,
    PeerLost,
    Sent,
)
from services.worker.engine.transfer.ucx_config import UcxLaneConfig
from services.worker.engine.transfer.ucx_transport import TAG_MAX, Arrival, Request, UcxTransport

STRANGERS_MAX = 64  # connections that have yet to prove themselves
STRAY_MAX = 64  # frames of lost connections that are being received to be thrown away
REASON_MAX = 300  # characters of what a peer says at its end
CLOSE_TIMEOUT_S = 10.0
CLOSE_TURNS = 100  # in which UCX lets go of what it was told to abort

log = logging.getLogger(__name__)


class UcxLane(Lane):
    """Raises UcxUnavailable, or ConfigError if it cannot listen."""

    def __init__(self, identity: Identity, codec: FrameCodec, config: UcxLaneConfig) -> None:
        self._identity = identity
        self._codec = codec
        self._config = config
        self._bounds = Bounds(config.queue_bytes_max, config.frames_in_flight_max)
        self._transport = UcxTransport(config.ucx)
        self._guests = GuestList()
        self._lock = Lock()  # of the four below
        self._peers: dict[str, Connection] = {}
        self._arrived: deque[tuple[Connection, Frame]] = deque()
        self._arrived_bytes = 0
        self._news: deque[LaneEvent] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._out_bell = Doorbell()  # for the engine
        self._in_bell = Doorbell()  # for our thread
        self._driving = Lock()  # whoever has it may use all that follows
        self._by_descriptor: dict[int, Connection] = {}
        self._by_tag: dict[int, Connection] = {}
        self._lingering: list[Connection] = []
        self._stray: deque[Request] = deque()
        self._ticked_s = monotonic_s()
        self._tick_s = min(config.heartbeat_s, config.hello_timeout_s) / 4
        self._beat_s = self._ticked_s
        self._stopping = False
        self._ended = False
        self._listener = listen(config.host, config.port, STRANGERS_MAX)
        self._listener.setblocking(False)
        self._poll = select.epoll()
        for descriptor in (self._transport, self._in_bell, self._listener):
            self._poll.register(descriptor.fileno(), select.EPOLLIN)
        self._engine_poll = select.epoll()
        self._engine_poll.register(self._out_bell.fileno(), select.EPOLLIN)
        self._engine_poll.register(self._transport.fileno(), 0)
        self._thread = Thread(target=self._run, name="ucx-lane", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        host = self._config.advertise or self._config.host
        return join_address(host, self._listener.getsockname()[1])

    def expect(self, peer: Identity, nonce: bytes) -> None:
        now_s = monotonic_s()
        self._guests.expect(peer, nonce, now_s, now_s + self._config.nonce_lifetime_s)

    def connect(self, peer: str, address: str, nonce: bytes) -> None:
        connection = self._connection(ControlLink.dial(address))
        connection.peer = Identity(peer, "")
        connection.nonce = nonce
        connection.deadline_s = monotonic_s() + self._config.connect_timeout_s
        with self._lock:
            older = self._peers.get(peer)
            self._peers[peer] = connection
        self._command(lambda: self._greet(connection, nonce, older))

    def disconnect(self, peer: str) -> None:
        with self._lock:
            connection = self._peers.pop(peer, None)
        if connection is not None:
            self._command(lambda: self._part(connection))

    def send(self, peer: str, frame: Frame) -> Sent:
        self._check_running()
        with self._lock:
            connection = self._peers.get(peer)
        if connection is None:
            raise PeerUnknown(f"there is no connection to {peer}")
        sent = connection.queue(frame)
        if not self._went_out(connection, sent):
            self._in_bell.ring()
        return sent

    def receive(self, leave: Collection[str] = ()) -> list[tuple[str, Frame]]:
        self._out_bell.clear()
        self._check_running()
        with self._lock:
            taken = [one for one in self._arrived if one[0].peer.worker_id not in leave]
            self._arrived = deque(one for one in self._arrived if one[0].peer.worker_id in leave)
            was_full = self._arrived_bytes >= self._config.received_bytes_max
            self._arrived_bytes = sum(frame.size_bytes for _, frame in self._arrived)
        for connection, _ in taken:
            connection.taken += 1
        if was_full or any(connection.owes_news for connection, _ in taken):
            self._in_bell.ring()
        return [(connection.peer.worker_id, frame) for connection, frame in taken]

    def events(self) -> list[LaneEvent]:
        with self._lock:
            taken = list(self._news)
            self._news.clear()
        return taken

    def fileno(self) -> int:
        return self._engine_poll.fileno()

    @contextmanager
    def attended(self) -> Iterator[None]:
        attends = self._take_over()
        try:
            yield
        finally:
            if attends:
                self._hand_back()

    def close(self) -> None:
        self._stopping = True
        self._in_bell.ring()
        if self._thread is not current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._engine_poll.close()
            self._out_bell.close()
            self._in_bell.close()

    def _check_running(self) -> None:
        if self._ended or self._stopping:
            raise LaneClosed("the lane is closed")

    def _command(self, command: Callable[[], None]) -> None:
        """Have our thread do something."""
        self._check_running()
        self._commands.append(command)
        self._in_bell.ring()

    def _run(self) -> None:
        run_soon()
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        """Everything once; sleeps at the end if there was nothing to do."""
        with self._driving:
            while self._commands:
                self._commands.popleft()()
            busy = self._drive()
            now_s = monotonic_s()
            if now_s - self._ticked_s >= self._tick_s:
                self._tick(now_s)
            asleep = not busy and self._transport.arm()
        ready = self._poll.poll(self._tick_s if asleep else 0)
        with self._driving:
            for descriptor, _ in ready:
                self._attend(descriptor)

    def _drive(self) -> bool:
        """Let UCX work, send what waits, take what has come; whether there was any."""
        self._transport.progress()
        busy = False
        for connection in list(self._by_tag.values()):
            with self._losing(connection):
                busy |= connection.submit(self._send_until_s)
        busy |= self._probe()
        busy |= self._reap()
        return busy

    @property
    def _send_until_s(self) -> float:
        return self._ticked_s + self._config.send_timeout_s

    def _went_out(self, connection: Connection, sent: Sent) -> bool:
        """Send at once unless somebody else drives; whether UCX is through with the frame."""
        if not self._driving.acquire(blocking=False):
            return False
        try:
            with self._losing(connection):
                connection.submit(self._send_until_s)
                self._transport.progress()
                connection.reap_sends()
            # What that has brought in, UCX will not signal again.
            return not (self._probe() | self._reap()) and sent.done
        finally:
            self._driving.release()

    def _take_over(self) -> bool:
        """Have UCX wake threads that wait for `fileno`, not ours; returns whether it will."""
        if not self._driving.acquire(blocking=False):
            return False
        try:
            if self._ended or not self._by_tag:
                return False
            if self._drive() or not self._transport.arm():
                # There is more to do, and the waiting thread may have other things to do first.
                self._out_bell.ring()
                self._in_bell.ring()
                return False
            self._poll.modify(self._transport.fileno(), 0)
            self._engine_poll.modify(self._transport.fileno(), select.EPOLLIN)
        finally:
            self._driving.release()
        return True

    def _hand_back(self) -> None:
        """Take what has come, and have UCX wake our thread again."""
        with self._driving:
            if self._ended:
                return
            self._engine_poll.modify(self._transport.fileno(), 0)
            if self._drive() or not self._transport.arm():
                self._in_bell.ring()
            self._poll.modify(self._transport.fileno(), select.EPOLLIN)

    def _probe(self) -> bool:
        """Begin to receive what has arrived, as long as there is room; whether there was any."""
        begun = False
        fetching = sum(connection.fetching_bytes for connection in self._by_tag.values())
        while self._arrived_bytes + fetching < self._config.received_bytes_max:
            arrival = self._transport.probe()
            if arrival is None:
                break
            begun = True
            connection = self._by_tag.get(arrival.tag)
            if connection is None:
                self._throw_away(arrival)
            elif arrival.size_bytes > self._config.frame_bytes_max:
                self._lose(connection, f"a frame of {arrival.size_bytes} bytes is too large")
            else:
                fetching += arrival.size_bytes
                with self._losing(connection):
                    connection.fetch(self._transport, arrival)
        return begun

    def _throw_away(self, arrival: Arrival) -> None:
        """Receive a frame of nobody, so that UCX forgets it; too large a one stays with UCX."""
        while self._stray and self._stray[0].completed:
            self._stray.popleft()
        if arrival.size_bytes <= self._config.frame_bytes_max and len(self._stray) < STRAY_MAX:
            memory = np.empty(arrival.size_bytes, np.uint8)
            with suppress(ConnectionError):
                self._stray.append(self._transport.fetch(arrival, memory))

    def _reap(self) -> bool:
        """Deliver what has arrived, finish what was sent; whether there was any."""
        frames: list[tuple[Connection, Frame]] = []
        reaped = False
        for connection in [*self._by_tag.values(), *self._lingering]:
            with self._losing(connection):
                reaped |= connection.reap_sends()
            with self._losing(connection):
                received = connection.reap_fetches(self._config.verify)
                frames += [(connection, frame) for frame in received]
        self._lingering = [c for c in self._lingering if not c.is_quiet]
        if frames:
            with self._lock:
                self._arrived += frames
                self._arrived_bytes += sum(frame.size_bytes for _, frame in frames)
        if frames or reaped:
            self._out_bell.ring()
        return bool(frames) or reaped

    def _tick(self, now_s: float) -> None:
        """Heartbeats and deadlines."""
        if now_s - self._ticked_s >= self._config.silence_timeout_s / 2:
            # It was this process that stood still: what peers said meanwhile has yet to be read.
            for connection in self._by_descriptor.values():
                connection.heard_s = now_s
        self._ticked_s = now_s
        beats = now_s - self._beat_s >= self._config.heartbeat_s
        if beats:
            self._beat_s = now_s
        for connection in list(self._by_descriptor.values()):
            with self._losing(connection):
                if connection.is_open and (beats or connection.owes_news):
                    connection.beat()
            reason = connection.overdue(now_s, self._config.silence_timeout_s)
            if reason is not None:
                self._lose(connection, reason)

    def _attend(self, descriptor: int) -> None:
        """Look after a descriptor that is ready."""
        if descriptor == self._in_bell.fileno():
            self._in_bell.clear()
            for connection in list(self._by_tag.values()):
                if connection.is_open and connection.owes_news:
                    with self._losing(connection):
                        connection.beat()
        elif descriptor == self._listener.fileno():
            self._accept()
        elif descriptor in self._by_descriptor:
            connection = self._by_descriptor[descriptor]
            with self._losing(connection):
                connection.link.flush()
                for message in connection.link.receive():
                    self._heed(connection, message)
            self._watch(connection)

    def _heed(self, connection: Connection, message: Control) -> None:
        """Act on what a peer says. Raises FrameError, OSError."""
        connection.heard_s = monotonic_s()
        match message:
            case Hello(facts) if not connection.is_open and connection.nonce is None:
                nonce = self._guests.redeem(message, monotonic_s())
                connection.open(self._transport, facts, monotonic_s())
                with self._lock:
                    older = self._peers.get(facts.worker_id)
                    self._peers[facts.worker_id] = connection
                self._replace(older, connection)
                # Last: once the peer knows of the connection, our engine can use and end it.
                proof = proof_of(Welcome, connection.facts, nonce)
                connection.link.send(Welcome(connection.facts, proof))
            case Welcome(facts) if connection.nonce is not None:
                check_version(facts)
                named = facts.worker_id == connection.peer.worker_id
                if not named or not is_proven(message, connection.nonce):
                    raise FrameError("the peer is not the one that was dialled")
                connection.open(self._transport, facts, monotonic_s())
                self._tell(PeerConnected(connection.peer))
            case Beat(taken) if connection.is_open:
                connection.acknowledge(taken)
            case Bye(reason):
                raise ConnectionError(reason[:REASON_MAX] or "the peer ended the connection")
            case _:
                raise FrameError("the peer speaks out of turn")

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            log.warning("a connection could not be accepted: %s", error)
            return
        strangers = sum(not connection.is_open for connection in self._by_descriptor.values())
        if strangers >= STRANGERS_MAX:
            accepted.close()
            return
        connection = self._connection(ControlLink(accepted))
        connection.deadline_s = monotonic_s() + self._config.hello_timeout_s
        self._adopt(connection)

    def _greet(self, connection: Connection, nonce: bytes, older: Connection | None) -> None:
        """Begin the handshake of a connection that we make."""
        if older is not None and older.lost is None:
            self._lose(older, "a newer connection replaced it")
        if connection.lost is not None:
            return
        self._adopt(connection)
        proof = proof_of(Hello, connection.facts, nonce)
        with self._losing(connection):
            connection.link.send(Hello(connection.facts, proof))
        self._watch(connection)

    def _replace(self, older: Connection | None, newer: Connection) -> None:
        """Announce a connection that a peer made; a broken one to it may not be noticed yet."""
        if older is not None and older.lost is None:
            self._lose(older, "a newer connection replaced it")
        self._tell(PeerConnected(newer.peer))

    def _connection(self, link: ControlLink) -> Connection:
        us = self._identity
        tag = 1 + secrets.randbelow(TAG_MAX)
        facts = Facts(us.worker_id, us.incarnation, self._transport.address, tag, PROTOCOL_VERSION)
        return Connection(link, facts, self._codec, self._bounds)

    def _adopt(self, connection: Connection) -> None:
        self._by_descriptor[connection.link.fileno()] = connection
        self._by_tag[connection.facts.tag] = connection
        self._poll.register(connection.link.fileno(), select.EPOLLIN)

    def _watch(self, connection: Connection) -> None:
        """Wait for room to write only if something is to be written."""
        if connection.lost is None:
            unsent = select.EPOLLOUT if connection.link.has_unsent else 0
            self._poll.modify(connection.link.fileno(), select.EPOLLIN | unsent)

    def _part(self, connection: Connection) -> None:
        """End a connection because our engine wants to."""
        if connection.lost is not None:
            return
        with self._losing(connection):
            if connection.is_open:
                connection.link.send(Bye())
        self._lose(connection, "", told=False)

    @contextmanager
    def _losing(self, connection: Connection) -> Iterator[None]:
        """Lose the connection on what its peer or the network may do to it."""
        try:
            yield
        except VersionMismatch as error:
            log.warning("%s", error)
            with suppress(OSError):
                connection.link.send(Bye(str(error)))
            self._lose(connection, str(error))
        except (FrameError, OSError) as error:
            self._lose(connection, str(error))

    def _lose(self, connection: Connection, reason: str, told: bool = True) -> None:
        if connection.lost is not None:
            return
        with self._lock:
            known = self._peers.get(connection.peer.worker_id) is connection
            if known:
                del self._peers[connection.peer.worker_id]
        was_open = connection.is_open
        announced = was_open or connection.nonce is not None
        if self._by_descriptor.pop(connection.link.fileno(), None) is not None:
            self._poll.unregister(connection.link.fileno())
        self._by_tag.pop(connection.facts.tag, None)
        connection.lose(reason)
        self._lingering.append(connection)
        if told and announced:
            # A peer that is dialled before it expects us refuses, and is dialled again.
            level, what = (
                (logging.WARNING, "lost") if was_open else (logging.DEBUG, "did not reach")
            )
            log.log(level, "%s worker %s: %s", what, connection.peer.worker_id, reason)
            self._tell(PeerLost(connection.peer, reason))

    def _tell(self, event: LaneEvent) -> None:
        with self._lock:
            self._news.append(event)
        self._out_bell.ring()

    def _end(self) -> None:
        """Give everything back; what UCX still holds is left to it."""
        with self._driving:
            self._ended = True
            for connection in list(self._by_descriptor.values()):
                self._part(connection)
            for _ in range(CLOSE_TURNS):
                self._transport.progress()
                self._reap()
                if not self._lingering:
                    break
        self._poll.close()
        self._listener.close()
        self._out_bell.ring()
