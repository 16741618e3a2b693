"""The lane of a worker that cannot load UCX: it reaches no peer."""

from collections import deque
from collections.abc import Collection

from services.worker.engine.transfer.doorbell import Doorbell
from services.worker.engine.transfer.errors import PeerUnknown
from services.worker.engine.transfer.frame import Frame
from services.worker.engine.transfer.lane import Identity, Lane, LaneEvent, PeerLost, Sent


class NoLane(Lane):
    """Every peer that is dialled is lost at once."""

    def __init__(self) -> None:
        self._bell = Doorbell()
        self._events: deque[LaneEvent] = deque()

    @property
    def address(self) -> str:
        return ""

    def expect(self, peer: Identity, nonce: bytes) -> None:
        """No effect: no peer can connect."""

    def connect(self, peer: str, address: str, nonce: bytes) -> None:
        self._events.append(PeerLost(Identity(peer, ""), "this worker runs without UCX"))
        self._bell.ring()

    def disconnect(self, peer: str) -> None:
        """No effect: no peer is connected."""

    def has(self, peer: str) -> bool:
        return False

    def send(self, peer: str, frame: Frame) -> Sent:
        raise PeerUnknown(f"there is no connection to {peer}: this worker runs without UCX")

    def receive(self, leave: Collection[str] = ()) -> list[tuple[str, Frame]]:
        self._bell.clear()
        return []

    def give_back(self, frame: Frame) -> None:
        """No effect: no frame is received."""

    def events(self) -> list[LaneEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]

    def fileno(self) -> int:
        return self._bell.fileno()

    def close(self) -> None:
        self._bell.close()
