"""One connection of a UCX lane: the frames on their way to and from one peer.

The engine's threads call `queue`; the thread that drives the lane calls everything else.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from services.worker.engine.transfer.control_link import Beat, ControlLink
from services.worker.engine.transfer.errors import FrameError, LaneFull, PeerUnknown
from services.worker.engine.transfer.frame import Bytes, Frame, FrameCodec, PayloadRoom
from services.worker.engine.transfer.handshake import Facts
from services.worker.engine.transfer.lane import Identity, Sent
from services.worker.engine.transfer.ucx_transport import (
    Endpoint,
    IncomingMessage,
    UcxRequest,
    UcxTransport,
)

OPENING = np.zeros(1, np.uint8)
"""The first message of either end: it shows that the transport carries something there."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may wait for one peer, in the sender's queue and between the two engines."""

    queue_bytes: int
    frames_in_flight: int


@dataclass(frozen=True, slots=True)
class _Sending:
    request: UcxRequest
    size_bytes: int
    sent: Sent
    until_s: float
    awaited: bool


class Connection:
    """A connection begins with its handshake; frames flow after `open`, until `lose`.

    `confirmed`: the peer's first message has come.
    """

    def __init__(self, link: ControlLink, facts: Facts, codec: FrameCodec, bounds: Bounds) -> None:
        """`facts` describe this end. Before the handshake the peer has no id or incarnation."""
        self.link = link
        self.facts = facts
        self.peer = Identity("", "")
        self.nonce: bytes | None = None  # of a connection that this end makes, until it is open
        self.heard_s = 0.0
        self.deadline_s: float | None = None  # of the handshake and the peer's first message
        self.confirmed = False
        self.lost: str | None = None
        self.shares_memory = False  # whether the peer writes into memory of this process
        self.taken = 0  # frames that this engine has taken
        self._taken_reported = 0  # the same number as the peer knows it
        self._codec = codec
        self._bounds = bounds
        self._lock = Lock()
        self._outbox: deque[tuple[Bytes, Sent, bool]] = deque()
        self._queued_bytes = 0
        self._refused = False  # a frame for want of room, since when there has been none
        self._queued_frames = 0
        self._acknowledged = 0
        self._endpoint: Endpoint | None = None
        self._send_tag = 0
        self._sending: deque[_Sending] = deque()
        self._fetching: deque[tuple[UcxRequest, Bytes]] = deque()
        self._expected = 0

    @property
    def is_open(self) -> bool:
        """Whether frames flow."""
        return self._endpoint is not None and self.lost is None

    @property
    def has_queued(self) -> bool:
        """Whether frames wait to be handed to UCX."""
        return bool(self._outbox)

    @property
    def has_completed(self) -> bool:
        """Whether UCX has completed something that `reap_sends` or `reap_fetches` would take."""
        sending, fetching = self._sending, self._fetching
        return bool(
            (sending and sending[0].request.completed) or (fetching and fetching[0][0].completed)
        )

    @property
    def is_quiet(self) -> bool:
        """Whether UCX uses no memory of the connection any more."""
        return not self._sending and not self._fetching

    @property
    def fetching_bytes(self) -> int:
        """Bytes of the frames that are being received."""
        return sum(memory.size for _, memory in self._fetching)

    @property
    def owes_acknowledgement(self) -> bool:
        """Whether a beat is due, because without it the peer would soon have to stop sending."""
        return self.taken - self._taken_reported >= self._bounds.frames_in_flight // 4

    def queue(self, frame: Frame) -> Sent:
        """Encode a frame and queue it. Raises LaneFull, PeerUnknown, ValueError."""
        bounds = self._bounds
        with self._lock:
            if self.lost is not None:
                raise PeerUnknown(f"the connection to {self.peer.worker_id} is lost: {self.lost}")
            if self._queued_frames - self._acknowledged >= bounds.frames_in_flight:
                raise LaneFull(f"{self.peer.worker_id} has yet to take {bounds.frames_in_flight}")
            if self._queued_bytes >= bounds.queue_bytes:
                self._refused = True
                raise LaneFull(f"{self._queued_bytes} bytes wait for {self.peer.worker_id}")
            facts = self.facts
            encoded = self._codec.encode(
                frame.stamped(facts.worker_id, facts.incarnation, self._queued_frames)
            )
            sent = Sent()
            self._queued_frames += 1
            self._queued_bytes += encoded.size
            self._outbox.append((encoded, sent, isinstance(frame.payload, PayloadRoom)))
        return sent

    def open(
        self, transport: UcxTransport, peer: Facts, now_s: float, until_s: float
    ) -> Sequence[str]:
        """Open the endpoint to `peer`, and let frames flow; returns the routes that UCX names.

        The peer's first message must come until `until_s`. Raises ConnectionError.
        """
        self.peer = peer.identity
        self._endpoint = transport.open(peer.endpoint)
        self._send_tag = peer.tag
        self.nonce = None
        self.deadline_s = until_s
        self.heard_s = now_s
        opening = self._endpoint.send(OPENING, self._send_tag)
        self._sending.append(_Sending(opening, 0, Sent(), until_s, awaited=False))
        routes = self._endpoint.routes
        self.shares_memory = not routes or any(route.endswith("/memory") for route in routes)
        return routes

    def submit(self, until_s: float) -> None:
        """Hand queued frames to UCX. Raises ConnectionError."""
        if self._endpoint is None:
            return
        while self._outbox:
            encoded, sent, awaited = self._outbox.popleft()
            try:
                request = self._endpoint.send(encoded, self._send_tag)
            except ConnectionError:
                sent.finish(_lost("UCX has refused a frame"))
                raise
            self._sending.append(_Sending(request, encoded.size, sent, until_s, awaited))

    def fetch(self, transport: UcxTransport, arrival: IncomingMessage, memory: Bytes) -> None:
        """Begin to receive a frame into `memory`, of its size."""
        self._fetching.append((transport.fetch(arrival, memory), memory))

    def reap_sends(self) -> bool:
        """Finish the sends that UCX has completed; whether somebody waits for one of them.

        A caller whose frame was refused waits for room. Raises ConnectionError if one failed.
        """
        awaited = False
        while self._sending and self._sending[0].request.completed:
            sending = self._sending.popleft()
            with self._lock:
                self._queued_bytes -= sending.size_bytes
                if self._refused and self._queued_bytes < self._bounds.queue_bytes:
                    self._refused, awaited = False, True
            problem = sending.request.error()
            sending.sent.finish(_lost(self.lost or problem) if problem is not None else None)
            awaited |= sending.awaited
            if problem is not None and self.lost is None:
                raise ConnectionError(problem)
        return awaited

    def reap_fetches(self, verify: bool) -> list[Frame]:
        """The frames whose bytes are all here, in order. Raises ConnectionError, FrameError.

        What came before the end of the handshake waits for that.
        """
        frames: list[Frame] = []
        if self._endpoint is None and self.lost is None:
            return frames
        while self._fetching and self._fetching[0][0].completed:
            request, memory = self._fetching.popleft()
            problem = request.error()
            if self.lost is not None:
                continue
            if problem is not None:
                raise ConnectionError(problem)
            if not self.confirmed:
                self.confirmed = True  # nothing is in the first message
                continue
            frames.append(self._checked(self._codec.decode(memory), verify))
        return frames

    def acknowledge(self, taken: int) -> None:
        """Note that the peer's engine has taken `taken` frames. Raises FrameError."""
        with self._lock:
            if not self._acknowledged <= taken <= self._queued_frames:
                raise FrameError("the peer has taken frames that were not sent")
            self._acknowledged = taken

    def beat(self) -> None:
        """Tell the peer that this process lives and what it has taken. Raises OSError."""
        self._taken_reported = self.taken
        self.link.send(Beat(self._taken_reported))

    def overdue(self, now_s: float, silence_timeout_s: float) -> str | None:
        """Why the connection must be lost now; None if it need not."""
        if self.deadline_s is not None:
            return self._missing if now_s >= self.deadline_s else None
        if now_s - self.heard_s >= silence_timeout_s:
            return f"nothing was heard of the peer for {silence_timeout_s:g} s"
        if self._sending and now_s >= self._sending[0].until_s:
            return "a frame could not be sent in time"
        if self._endpoint is not None and not self._endpoint.alive:
            return "UCX has lost the peer"
        return None

    @property
    def _missing(self) -> str:
        """What must have come by the deadline."""
        if self._endpoint is None:
            return "no valid handshake in time"
        return (
            "nothing has come from the peer through UCX, although it has connected; check that the"
            " hosts let UCX through to each other (ucx_transports, ucx_devices, ucx_ports)"
        )

    def lose(self, reason: str) -> None:
        """Stop everything; the requests that UCX holds complete soon by themselves."""
        with self._lock:
            self.lost = reason
            waiting = list(self._outbox)
            self._outbox.clear()
        for _, sent, _ in waiting:
            sent.finish(_lost(reason))
        self.link.close()
        if self._endpoint is not None:
            self._endpoint.abort()
            self._endpoint = None  # it keeps its UCX worker

    def _checked(self, frame: Frame, verify: bool) -> Frame:
        peer = self.peer
        if frame.sender != peer.worker_id or frame.incarnation != peer.incarnation:
            raise FrameError("a frame names another sender")
        if frame.sequence != self._expected:
            raise FrameError(f"frame {frame.sequence} came instead of {self._expected}")
        self._expected += 1
        if verify:
            frame.verify()
        return frame


def _lost(reason: str) -> PeerUnknown:
    return PeerUnknown(f"the connection is lost: {reason}")
