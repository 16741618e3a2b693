"""Which members this engine is connected to, on both lanes."""

from dataclasses import dataclass, field

from services.worker.ipc import MemberPlan
from services.worker.transfer.lane import Identity, Lane, LaneEvent, PeerConnected, PeerLost


@dataclass(slots=True)
class _Peers:
    """Of one lane: the process that each name is connected to, and names that are awaited."""

    lane: Lane
    connected: dict[str, Identity] = field(default_factory=dict)
    awaited: dict[str, Identity] = field(default_factory=dict)

    def note(self, event: LaneEvent) -> None:
        name = event.peer.worker_id
        match event:
            case PeerConnected(peer=peer):
                self.connected[name] = peer
                self.awaited.pop(name, None)
            case PeerLost(peer=peer):
                # A refusal does not name the process, and a lost one may have a successor.
                if self.connected.get(name) == peer:
                    del self.connected[name]
                self.awaited.pop(name, None)


class Connections:
    """Of a pair, the worker whose id is smaller connects; the other one expects it."""

    def __init__(self, activations: Lane, bulk: Lane) -> None:
        self._activations = _Peers(activations)
        self._bulk = _Peers(bulk)

    def open(self, own: MemberPlan, peer: MemberPlan) -> None:
        """Connect to a peer, or expect it, on each lane that has no connection to it.

        To be repeated until `has`: who connects before it is expected is refused.
        """
        identity = Identity(peer.worker_id, peer.incarnation)
        for peers, theirs, ours in (
            (self._activations, peer.activations, own.activations),
            (self._bulk, peer.bulk, own.bulk),
        ):
            name = peer.worker_id
            if identity in (peers.connected.get(name), peers.awaited.get(name)):
                continue
            peers.awaited[name] = identity
            if own.worker_id < name:
                peers.lane.connect(name, theirs.address, theirs.nonce.encode())
            else:
                peers.lane.expect(identity, ours.nonce.encode())

    def has(self, peer: MemberPlan) -> bool:
        """Whether frames flow to and from a peer on both lanes."""
        identity = Identity(peer.worker_id, peer.incarnation)
        return all(
            peers.connected.get(peer.worker_id) == identity
            for peers in (self._activations, self._bulk)
        )

    def note_activations(self, event: LaneEvent) -> None:
        """A peer came or went on the activation lane."""
        self._activations.note(event)

    def note_bulk(self, event: LaneEvent) -> None:
        """A peer came or went on the bulk lane."""
        self._bulk.note(event)
