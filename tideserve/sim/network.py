"""The network between simulated workers.

Every worker sends over one link, one message or piece at a time; receiving takes no time. With
coordination, activations and messages precede bulk data, which is cut into pieces: they wait for at
most one piece (KunServe §4.2). Without, everything is sent whole, in order.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from services.core.setting import number, seconds
from tideserve.sim.engine import Action, Simulation

ACTIVE_MAX = 8
"""Bulk transfers of a worker that share the link, as in the engine; further transfers wait."""
MESSAGE_BYTES = 256
"""Size of a protocol message between members."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A worker's link; the default is 200 Gbit/s RDMA, as in KunServe's cluster A."""

    bytes_per_s: float = number(2.5e10, minimum=1, maximum=2**60)
    latency_s: float = seconds(2e-5)
    piece_bytes: int = number(16 << 20, minimum=1, maximum=2**60)
    coordinated: bool = True


@dataclass(slots=True)
class _Bulk:
    left_bytes: int
    action: Action
    arguments: tuple[Any, ...]


class Network:
    """Delivers in the order of sending, per sender and kind of traffic."""

    def __init__(self, simulation: Simulation, spec: LinkSpec) -> None:
        self._simulation = simulation
        self._spec = spec
        self._links: dict[str, _Link] = {}

    def send(self, source: str, size_bytes: int, action: Action, *arguments: Any) -> None:
        """Send an activation or a message of `source`; run `action` when it has arrived."""
        self._link(source).send(size_bytes, action, arguments)

    def send_bulk(self, source: str, size_bytes: int, action: Action, *arguments: Any) -> None:
        """Send bulk data of `source`; run `action` when all of it has arrived."""
        self._link(source).send_bulk(size_bytes, action, arguments)

    def _link(self, source: str) -> "_Link":
        if source not in self._links:
            self._links[source] = _Link(self._simulation, self._spec)
        return self._links[source]


class _Link:
    def __init__(self, simulation: Simulation, spec: LinkSpec) -> None:
        self._simulation = simulation
        self._spec = spec
        self._urgent: deque[tuple[int, Action, tuple[Any, ...]]] = deque()
        self._bulk: deque[_Bulk] = deque()
        self._busy = False

    def send(self, size_bytes: int, action: Action, arguments: tuple[Any, ...]) -> None:
        self._urgent.append((size_bytes, action, arguments))
        self._go_on()

    def send_bulk(self, size_bytes: int, action: Action, arguments: tuple[Any, ...]) -> None:
        if self._spec.coordinated:
            self._bulk.append(_Bulk(size_bytes, action, arguments))
            self._go_on()
        else:
            self.send(size_bytes, action, arguments)

    def _go_on(self) -> None:
        if self._busy:
            return
        if self._urgent:
            size_bytes, action, arguments = self._urgent.popleft()
            self._occupy(size_bytes, action, arguments)
        elif self._bulk:
            bulk = self._bulk.popleft()
            piece_bytes = min(bulk.left_bytes, self._spec.piece_bytes)
            bulk.left_bytes -= piece_bytes
            if bulk.left_bytes:
                # Round-robin over the first ACTIVE_MAX transfers.
                self._bulk.insert(ACTIVE_MAX - 1, bulk)
                self._occupy(piece_bytes, None, ())
            else:
                self._occupy(piece_bytes, bulk.action, bulk.arguments)

    def _occupy(self, size_bytes: int, action: Action | None, arguments: tuple[Any, ...]) -> None:
        self._busy = True
        self._simulation.after(size_bytes / self._spec.bytes_per_s, self._sent, action, arguments)

    def _sent(self, action: Action | None, arguments: tuple[Any, ...]) -> None:
        self._busy = False
        if action is not None:
            self._simulation.after(self._spec.latency_s, action, *arguments)
        self._go_on()
