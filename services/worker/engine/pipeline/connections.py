"""Keeps this engine connected to the other members of its group, on the activation and bulk lane.

An introduction connects it to a worker of another group for a while, to send or fetch layers.

Terms: a lane is a transport for frames between engines. A member is identified by its worker id
and incarnation (one process of the worker). A nonce is the secret that both ends of a planned
connection received from the memory manager. An attempt is a dial or an expected dial.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from services.worker.engine.transfer.errors import LaneFull
from services.worker.engine.transfer.lane import Identity, Lane, LaneEvent, PeerConnected, PeerLost
from services.worker.ipc import Lane as LanePlan
from services.worker.ipc import MemberPlan

log = logging.getLogger(__name__)

RETRY_S = 0.05
"""Pause before a failed dial is repeated: a busy peer refuses until its iteration ends."""
ANSWER_SHARE = 1 / 6
"""Share of the time limit of a change after which a silent worker is given up as a source of
layers. A worker connects and answers between its iterations, so this exceeds a long iteration."""


@dataclass(slots=True)
class _Peers:
    """The connections of a lane, by worker id."""

    lane: Lane
    connected: dict[str, Identity] = field(default_factory=dict)  # the connected process
    awaited: dict[str, tuple[Identity, str]] = field(default_factory=dict)  # attempts: peer, nonce
    retry_s: dict[str, float] = field(default_factory=dict)  # earliest time of the next dial
    # Processes whose connection was lost. A process stays here after a reconnect, until the next
    # configuration, because the frames sent in between are missing.
    lost: set[Identity] = field(default_factory=set)

    def note(self, event: LaneEvent, now_s: float) -> None:
        worker_id = event.peer.worker_id
        match event:
            case PeerConnected(peer=peer):
                self.connected[worker_id] = peer
                self.awaited.pop(worker_id, None)
                self.retry_s.pop(worker_id, None)
            case PeerLost(peer=peer):
                # A failed dial reports an empty incarnation and ends the attempt. The loss of an
                # earlier process of the same worker does not.
                self.lose(peer)
                awaited, _ = self.awaited.get(worker_id, (None, ""))
                if awaited is not None and peer.incarnation in ("", awaited.incarnation):
                    del self.awaited[worker_id]
                    self.retry_s[worker_id] = now_s + RETRY_S

    def has(self, peer: Identity) -> bool:
        """Whether the lane is connected to exactly this process."""
        return self.connected.get(peer.worker_id) == peer and self.lane.has(peer.worker_id)

    def detect_lost(self) -> None:
        """Mark connections as lost that ended without an event at this end."""
        for peer in [peer for peer in self.connected.values() if not self.has(peer)]:
            self.lose(peer)

    def lose(self, peer: Identity) -> None:
        """Mark the connection to this process as lost, if there was one."""
        if self.connected.get(peer.worker_id) == peer:
            del self.connected[peer.worker_id]
            self.lost.add(peer)


@dataclass(slots=True)
class _Introduction:
    """A peer of another group; `own` is this worker, with its nonces for the peer."""

    own: MemberPlan
    peer: MemberPlan
    until_s: float  # deadline of connecting
    end_s: float  # when the connection ends: at the time limit of the change that it serves
    was_connected: bool = False


class Connections:
    """Connects this worker to its peers. Of two workers, the one with the smaller id dials."""

    def __init__(self, activations: Lane, bulk: Lane, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._activations = _Peers(activations)
        self._bulk = _Peers(bulk)
        self._introductions: dict[str, _Introduction] = {}  # by worker id

    def introduce(self, own: MemberPlan, peers: Iterable[MemberPlan], timeout_s: float) -> None:
        """Connect to workers of other groups that connect to this worker at the same time.

        `timeout_s` is the time limit of the change that needs the connections, which end with it.
        `advance` must be called. Connections that exist already stay as they are.
        """
        now_s = self._now_s()
        times_s = now_s + ANSWER_SHARE * timeout_s, now_s + timeout_s
        for peer in peers:
            if peer.worker_id in self._introductions or not self.has(peer):
                self._introductions[peer.worker_id] = _Introduction(own, peer, *times_s)

    def end_introductions(self, worker_ids: Iterable[str]) -> None:
        """Treat these workers as members from now on: another plan has nonces for them."""
        for worker_id in worker_ids:
            self._introductions.pop(worker_id, None)

    @property
    def introducing(self) -> bool:
        """Whether an introduced worker is not connected yet."""
        now_s = self._now_s()
        return any(
            now_s <= introduction.until_s and not self.has(introduction.peer)
            for introduction in self._introductions.values()
        )

    def reaches(self, worker_id: str) -> bool | None:
        """Whether a worker of another group is connected; None: not yet, but it may be in time."""
        introduction = self._introductions.get(worker_id)
        if introduction is None:
            # Members of a group that has split stay connected, and are not introduced.
            lanes = (self._activations, self._bulk)
            known = [(lane, lane.connected.get(worker_id)) for lane in lanes]
            return all(peer is not None and lane.has(peer) for lane, peer in known)
        if self.has(introduction.peer):
            return True
        return None if self.may_connect(introduction.peer) else False

    def may_connect(self, peer: MemberPlan) -> bool:
        """Whether an introduced worker is connected, or may be in time."""
        introduction = self._introductions.get(peer.worker_id)
        if introduction is None or introduction.was_connected:
            return self.has(peer)
        return self.has(peer) or self._now_s() <= introduction.until_s

    def advance(self) -> None:
        """Dial or expect the introduced workers again, and end old introductions."""
        now_s = self._now_s()
        for worker_id, introduction in list(self._introductions.items()):
            if self.has(introduction.peer):
                introduction.was_connected = True
                if now_s > introduction.end_s:
                    self._disconnect(worker_id)
                    del self._introductions[worker_id]
            elif introduction.was_connected or now_s > introduction.until_s:
                del self._introductions[worker_id]
            else:
                try:
                    self.open(introduction.own, introduction.peer)
                except LaneFull as error:
                    log.warning("%s is not connected: %s", worker_id, error)
                    del self._introductions[worker_id]

    def _disconnect(self, worker_id: str) -> None:
        for peers in (self._activations, self._bulk):
            peers.lane.disconnect(worker_id)
            peers.connected.pop(worker_id, None)

    def open(self, own: MemberPlan, peer: MemberPlan) -> None:
        """Dial or expect a peer on each lane that is not connected to it.

        Call it again until `has` is True: a peer refuses a dial that it does not expect yet.

        Raises:
            LaneFull: if too many peers are expected.
        """
        identity = Identity(peer.worker_id, peer.incarnation)
        for peers, peer_plan, own_plan in (
            (self._activations, peer.activations, own.activations),
            (self._bulk, peer.bulk, own.bulk),
        ):
            if peers.has(identity):
                continue
            peers.lose(identity)  # the connection may have ended without an event at this end
            if own.worker_id < peer.worker_id:
                self._dial(peers, identity, peer_plan)
            else:
                self._expect(peers, identity, own_plan)

    def _dial(self, peers: _Peers, peer: Identity, peer_plan: LanePlan) -> None:
        """Dial a peer unless an attempt or the pause after one is in progress."""
        worker_id = peer.worker_id
        awaited, _ = peers.awaited.get(worker_id, (None, ""))
        if awaited != peer and self._now_s() >= peers.retry_s.get(worker_id, 0.0):
            peers.awaited[worker_id] = (peer, peer_plan.nonce)
            peers.lane.connect(worker_id, peer_plan.address, peer_plan.nonce.encode())

    def _expect(self, peers: _Peers, peer: Identity, own_plan: LanePlan) -> None:
        """Expect a dial of the peer, with the nonce of the newest plan."""
        if peers.awaited.get(peer.worker_id) != (peer, own_plan.nonce):
            peers.lane.expect(peer, own_plan.nonce.encode())
            peers.awaited[peer.worker_id] = (peer, own_plan.nonce)

    def has(self, peer: MemberPlan) -> bool:
        """Whether both lanes are connected to a peer."""
        identity = Identity(peer.worker_id, peer.incarnation)
        return all(peers.has(identity) for peers in (self._activations, self._bulk))

    def end_all(self, activations: bool, bulk: bool) -> None:
        """End all connections of these lanes, without events at this end."""
        for peers, ends in ((self._activations, activations), (self._bulk, bulk)):
            for worker_id in peers.connected if ends else ():
                peers.lane.disconnect(worker_id)

    def enter(self, members: Iterable[MemberPlan]) -> None:
        """Start a configuration: only `members` that are not connected now stay marked as lost."""
        members = tuple(members)
        self.end_introductions(member.worker_id for member in members)
        processes = {Identity(member.worker_id, member.incarnation) for member in members}
        for peers in (self._activations, self._bulk):
            gone = processes.difference(peers.connected.values())
            peers.lost &= gone

    def detect_lost(self) -> None:
        """Mark connections as lost that ended without an event at this end."""
        self._activations.detect_lost()
        self._bulk.detect_lost()

    @property
    def any_lost(self) -> bool:
        """Whether any connection was lost since the start of the configuration."""
        return bool(self._activations.lost or self._bulk.lost)

    def lost(self, members: Iterable[MemberPlan]) -> list[str]:
        """The ids of the members that were lost on either lane."""
        gone = self._activations.lost | self._bulk.lost
        return [
            member.worker_id
            for member in members
            if Identity(member.worker_id, member.incarnation) in gone
        ]

    def note_activations(self, event: LaneEvent) -> None:
        """Record a connect or loss on the activation lane."""
        self._activations.note(event, self._now_s())

    def note_bulk(self, event: LaneEvent) -> None:
        """Record a connect or loss on the bulk lane."""
        self._bulk.note(event, self._now_s())
