"""A lane (frames between engines) over UCX: a UCX worker, and a thread that sleeps without work.

A single thread at a time drives UCX: usually the lane's own thread, so that frames arrive while the
engine computes. Waking another thread takes long while all processors are busy. So a thread that
sends tries to drive UCX itself, and so does a thread that waits for frames (`attended`).

An engine has two such lanes, for activations and for bulk data. In a common UCX worker, activations
would wait for milliseconds behind bulk transfers.

`ConnectionTable` handles handshakes, `Traffic` frames, and `Heartbeats` silent peers. A process
that is lost in the middle of a write can block UCX's queue in shared memory; `ReceiveCheck` detects
that. `UcxLane` decides which thread drives them, and when.
"""

import logging
import select
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import Lock, Thread, current_thread

from services.common.address import join_address, listen
from services.common.clock import monotonic_s
from services.common.thread_priority import request_short_slices
from services.worker.engine.transfer.acceptor import Acceptor
from services.worker.engine.transfer.connection import Connection
from services.worker.engine.transfer.connection_table import UNPROVEN_MAX, ConnectionTable
from services.worker.engine.transfer.control_link import ControlLink
from services.worker.engine.transfer.doorbell import Doorbell
from services.worker.engine.transfer.errors import LaneClosed, PeerUnknown, UcxUnavailable
from services.worker.engine.transfer.frame import Frame, FrameCodec, FrameMemory
from services.worker.engine.transfer.lane import Identity, Lane, LaneEvent, Sent
from services.worker.engine.transfer.receive_check import PAUSE_S, ReceiveCheck, memory_sender
from services.worker.engine.transfer.traffic import Traffic
from services.worker.engine.transfer.ucx_config import UcxLaneConfig
from services.worker.engine.transfer.ucx_transport import UcxTransport

log = logging.getLogger(__name__)


class Heartbeats:
    """Sends heartbeats and detects silent peers. All calls are made by the lane's own thread."""

    def __init__(
        self,
        connections: ConnectionTable,
        interval_s: float,
        silence_timeout_s: float,
        now_s: float,
    ) -> None:
        """A heartbeat is sent every `interval_s`; a peer silent for `silence_timeout_s` is lost."""
        self._connections = connections
        self._interval_s = interval_s
        self._silence_timeout_s = silence_timeout_s
        self._beat_s = now_s  # time of the last heartbeat to all peers
        self.ticked_s = now_s  # time of the last `tick`

    def tick(self, now_s: float) -> None:
        """Send due heartbeats, and end connections whose peers are silent or too slow."""
        if now_s - self.ticked_s >= self._silence_timeout_s / 2:
            # This process was paused, and the peers' heartbeats of that time are not read yet.
            for connection in self._connections.by_descriptor.values():
                connection.heard_s = now_s
        self.ticked_s = now_s
        due = now_s - self._beat_s >= self._interval_s
        if due:
            self._beat_s = now_s
        self._beat(to_all=due)
        for connection in list(self._connections.by_descriptor.values()):
            reason = connection.loss_reason(now_s, self._silence_timeout_s)
            if reason is not None:
                self._connections.lose(connection, reason)

    def acknowledge(self) -> None:
        """Send a heartbeat to each peer that may soon reach its limit of frames in flight."""
        self._beat(to_all=False)

    def _beat(self, *, to_all: bool) -> None:
        for connection in list(self._connections.by_descriptor.values()):
            if connection.is_open and (to_all or connection.owes_acknowledgement):
                with self._connections.lose_on_error(connection):
                    connection.beat()


CLOSE_TIMEOUT_S = 10.0
CLOSE_TURNS = 100  # maximum calls of `progress` until UCX has completed aborted requests


class UcxLane(Lane):
    """A lane over UCX. Raises UcxUnavailable, or ConfigError if it cannot listen."""

    def __init__(self, identity: Identity, codec: FrameCodec, config: UcxLaneConfig) -> None:
        self._config = config
        self._transport = UcxTransport(config.ucx)
        self._out_bell = Doorbell()  # wakes the engine
        self._in_bell = Doorbell()  # wakes the lane's thread
        self._commands: deque[Callable[[], None]] = deque()  # for the lane's thread
        self._stopping = False
        self._ended = False
        self._attended = False  # whether UCX wakes a thread that waits for `fileno`
        self._listener = listen(config.host, config.port, UNPROVEN_MAX)
        self._listener.setblocking(False)
        self._poll = select.epoll()
        for descriptor in (self._transport, self._in_bell):
            self._poll.register(descriptor.fileno(), select.EPOLLIN)
        self._acceptor = Acceptor(self._listener, self._poll)
        self._engine_poll = select.epoll()
        self._engine_poll.register(self._out_bell.fileno(), select.EPOLLIN)
        self._engine_poll.register(self._transport.fileno(), 0)
        self._driving = Lock()  # held by the thread that drives the objects below
        self._connections = ConnectionTable(
            identity, codec, config, self._transport, self._poll, self._out_bell.ring
        )
        self._memory = FrameMemory()
        self._check = ReceiveCheck(self._transport, memory_sender(config.ucx), config.name)
        self._traffic = Traffic(
            self._transport,
            self._connections,
            config,
            self._memory,
            self._check,
            self._out_bell.ring,
        )
        self._heartbeats = Heartbeats(
            self._connections, config.heartbeat_s, config.silence_timeout_s, monotonic_s()
        )
        self._tick_s = min(config.heartbeat_s, config.hello_timeout_s) / 4
        self._thread = Thread(target=self._run, name="ucx-lane", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        host = self._config.advertise or self._config.host
        return join_address(host, self._listener.getsockname()[1])

    def expect(self, peer: Identity, nonce: bytes) -> None:
        self._connections.expect(peer, nonce)

    def connect(self, peer: str, address: str, nonce: bytes) -> None:
        self._command(self._connections.dial(peer, address, nonce))

    def disconnect(self, peer: str) -> None:
        connection = self._connections.forget(peer)
        if connection is not None:
            self._command(lambda: self._connections.disconnect(connection))

    def has(self, peer: str) -> bool:
        return self._connections.find(peer) is not None

    def send(self, peer: str, frame: Frame) -> Sent:
        self._check_running()
        connection = self._connections.find(peer)
        if connection is None:
            raise PeerUnknown(f"there is no connection to {peer}")
        sent = connection.queue(frame)
        if not self._try_send(connection, sent):
            self._in_bell.ring()
        return sent

    def receive(self, leave: Collection[str] = ()) -> list[tuple[str, Frame]]:
        self._out_bell.clear()
        self._check_running()
        taken, was_full = self._traffic.take(leave)
        if was_full or any(connection.owes_acknowledgement for connection, _ in taken):
            self._in_bell.ring()
        return [(connection.peer.worker_id, frame) for connection, frame in taken]

    def give_back(self, frame: Frame) -> None:
        if frame.encoded is not None:
            self._memory.give_back(frame.encoded)

    def events(self) -> list[LaneEvent]:
        return self._connections.events()

    def fileno(self) -> int:
        return self._engine_poll.fileno()

    @contextmanager
    def attended(self) -> Iterator[None]:
        attends = self._attend_directly()
        try:
            yield
        finally:
            if attends:
                self._stop_attending()

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
        """Call `command` on the lane's thread. Raises LaneClosed."""
        self._check_running()
        self._commands.append(command)
        self._in_bell.ring()

    def _run(self) -> None:
        request_short_slices()
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        """Do all pending work, then sleep unless UCX has more."""
        with self._driving:
            while self._commands:
                self._commands.popleft()()
            self._drive()
            now_s = monotonic_s()
            if now_s - self._heartbeats.ticked_s >= self._tick_s:
                self._heartbeats.tick(now_s)
                self._acceptor.tick(now_s)
                self._memory.expire(now_s)
            self._check_receiving()
            asleep = self._transport.arm()
            pause_s = PAUSE_S if self._check.under_way else self._tick_s
        ready = self._poll.poll(pause_s if asleep else 0)
        with self._driving:
            for descriptor, _ in ready:
                self._attend(descriptor)

    def _attend(self, descriptor: int) -> None:
        """Handle a descriptor that is ready."""
        if descriptor == self._in_bell.fileno():
            self._in_bell.clear()
            self._heartbeats.acknowledge()
        elif descriptor == self._listener.fileno():
            accepted = self._acceptor.accept(monotonic_s())
            if accepted is not None:
                self._connections.accept(ControlLink(accepted))
        else:
            self._connections.attend(descriptor)

    def _check_receiving(self) -> None:
        """After the loss of a peer, check whether UCX still receives; else replace its worker."""
        if self._connections.lost_in_memory:
            self._connections.lost_in_memory = False
            self._check.begin()
        if self._check.has_failed:
            self._check.end()
            self._replace_worker()

    def _replace_worker(self) -> None:
        """Replace the UCX worker; all connections are lost.

        The old worker is released first: both may need the same ports, for which UCX waits without
        limit. If it cannot be released or replaced, the lane ends, and the engine with it.
        """
        reason = "UCX receives nothing any more: a process was lost while it wrote to this process"
        log.warning("the %s is restarted: %s", self._config.name, reason)
        self._connections.lose_all(reason)
        self._connections.lost_in_memory = False  # their writes went to the old UCX worker
        self._complete_lost_requests()
        if self._connections.lingering and self._config.ucx.ports:
            log.error("the %s ends: UCX still uses memory of a lost connection", self._config.name)
            self._stopping = True
            return
        # Take all messages out of the old UCX worker: on its release it would wait without limit
        # for the rest of a message whose sender is lost.
        while self._transport.probe() is not None:
            pass
        self._traffic.forget_strays()
        for poll in (self._poll, self._engine_poll):
            poll.unregister(self._transport.fileno())
        try:
            self._transport.renew()
        except UcxUnavailable as error:
            log.error("the %s ends: %s", self._config.name, error)
            self._stopping = True
            return
        for poll in (self._poll, self._engine_poll):
            poll.register(self._transport.fileno(), 0)
        self._watch_transport()

    def _watch_transport(self) -> None:
        """Let UCX wake the thread that waits for `fileno` (`attended`), else the lane's thread."""
        own, engine = (0, select.EPOLLIN) if self._attended else (select.EPOLLIN, 0)
        self._poll.modify(self._transport.fileno(), own)
        self._engine_poll.modify(self._transport.fileno(), engine)

    def _drive(self) -> bool:
        return self._traffic.drive(self._send_until_s)

    @property
    def _send_until_s(self) -> float:
        return self._heartbeats.ticked_s + self._config.send_timeout_s

    def _try_send(self, connection: Connection, sent: Sent) -> bool:
        """Send now unless another thread drives; returns whether the lane's thread may sleep on.

        It may if the frame was sent, or if UCX will wake it when the peer fetches a large frame.
        """
        if not self._driving.acquire(blocking=False):
            return False
        try:
            self._traffic.send_now(connection, self._send_until_s)
            # All that UCX has completed is delivered; `arm` makes UCX signal further work.
            return sent.done or self._transport.arm()
        finally:
            self._driving.release()

    def _attend_directly(self) -> bool:
        """Let UCX wake the threads that wait for `fileno` until `_stop_attending`.

        Meanwhile UCX does not wake the lane's own thread. Returns False without an effect on
        wake-ups if another thread drives, no peer is connected, or there is work already.
        """
        if not self._driving.acquire(blocking=False):
            return False
        try:
            if self._ended or not self._connections.by_tag:
                return False
            delivered = self._drive()
            if not self._transport.arm():
                self._in_bell.ring()
                return False
            if delivered:
                return False
            self._attended = True
            self._watch_transport()
        finally:
            self._driving.release()
        return True

    def _stop_attending(self) -> None:
        """Send and receive frames, and let UCX wake the lane's thread again."""
        with self._driving:
            if self._ended or self._stopping:
                return
            self._attended = False
            self._drive()
            if not self._transport.arm():
                self._in_bell.ring()
            self._watch_transport()

    def _complete_lost_requests(self) -> None:
        """Progress UCX until the requests of lost connections are complete, or too many turns."""
        for _ in range(CLOSE_TURNS):
            self._transport.progress()
            self._traffic.reap()
            if not self._connections.lingering:
                break

    def _end(self) -> None:
        """Close all connections and the lane; requests that UCX has not completed are abandoned."""
        with self._driving:
            self._ended = True
            for connection in list(self._connections.by_descriptor.values()):
                self._connections.disconnect(connection)
            self._check.end()
            self._complete_lost_requests()
        self._poll.close()
        self._listener.close()
        self._out_bell.ring()
