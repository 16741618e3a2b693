"""Moves KV blocks and parameters between engines in the background, over the bulk lane.

A transfer is the KV of a sequence or a slab of parameters, cut into pieces. The mover handles a
piece at a time, so activations and cancels wait for at most the time of a piece. It runs on its
own thread (`start`), or its owner calls `step`, which is the same code.

Every transfer that `send` has accepted, that a peer has started, or that was cancelled ends with
exactly one TransferOutcome; until then its memory is in use.
"""

import logging
import math
import select
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock, Thread

from services.common.clock import monotonic_s
from services.core.changeover.transfer_outcome import TransferOutcome
from services.core.shipments.busy_time import BusyTime
from services.core.shipments.vocabulary import part_of
from services.worker.engine.transfer.doorbell import Doorbell
from services.worker.engine.transfer.errors import FrameError, LaneClosed, MoverFull
from services.worker.engine.transfer.frame import Frame
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Lane, PeerConnected, PeerLost
from services.worker.engine.transfer.link_pace import LinkPace
from services.worker.engine.transfer.outgoing import OutgoingTransfer
from services.worker.engine.transfer.piece_window import WindowBounds
from services.worker.engine.transfer.pieces import (
    KvPiece,
    OutgoingPiece,
    ParameterPiece,
    PieceTaken,
    TransferAborted,
)
from services.worker.engine.transfer.receiver import (
    EpochStatusOf,
    Receiver,
    ReceiverTimeouts,
    Unpack,
)
from services.worker.engine.transfer.sender import Sender, SenderBounds

CHUNK_BYTES_MAX = 1 << 20
FAST_LINK_TIMES = 4  # maximum growth of pieces over a link that carries them within a millisecond
# Factor on the time of a transfer alone on the link, which it shares with others and activations.
PATIENCE = 4.0
REST_S = 1.0  # maximum time between two steps
CLOSE_TIMEOUT_S = 10.0

MoverEvent = TransferOutcome | PeerConnected | PeerLost

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MoverConfig:
    """Limits and timeouts of a mover.

    `answer_timeout_s` must exceed `future_wait_s`: a receiver keeps a piece of a newer epoch that
    long before it answers.
    """

    chunk_bytes: int = CHUNK_BYTES_MAX  # size of a piece; on fast links up to `FAST_LINK_TIMES`×
    link_bytes_per_s: float = 1e9  # minimum bandwidth of a link
    coordinated: bool = True  # pieces yield to activations (KunServe §4.2)
    frames_in_flight_max: int = 48  # unanswered pieces per peer, within `PieceWindow`
    bytes_in_flight_max: int = 48 << 20  # the same in bytes
    active_max: int = 8  # transfers per peer that send pieces in turn; further ones are queued
    transfers_max: int = 4096  # outgoing transfers, queued ones included
    yield_s: float = 0.005  # maximum time that a piece waits for activations
    answer_timeout_s: float = 30.0  # for the answer to a piece
    idle_timeout_s: float = 60.0  # between two pieces of an incoming transfer
    future_wait_s: float = 10.0  # for this member to enter the epoch of a received piece
    pace: LinkPace | None = None  # of a modelled link, in a paced engine


class Mover:
    """Sends and receives all frames of a bulk lane; it does not close the lane.

    `epoch_status` and `unpack` are called on the thread that calls `step`. `unpack` stores the
    payload of a piece, or raises TransferRefused (any WorkerError refuses the transfer).
    """

    def __init__(
        self,
        lane: Lane,
        gate: ActivationGate,
        config: MoverConfig,
        epoch_status: EpochStatusOf,
        unpack: Unpack,
    ) -> None:
        self.coordinated = config.coordinated
        self._lane = lane
        self._gate = gate
        self._yield_s = config.yield_s
        self._transfers_max = config.transfers_max
        self._link_bytes_per_s = config.link_bytes_per_s
        if not 0 < config.chunk_bytes <= CHUNK_BYTES_MAX:
            raise ValueError(
                f"chunk_bytes must be between 1 and {CHUNK_BYTES_MAX}, not {config.chunk_bytes}"
            )
        self._lock = Lock()  # guards the three attributes below
        self._ids: set[str] = set()  # outgoing transfers that have not ended
        self._commands: deque[OutgoingTransfer | str] = deque()  # transfers to send, ids to cancel
        self._events: deque[MoverEvent] = deque()
        self._out_bell = Doorbell()  # wakes the engine's thread
        self._in_bell = Doorbell()  # wakes the thread that calls `step`
        # The attributes below belong to that thread.
        gate.on_clear(self._gate_cleared)
        window = WindowBounds(
            config.chunk_bytes,
            FAST_LINK_TIMES * config.chunk_bytes,
            config.frames_in_flight_max,
            config.bytes_in_flight_max,
        )
        bounds = SenderBounds(config.active_max, window, config.answer_timeout_s, config.pace)
        timeouts = ReceiverTimeouts(config.idle_timeout_s, config.future_wait_s)
        self._sender = Sender(lane, bounds, self._report)
        self._receiver = Receiver(lane, timeouts, epoch_status, unpack, self._report)
        self._shipping = BusyTime()  # of transfers of shipments
        self._yield_until_s: float | None = None  # deadline of the yield in progress
        self._stopping = False
        self._thread: Thread | None = None

    @property
    def shipping_s(self) -> float:
        """Seconds during which KV of shipments was being sent."""
        return self._shipping.total_s

    def piece_bytes(self, peer: str) -> int:
        """Return the size of the next piece to a peer, for `kv_pieces` and `parameter_pieces`."""
        return self._sender.piece_bytes(peer)

    def patience_s(self, size_bytes: int) -> float:
        """Return how long a transfer of that size may take before another source is tried."""
        return PATIENCE * size_bytes / self._link_bytes_per_s

    def send(
        self,
        transfer_id: str,
        peer: str,
        group_id: str,
        epoch: int,
        pieces: Iterable[OutgoingPiece],
    ) -> None:
        """Queue a transfer; the memory that `pieces` read is in use until its outcome.

        Raises:
            MoverFull: if `transfers_max` transfers are queued or in progress.
            ValueError: if the id is in use; a second attempt needs another id.
        """
        transfer = OutgoingTransfer(transfer_id, peer, group_id, epoch, iter(pieces))
        with self._lock:
            if transfer_id in self._ids:
                raise ValueError(f"transfer {transfer_id} is already in progress")
            if len(self._ids) >= self._transfers_max:
                raise MoverFull(f"{self._transfers_max} transfers are queued; try again later")
            self._ids.add(transfer_id)
            self._commands.append(transfer)
        self._in_bell.ring()

    def cancel(self, transfer_id: str) -> None:
        """Cancel a transfer, outgoing or incoming, started or expected.

        A FAILED outcome follows unless the transfer's end was already reported.
        """
        with self._lock:
            self._commands.append(transfer_id)
        self._in_bell.ring()

    def events(self) -> list[MoverEvent]:
        """Return the events since the last call, in order; clears `fileno`.

        Raises LaneClosed if the mover's thread has ended.
        """
        self._out_bell.clear()
        if self._thread is not None and not self._thread.is_alive():
            raise LaneClosed("the mover's thread has ended")
        with self._lock:
            taken = list(self._events)
            self._events.clear()
        return taken

    def fileno(self) -> int:
        """A descriptor that is readable while there are events."""
        return self._out_bell.fileno()

    def start(self) -> None:
        """Start a thread that calls `step` until `close`."""
        self._thread = Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; open transfers end without an outcome. Close the lane only after this."""
        self._stopping = True
        self._in_bell.ring()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread is None or not self._thread.is_alive():
            self._in_bell.close()
            self._out_bell.close()

    def step(self, now_s: float) -> float:
        """Do all work that is due, with at most a piece in each direction.

        Returns the time of the next step, or `now_s` if work is left. A ring of the doorbell makes
        a step due earlier. Raises LaneClosed.
        """
        self._take_commands(now_s)
        self._take_lane(now_s)
        self._receiver.take_held(now_s)
        self._move_pieces(now_s)
        ended = self._sender.finish(now_s)
        for transfer_id in ended:
            self._shipping.end(transfer_id, self._sender.free_s(now_s))
        with self._lock:
            self._ids.difference_update(ended)
        self._receiver.expire(now_s)
        return self._wake_s(now_s)

    def _run(self) -> None:
        waiting = select.poll()
        waiting.register(self._in_bell.fileno(), select.POLLIN)
        try:
            while not self._stopping:
                now_s = monotonic_s()
                wake_s = self.step(now_s)
                if wake_s > now_s:
                    self._sleep(waiting, wake_s - now_s)
                self._in_bell.clear()
        except LaneClosed:
            log.warning("the bulk lane has closed")
        finally:
            self._out_bell.ring()

    def _sleep(self, waiting: select.poll, duration_s: float) -> None:
        """Wait for a command, the end of activations or, if there is room, for frames."""
        duration_ms = math.ceil(duration_s * 1000)
        if not self._receiver.has_room:
            waiting.poll(duration_ms)
            return
        lane = self._lane.fileno()
        waiting.register(lane, select.POLLIN)
        with self._lane.attended():
            waiting.poll(duration_ms)
        waiting.unregister(lane)

    def _report(self, event: MoverEvent) -> None:
        with self._lock:
            self._events.append(event)
        self._out_bell.ring()

    def _take_commands(self, now_s: float) -> None:
        with self._lock:
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            if isinstance(command, OutgoingTransfer):
                self._sender.begin(command)
                if part_of(command.transfer_id) is not None:
                    self._shipping.begin(command.transfer_id, self._sender.free_s(now_s))
            elif not self._sender.cancel(command):
                self._receiver.cancel(command)

    def _take_lane(self, now_s: float) -> None:
        """Read the lane: handle answers now, queue pieces for `_move_pieces`."""
        if self._receiver.has_room:
            for peer, frame in self._lane.receive():
                self._route(peer, frame, now_s)
        for event in self._lane.events():
            if isinstance(event, PeerLost):
                reason = f"the peer is lost: {event.reason}"
                self._sender.forget_peer(event.peer.worker_id, reason)
                self._receiver.forget_peer(event.peer.worker_id, reason)
            self._report(event)

    def _route(self, peer: str, frame: Frame, now_s: float) -> None:
        header = frame.header
        if isinstance(header, KvPiece | ParameterPiece):
            self._receiver.add(peer, header, frame)
            return
        try:
            frame.verify()
        except FrameError as error:
            log.warning("ignored a damaged answer of %s: %s", peer, error)
            return
        match header:
            case TransferAborted(by_sender=True):
                self._receiver.handle(peer, header)
            case PieceTaken() | TransferAborted():
                self._sender.handle(peer, header, now_s)
            case _:
                log.warning("ignored an unknown frame on the bulk lane from %s", peer)

    def _move_pieces(self, now_s: float) -> None:
        sends = self._sender.has_piece(now_s)
        if not (sends or self._receiver.has_piece):
            self._yield_until_s = None
            return
        if self._pause_for_activations(now_s):
            return
        if self._receiver.has_piece:
            self._receiver.receive_piece(now_s)
        if sends:
            self._sender.send_piece(now_s)

    def _pause_for_activations(self, now_s: float) -> bool:
        """Return whether to let activations pass, for `yield_s` at most (KunServe §4.2)."""
        if not self.coordinated:
            return False
        # Set this before reading the gate, or a `_gate_cleared` in between would not ring.
        if self._yield_until_s is None:
            self._yield_until_s = now_s + self._yield_s
        if self._gate.busy and now_s < self._yield_until_s:
            return True
        self._yield_until_s = None
        return False

    def _gate_cleared(self) -> None:
        """Wake the mover if a piece waits; other rings would only slow down senders."""
        if self._yield_until_s is not None:
            self._in_bell.ring()

    def _wake_s(self, now_s: float) -> float:
        """Return the time at which the next work is due."""
        dues = [now_s + REST_S, *self._sender.dues_s(), *self._receiver.dues_s(now_s)]
        if self._receiver.has_piece or self._sender.has_piece(now_s):
            dues.append(now_s if self._yield_until_s is None else self._yield_until_s)
        return max(now_s, min(dues))
