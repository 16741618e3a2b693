"""Frames between members, fenced: only those of the present configuration have an effect.

Frames that a member sends to itself are delivered like others, so that a leader can treat its own
stage as any other.

Back-pressure: frames that a peer cannot accept are queued at the sender, so no frame is lost to a
full queue. A member that is far behind takes no more frames from peers that are ahead, which then
find the lane full in their turn. A peer that is ahead sends nothing of the old epoch any more, so
no frame that this member waits for is behind such frames.
"""

import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, cast

from services.core.changeover.configuration import GroupStages
from services.core.changeover.epoch_fence import EpochFence
from services.worker.engine.pipeline.frames import LaneFrame, SlabRefused, SlabWanted
from services.worker.engine.transfer.errors import LaneFull, PeerUnknown
from services.worker.engine.transfer.frame import Frame, as_bytes
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Lane, LaneEvent

EARLY_MAX = 4096
EARLY_BYTES_MAX = 64 << 20
"""With so many frames of newer epochs, or bytes, no more are taken; a few may exceed it."""
UNSENT_MAX = 65_536
"""Frames for one peer: several times those of all the requests that an engine may have."""

log = logging.getLogger(__name__)

_UNFENCED = (SlabWanted, SlabRefused)
"""Parameters are known by their digest, whatever group asks for them."""


@dataclass(frozen=True, slots=True)
class Received:
    """A frame for this member."""

    peer: str
    frame: LaneFrame
    payload: Any


class Links:
    """The activation lane of one engine."""

    def __init__(self, lane: Lane, worker_id: str, gate: ActivationGate) -> None:
        """`gate` is what bulk transfers stand aside for."""
        self.lane = lane
        self._gate = gate
        self.worker_id = worker_id
        self.group_id = ""
        self._to_self: deque[Received] = deque()
        self._fence: EpochFence[tuple[str, Frame]] = EpochFence()
        self._early_bytes = 0
        self._ahead: set[str] = set()  # peers with early frames
        self._early_logged = False
        self._admitted: deque[tuple[str, Frame]] = deque()
        self._unsent: dict[str, deque[Frame]] = {}

    @property
    def epoch(self) -> int:
        """The epoch of the present configuration."""
        return self._fence.epoch

    def enter(self, group_id: str, epoch: int) -> None:
        """Send and take frames of this configuration from now on."""
        self.group_id = group_id
        self._to_self.clear()
        self._admitted.extend(self._fence.enter(epoch))
        self._early_bytes = sum(frame.size_bytes for _, (_, frame) in self._fence.early)
        self._ahead = {peer for _, (peer, _) in self._fence.early}
        self._early_logged = False

    def send(
        self, peer: str, body: LaneFrame, payload: Any = b"", group: GroupStages | None = None
    ) -> None:
        """Send a frame; to a peer that is lost it is dropped, since a change of group follows.

        It goes out with the present epoch, or with that of `group`. Frames that find no room in the
        lane wait here. Raises LaneFull if `UNSENT_MAX` wait already.
        """
        if peer == self.worker_id:
            self._to_self.append(Received(peer, body, payload))
            return
        sender = (group.group_id, group.epoch) if group else (self.group_id, self.epoch)
        frame = Frame(*sender, body, payload)
        if peer in self._unsent:
            self._keep(peer, frame)
            return
        try:
            self._gate.send(self.lane, peer, frame)
        except PeerUnknown:
            log.warning("%s is not connected: %s not sent", peer, type(body).__name__)
        except LaneFull as error:
            log.warning("%s; frames for it wait here until it takes more", error)
            self._keep(peer, frame)

    def receive(self) -> list[Received]:
        """The frames that came since the last call, in the order of each sender."""
        self._send_what_waits()
        taken = list(self._to_self)
        self._to_self.clear()
        arrived = [*self._admitted, *self.lane.receive(self._peers_to_leave())]
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
        """Peers that came and went since the last call."""
        return self.lane.events()

    def _peers_to_leave(self) -> set[str]:
        """Peers whose frames stay with the lane for now."""
        if len(self._fence.early) < EARLY_MAX and self._early_bytes < EARLY_BYTES_MAX:
            return set()
        if not self._early_logged:
            self._early_logged = True
            log.warning(
                "%d frames of %s are of a newer epoch than %d of %s; the others wait at their"
                " senders until this member has switched, too",
                len(self._fence.early),
                ", ".join(sorted(self._ahead)),
                self.epoch,
                self.group_id,
            )
        return self._ahead

    def _keep(self, peer: str, frame: Frame) -> None:
        """Keep a frame until the lane has room. Raises LaneFull."""
        waiting = self._unsent.setdefault(peer, deque())
        if len(waiting) >= UNSENT_MAX:
            raise LaneFull(f"{peer} takes nothing: {UNSENT_MAX} frames wait for it; see its log")
        # The lane copies a frame that it takes: then the sender may reuse the memory.
        waiting.append(replace(frame, payload=as_bytes(frame.payload).copy()))

    def _send_what_waits(self) -> None:
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
