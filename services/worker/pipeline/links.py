"""Frames between members, fenced: only those of the present configuration have an effect.

A frame of an older epoch is dropped, one of a newer epoch waits until this member has switched,
because members switch at different moments. What a member sends to itself takes no detour, so that
a leader can treat its own stage as any other.
"""

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, cast

from services.worker.pipeline.frames import Body, FetchRefused, FetchSlab
from services.worker.transfer.errors import PeerUnknown
from services.worker.transfer.frame import Frame
from services.worker.transfer.gate import ActivationGate
from services.worker.transfer.lane import Lane, LaneEvent

EARLY_MAX = 4096

log = logging.getLogger(__name__)

_UNFENCED = (FetchSlab, FetchRefused)
"""Parameters are known by their digest, whatever group asks for them."""


@dataclass(frozen=True, slots=True)
class Received:
    """A frame for this member."""

    peer: str
    body: Body
    payload: Any


class Links:
    """The activation lane of one engine."""

    def __init__(self, lane: Lane, worker_id: str, gate: ActivationGate) -> None:
        """`gate` is what bulk transfers stand aside for."""
        self.lane = lane
        self._gate = gate
        self.worker_id = worker_id
        self.group_id = ""
        self.epoch = 0
        self._own: deque[Received] = deque()
        self._early: deque[tuple[str, Frame]] = deque(maxlen=EARLY_MAX)
        self._ripe: deque[tuple[str, Frame]] = deque()

    def enter(self, group_id: str, epoch: int) -> None:
        """Send and take frames of this configuration from now on."""
        self.group_id = group_id
        self.epoch = epoch
        self._own.clear()
        self._ripe.extend(self._early)
        self._early.clear()

    def send(self, peer: str, body: Body, payload: Any = b"") -> None:
        """Send a frame; to a peer that is lost it is dropped, since a change of group follows."""
        if peer == self.worker_id:
            self._own.append(Received(peer, body, payload))
            return
        self._gate.enter()
        try:
            sent = self.lane.send(peer, Frame(self.group_id, self.epoch, body, payload))
        except PeerUnknown:
            self._gate.leave()
            log.warning("%s is not connected: %s not sent", peer, type(body).__name__)
        else:
            sent.when_done(self._gate.leave)

    def receive(self) -> list[Received]:
        """What has come since the last call, in the order of each sender."""
        taken = list(self._own)
        self._own.clear()
        arrived = [*self._ripe, *self.lane.receive()]
        self._ripe.clear()
        for peer, frame in arrived:
            body = cast(Body, frame.header)
            if frame.epoch == self.epoch or isinstance(body, _UNFENCED):
                taken.append(Received(peer, body, frame.payload))
            elif frame.epoch > self.epoch:
                self._early.append((peer, frame))
        return taken

    def events(self) -> list[LaneEvent]:
        """Peers that came and went since the last call."""
        return self.lane.events()
