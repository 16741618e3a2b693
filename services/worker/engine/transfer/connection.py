"""A connection of a UCX lane: the frames in transit to and from a peer.

A lane exchanges frames (messages with a header and a payload) with other engines. Frames travel
over UCX, and handshakes and heartbeats over a TCP connection beside it, the control link. The
thread that drives the lane makes all calls, except that any thread may call `queue`.
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

FIRST_MESSAGE = np.zeros(1, np.uint8)
"""The first message from either end: its arrival proves that UCX works in that direction."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a connection."""

    queue_bytes: int  # of encoded frames that UCX has not sent yet
    frames_in_flight: int  # frames sent or queued that the peer's engine has not taken yet


@dataclass(frozen=True, slots=True)
class _Sending:
    request: UcxRequest
    size_bytes: int
    sent: Sent
    until_s: float  # deadline
    awaited: bool  # the engine waits to reuse the `PayloadRoom` of its payload


class Connection:
    """A connection, from its handshake on; frames are sent and received from `open` to `lose`."""

    def __init__(self, link: ControlLink, facts: Facts, codec: FrameCodec, bounds: Bounds) -> None:
        """`facts` describe this end for the handshake."""
        self.link = link
        self.facts = facts
        self.peer = Identity("", "")  # empty before the handshake
        self.nonce: bytes | None = None  # secret of the handshake, set while this end dials
        self.heard_s = 0.0  # time of the peer's newest control message
        self.deadline_s: float | None = None  # of the handshake and the peer's first message
        self.confirmed = False  # the peer's first message has arrived through UCX
        self.lost: str | None = None  # the reason, once lost
        self.shares_memory = False  # the peer may write into memory of this process
        self.taken = 0  # frames of the peer that this engine has taken
        self._taken_reported = 0  # `taken` in the newest heartbeat to the peer
        self._codec = codec
        self._bounds = bounds
        self._lock = Lock()
        self._outbox: deque[tuple[Bytes, Sent, bool]] = deque()  # not handed to UCX yet
        self._queued_bytes = 0  # queued, and not sent by UCX yet
        self._refused = False  # a frame was refused because the queue was full, and still is
        self._queued_frames = 0  # frames queued since the start: the next sequence number
        self._acknowledged = 0  # frames that the peer's engine has taken
        self._endpoint: Endpoint | None = None  # None before `open` and after `lose`
        self._send_tag = 0  # the UCX tag of messages to the peer
        self._sending: deque[_Sending] = deque()  # handed to UCX, oldest first
        self._fetching: deque[tuple[UcxRequest, Bytes]] = deque()  # being received, oldest first
        self._expected = 0  # sequence number of the next frame of the peer

    @property
    def is_open(self) -> bool:
        """Whether frames are sent and received."""
        return self._endpoint is not None and self.lost is None

    @property
    def has_queued(self) -> bool:
        """Whether `submit` has frames to hand to UCX."""
        return bool(self._outbox)

    @property
    def has_completed(self) -> bool:
        """Whether `reap_sends` or `reap_fetches` has a completed request to handle."""
        sending, fetching = self._sending, self._fetching
        return bool(
            (sending and sending[0].request.completed) or (fetching and fetching[0][0].completed)
        )

    @property
    def is_released(self) -> bool:
        """Whether UCX no longer uses memory of frames of the connection."""
        return not self._sending and not self._fetching

    @property
    def fetching_bytes(self) -> int:
        """Total bytes of the frames being received."""
        return sum(memory.size for _, memory in self._fetching)

    @property
    def owes_acknowledgement(self) -> bool:
        """Whether to send a heartbeat now, so that the peer does not reach its in-flight limit."""
        return self.taken - self._taken_reported >= self._bounds.frames_in_flight // 4

    def queue(self, frame: Frame) -> Sent:
        """Encode a frame and queue it for `submit`. Raises LaneFull, PeerUnknown, ValueError."""
        bounds = self._bounds
        with self._lock:
            if self.lost is not None:
                raise PeerUnknown(f"the connection to {self.peer.worker_id} is lost: {self.lost}")
            # Flow control: frames accumulate if the peer's engine is slow, bytes if the link is.
            if self._queued_frames - self._acknowledged >= bounds.frames_in_flight:
                raise LaneFull(
                    f"{self.peer.worker_id} has {bounds.frames_in_flight} frames left to take"
                )
            if self._queued_bytes >= bounds.queue_bytes:
                self._refused = True
                raise LaneFull(f"{self._queued_bytes} bytes are queued for {self.peer.worker_id}")
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
        """Open the UCX endpoint to `peer`; returns UCX's routes, such as "tcp/eth0".

        The peer's first message must arrive by `until_s`. Raises ConnectionError.
        """
        self.peer = peer.identity
        self._endpoint = transport.open(peer.endpoint)
        self._send_tag = peer.tag
        self.nonce = None
        self.deadline_s = until_s
        self.heard_s = now_s
        first_message = self._endpoint.send(FIRST_MESSAGE, self._send_tag)
        self._sending.append(_Sending(first_message, 0, Sent(), until_s, awaited=False))
        routes = self._endpoint.routes
        self.shares_memory = not routes or any(route.endswith("/memory") for route in routes)
        return routes

    def submit(self, until_s: float) -> None:
        """Hand queued frames to UCX, which must send them by `until_s`. Raises ConnectionError."""
        if self._endpoint is None:
            return
        while self._outbox:
            encoded, sent, awaited = self._outbox.popleft()
            try:
                request = self._endpoint.send(encoded, self._send_tag)
            except ConnectionError:
                sent.finish(_lost_error("UCX has refused a frame"))
                raise
            self._sending.append(_Sending(request, encoded.size, sent, until_s, awaited))

    def fetch(self, transport: UcxTransport, arrival: IncomingMessage, memory: Bytes) -> None:
        """Start to receive an announced frame into `memory`, which has the frame's size."""
        self._fetching.append((transport.fetch(arrival, memory), memory))

    def reap_sends(self) -> bool:
        """Finish the sends that UCX has completed; returns whether the engine waits for any.

        The engine waits to reuse a `PayloadRoom`, or for room in the queue after a refused frame.
        Raises ConnectionError if a send failed.
        """
        awaited = False
        while self._sending and self._sending[0].request.completed:
            sending = self._sending.popleft()
            with self._lock:
                self._queued_bytes -= sending.size_bytes
                if self._refused and self._queued_bytes < self._bounds.queue_bytes:
                    self._refused, awaited = False, True
            problem = sending.request.error()
            sending.sent.finish(_lost_error(self.lost or problem) if problem is not None else None)
            awaited |= sending.awaited
            if problem is not None and self.lost is None:
                raise ConnectionError(problem)
        return awaited

    def reap_fetches(self, verify: bool) -> list[Frame]:
        """Return the completely received frames, in order. Raises ConnectionError, FrameError.

        Frames that arrive before `open` are kept until then. `verify` checks their checksums.
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
                self.confirmed = True  # the first message has no content
                continue
            frames.append(self._checked(self._codec.decode(memory), verify))
        return frames

    def acknowledge(self, taken: int) -> None:
        """Record that the peer's engine has taken `taken` frames in total. Raises FrameError."""
        with self._lock:
            if not self._acknowledged <= taken <= self._queued_frames:
                raise FrameError("the peer has taken frames that were not sent")
            self._acknowledged = taken

    def beat(self) -> None:
        """Send a heartbeat that acknowledges the frames taken so far. Raises OSError."""
        self._taken_reported = self.taken
        self.link.send(Beat(self._taken_reported))

    def loss_reason(self, now_s: float, silence_timeout_s: float) -> str | None:
        """Return the reason why the connection must be lost now; None while it is healthy."""
        if self.deadline_s is not None:
            return self._setup_timeout_reason if now_s >= self.deadline_s else None
        if now_s - self.heard_s >= silence_timeout_s:
            return f"the peer sent no heartbeat for {silence_timeout_s:g} s"
        if self._sending and now_s >= self._sending[0].until_s:
            return "a frame could not be sent in time"
        if self._endpoint is not None and not self._endpoint.alive:
            return "UCX has lost the peer"
        return None

    @property
    def _setup_timeout_reason(self) -> str:
        """The error text for the missed deadline of a new connection."""
        if self._endpoint is None:
            return "no valid handshake in time"
        return (
            "the peer has connected, but no data arrived from it through UCX; check that the hosts"
            " can reach each other through UCX (ucx_transports, ucx_devices, ucx_ports)"
        )

    def lose(self, reason: str) -> None:
        """Stop sending and receiving for `reason`; UCX soon completes the aborted requests."""
        with self._lock:
            self.lost = reason
            waiting = list(self._outbox)
            self._outbox.clear()
        for _, sent, _ in waiting:
            sent.finish(_lost_error(reason))
        self.link.close()
        if self._endpoint is not None:
            self._endpoint.abort()
            self._endpoint = None  # release it, because it keeps its UCX worker alive

    def _checked(self, frame: Frame, verify: bool) -> Frame:
        peer = self.peer
        if frame.sender != peer.worker_id or frame.incarnation != peer.incarnation:
            raise FrameError("the sender in a frame is not the connected peer")
        if frame.sequence != self._expected:
            raise FrameError(f"received frame {frame.sequence} instead of {self._expected}")
        self._expected += 1
        if verify:
            frame.verify()
        return frame


def _lost_error(reason: str) -> PeerUnknown:
    return PeerUnknown(f"the connection is lost: {reason}")
