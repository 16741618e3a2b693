"""Which members this engine is connected to, on both lanes."""

from services.worker.ipc import MemberPlan
from services.worker.transfer.lane import Identity, Lane, LaneEvent, PeerConnected, PeerLost


class Connections:
    """Of a pair, the worker whose id is smaller connects; the other one expects it."""

    def __init__(self, activations: Lane, bulk: Lane) -> None:
        self._activations, self._bulk = activations, bulk
        self._on_activations: set[Identity] = set()
        self._on_bulk: set[Identity] = set()

    def open(self, own: MemberPlan, peer: MemberPlan) -> None:
        """Connect to a peer, or expect it, on each lane that has no connection to it."""
        identity = Identity(peer.worker_id, peer.incarnation)
        for lane, connected, theirs, ours in (
            (self._activations, self._on_activations, peer.activations, own.activations),
            (self._bulk, self._on_bulk, peer.bulk, own.bulk),
        ):
            if identity in connected:
                continue
            if own.worker_id < peer.worker_id:
                lane.connect(peer.worker_id, theirs.address, theirs.nonce.encode())
            else:
                lane.expect(identity, ours.nonce.encode())

    def has(self, peer: MemberPlan) -> bool:
        """Whether frames flow to and from a peer on both lanes."""
        identity = Identity(peer.worker_id, peer.incarnation)
        return identity in self._on_activations and identity in self._on_bulk

    def note_activations(self, event: LaneEvent) -> None:
        """A peer came or went on the activation lane."""
        _note(self._on_activations, event)

    def note_bulk(self, event: LaneEvent) -> None:
        """A peer came or went on the bulk lane."""
        _note(self._on_bulk, event)


def _note(connected: set[Identity], event: LaneEvent) -> None:
    match event:
        case PeerConnected(peer=peer):
            # A restarted process replaces the one of the same name.
            connected.difference_update({one for one in connected if one.worker_id == peer.worker_id})
            connected.add(peer)
        case PeerLost(peer=peer):
            connected.discard(peer)
