"""Sends and receives frames between members, fenced by epoch.

The epoch numbers the configurations of a group. A member handles only frames of its present epoch:
it discards frames of older epochs and keeps early frames, of newer epochs, until it enters theirs.

Frames that a member sends to itself are delivered like others, so that a leader can treat its own
stage as any other.

Back-pressure: frames that a peer cannot accept are queued at the sender, so none are lost to a full
queue. A member with too many early frames stops reading from the peers that sent them, until the
lane is full for these peers. Such a peer has entered a newer epoch and sends no more frames of the
present epoch, so this member does not wait for any frame that it leaves on the lane.
"""

import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from services.core.changeover.configuration import GroupStages
from services.core.changeover.epoch_fence import EpochFence
from services.core.shipments.vocabulary import ShipmentFrame
from services.worker.engine.pipeline.frames import LaneFrame, SlabRefused, SlabRequest
from services.worker.engine.transfer.errors import LaneFull, PeerUnknown
from services.worker.engine.transfer.frame import Frame, as_bytes
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Lane, LaneEvent

EARLY_MAX = 4096
EARLY_BYTES_MAX = 64 << 20
"""Soft limits of early frames and their bytes; above, frames of their senders are not read."""
UNSENT_MAX = 65_536
"""Frames queued per peer; a change with all requests of an engine needs only a fraction."""

log = logging.getLogger(__name__)

_UNFENCED = (SlabRequest, SlabRefused, *get_args(ShipmentFrame))
"""Valid in any epoch: digests identify parameters, and a shipment's tokens its KV."""


@dataclass(frozen=True, slots=True)
class Received:
    """A received frame."""

    peer: str
    frame: LaneFrame
    payload: Any


class Links:
    """The activation lane of an engine, fenced by epoch."""

    def __init__(self, lane: Lane, worker_id: str, gate: ActivationGate) -> None:
        """`gate` makes bulk transfers pause while a frame is being sent."""
        self.lane = lane
        self._gate = gate
        self.worker_id = worker_id
        self.group_id = ""
        self._to_self: deque[Received] = deque()  # frames from this member to itself
        self._fence: EpochFence[tuple[str, Frame]] = EpochFence()
        self._early_bytes = 0
        self._ahead: set[str] = set()  # peers with early frames
        self._early_logged = False  # whether the limit of early frames was logged in this epoch
        self._admitted: deque[tuple[str, Frame]] = deque()  # early frames whose epoch has begun
        self._unsent: dict[str, deque[Frame]] = {}  # frames that found the lane full, by peer

    @property
    def epoch(self) -> int:
        """The epoch of the present configuration."""
        return self._fence.epoch

    def enter(self, group_id: str, epoch: int) -> None:
        """Enter a configuration: send frames with its epoch and accept only those."""
        self.group_id = group_id
        self._to_self.clear()
        self._admitted.extend(self._fence.enter(epoch))
        self._early_bytes = sum(frame.size_bytes for _, (_, frame) in self._fence.early)
        self._ahead = {peer for _, (peer, _) in self._fence.early}
        self._early_logged = False

    def send(
        self, peer: str, body: LaneFrame, payload: Any = b"", group: GroupStages | None = None
    ) -> None:
        """Send a frame with the present group and epoch, or with those of `group`.

        A frame to a lost peer is discarded, because a change of the group follows. A frame is
        queued here while the lane is full.

        Raises:
            LaneFull: if `UNSENT_MAX` frames wait for the peer already.
        """
        if peer == self.worker_id:
            self._to_self.append(Received(peer, body, payload))
            return
        sender = (group.group_id, group.epoch) if group else (self.group_id, self.epoch)
        frame = Frame(*sender, body, payload)
        if peer in self._unsent:  # keep the order
            self._enqueue(peer, frame)
            return
        try:
            self._gate.send(self.lane, peer, frame)
        except PeerUnknown:
            log.warning("%s is not connected: %s not sent", peer, type(body).__name__)
        except LaneFull as error:
            log.warning("%s; frames for it are queued here until it accepts more", error)
            self._enqueue(peer, frame)

    def receive(self) -> list[Received]:
        """Return the frames received since the last call, in sending order for each peer.

        Also sends queued frames for which the lane has room again.
        """
        self._send_queued()
        taken = list(self._to_self)
        self._to_self.clear()
        arrived = [*self._admitted, *self.lane.receive(self._peers_to_pause())]
        self._admitted.clear()
        for peer, frame in arrived:
            body = cast(LaneFrame, frame.header)
            if isinstance(body, _UNFENCED) or self._fence.admits(frame.epoch, (peer, frame)):
                taken.append(Received(peer, body, frame.payload))
            elif frame.epoch > self.epoch:
                self._early_bytes += frame.size_bytes
                self._ahead.add(peer)
        return taken

    def events(self) -> list[LaneEvent]:
        """Return the connects and losses on the lane since the last call."""
        return self.lane.events()

    def _peers_to_pause(self) -> set[str]:
        """Return the peers whose frames stay on the lane for now (back-pressure)."""
        if len(self._fence.early) < EARLY_MAX and self._early_bytes < EARLY_BYTES_MAX:
            return set()
        if not self._early_logged:
            self._early_logged = True
            log.warning(
                "%d frames of %s are of a newer epoch than %d of %s; further frames stay at their"
                " senders until this member has switched, too",
                len(self._fence.early),
                ", ".join(sorted(self._ahead)),
                self.epoch,
                self.group_id,
            )
        return self._ahead

    def _enqueue(self, peer: str, frame: Frame) -> None:
        """Queue a frame until the lane has room. Raises LaneFull at `UNSENT_MAX` frames."""
        waiting = self._unsent.setdefault(peer, deque())
        if len(waiting) >= UNSENT_MAX:
            raise LaneFull(f"{peer} accepts no frames: {UNSENT_MAX} are queued for it; see its log")
        # Copy the payload, as the lane would: the caller may reuse its memory after `send`.
        waiting.append(replace(frame, payload=as_bytes(frame.payload).copy()))

    def _send_queued(self) -> None:
        for peer, waiting in list(self._unsent.items()):
            try:
                while waiting:
                    self._gate.send(self.lane, peer, waiting[0])
                    waiting.popleft()
            except LaneFull:
                continue
            except PeerUnknown:
                log.warning("%s is not connected: %d frames not sent", peer, len(waiting))
            del self._unsent[peer]
