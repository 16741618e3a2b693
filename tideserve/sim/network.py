"""What travels between simulated workers, and how long it takes.

Every worker sends over one link, one message or piece after the other; receiving takes no time.
Coordinated, activations and messages go before bulk data, which is cut into pieces so that they
never wait longer than for one of these (KunServe §4.2); else everything goes in order, uncut.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from services.core.setting import number, seconds
from tideserve.sim.engine import Action, Simulation

ACTIVE_MAX = 8
"""Bulk transfers of a worker that take turns, as those of an engine do; the others wait."""
MESSAGE_BYTES = 256
"""A message of the group's members to one another."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What a worker sends over: 200 Gbit/s RDMA by default, as in KunServe's cluster A."""

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
        """Have `action` happen when an activation or a message of `source` has arrived."""
        self._link(source).send(size_bytes, action, arguments)

    def send_bulk(self, source: str, size_bytes: int, action: Action, *arguments: Any) -> None:
        """Have `action` happen when bulk data of `source` have arrived whole."""
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
