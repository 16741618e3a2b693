"""Bounds the connections of clients, so that the process always has descriptors for its own.

Without room for a new connection, the longest idle connection is closed. If none is idle, the new
connection is restricted: its client may only check the gateway's health.
"""

import contextlib
import ipaddress
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from services.common.clock import monotonic_s

LOG_INTERVAL_S = 60.0
OWN_MIN, OWN_PART = 128, 8
"""Descriptors for channels, files and probes: `OWN_MIN`, or 1 / `OWN_PART` of all if more."""
RESTRICTED_MAX = 48
"""Descriptors of restricted connections, of those for channels, files and probes."""

log = logging.getLogger(__name__)


class CloseReason(StrEnum):
    """Why the gateway closed a connection; values of a metric's label."""

    HANDSHAKE = "handshake"
    INVALID = "invalid"
    HEADERS = "headers"
    IDLE = "idle"
    LIMIT = "limit"


_SENTENCES = {
    CloseReason.HANDSHAKE: "its TLS handshake failed or took too long",
    CloseReason.INVALID: "its client does not speak the protocol, or sends no preface in time",
    CloseReason.HEADERS: "its headers exceed the limit",
    CloseReason.IDLE: "connections are at their limit, and it was idle for the longest time",
    CloseReason.LIMIT: "connections are at their limit, and none is idle",
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits in descriptors: of all connections, of an address, and of restricted connections."""

    all_max: int
    address_max: int
    restricted_max: int = RESTRICTED_MAX


def limits_of(open_files_max: int, address_max: int | None) -> ConnectionLimits:
    """The limits of a process that may open so many files.

    `address_max` None: an address may have half of the descriptors of all.
    """
    own = min(open_files_max // 2, max(OWN_MIN, open_files_max // OWN_PART))
    all_max = max(2, open_files_max - own)
    return ConnectionLimits(all_max, address_max or all_max // 2)


class ClientConnection:
    """A client's connection, from its acceptance to its end.

    `close` closes it at once; its transport replaces it.
    """

    __slots__ = ("_connections", "_requests", "address", "close", "descriptors", "port", "state")

    def __init__(
        self, connections: "ClientConnections", port: str, address: str, descriptors: int
    ) -> None:
        self._connections = connections
        self._requests = 0
        self.port = port
        self.address = address
        self.descriptors = descriptors
        self.close: Callable[[], object] = lambda: None
        self.state = "new"

    @property
    def idle(self) -> bool:
        """Whether it has no running request."""
        return self._requests == 0

    def admit(self) -> bool:
        """Whether its client may send requests; else only health checks are served."""
        return self.state == "admitted" or self._connections.admit(self)

    def begin(self) -> None:
        """Count a running request."""
        self._requests += 1
        if self._requests == 1:
            self._connections.mark_busy(self)

    def end(self) -> None:
        """Count the end of a request."""
        self._requests -= 1
        if self._requests == 0:
            self._connections.mark_idle(self)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request that runs while the block does."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def note(self, reason: CloseReason) -> None:
        """Count and log that the gateway closes it."""
        self._connections.note(self, reason)

    def drop(self, reason: CloseReason) -> None:
        """Close it."""
        self.note(reason)
        self.leave()
        self.close()

    def leave(self) -> None:
        """Release its descriptors, once it has ended."""
        self._connections.leave(self)


class _Share:
    """The connections of an address."""

    __slots__ = ("idle", "used")

    def __init__(self) -> None:
        self.used = 0
        # In the order in which they became idle.
        self.idle: dict[ClientConnection, None] = {}


class ClientConnections:
    """The connections of all ports of clients."""

    def __init__(
        self, limits: ConnectionLimits, on_close: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        """`on_close(port, reason)` is called for each connection that the gateway closes."""
        self._limits = limits
        self._on_close = on_close
        self._used = 0
        self._idle: dict[ClientConnection, None] = {}
        self._shares: dict[str, _Share] = {}
        # In the order of their acceptance.
        self._restricted: dict[ClientConnection, None] = {}
        self._restricted_used = 0
        self._of_port: Counter[str] = Counter()
        self._logged_s: dict[CloseReason, float] = {}

    def count(self, port: str) -> int:
        """The number of connections of a port."""
        return self._of_port[port]

    def enter(self, port: str, address: str, descriptors: int = 1) -> ClientConnection:
        """Count a new connection; `descriptors`: how many the gateway opens for it."""
        connection = ClientConnection(self, port, address, descriptors)
        self._of_port[port] += 1
        if not self.admit(connection):
            self._restrict(connection)
        return connection

    def admit(self, connection: ClientConnection) -> bool:
        """Admit a new or restricted connection if there is room, or idle ones to close for it."""
        if connection.state == "left" or not self._make_room(connection):
            return False
        self._unrestrict(connection)
        connection.state = "admitted"
        share = self._shares.setdefault(_client_of(connection.address), _Share())
        share.used += connection.descriptors
        self._used += connection.descriptors
        if connection.idle:
            self.mark_idle(connection)
        return True

    def mark_busy(self, connection: ClientConnection) -> None:
        """The connection has a running request."""
        if connection.state == "admitted":
            del self._idle[connection]
            del self._shares[_client_of(connection.address)].idle[connection]

    def mark_idle(self, connection: ClientConnection) -> None:
        """The connection has no running request."""
        if connection.state == "admitted":
            self._idle[connection] = None
            self._shares[_client_of(connection.address)].idle[connection] = None

    def leave(self, connection: ClientConnection) -> None:
        """Remove the connection, unless it is removed already."""
        if connection.state == "left":
            return
        if connection.state == "admitted":
            client = _client_of(connection.address)
            share = self._shares[client]
            share.used -= connection.descriptors
            share.idle.pop(connection, None)
            if not share.used:
                del self._shares[client]
            self._used -= connection.descriptors
            self._idle.pop(connection, None)
        self._unrestrict(connection)
        connection.state = "left"
        self._of_port[connection.port] -= 1

    def note(self, connection: ClientConnection, reason: CloseReason) -> None:
        """Count that the gateway closes a connection; log the first of a reason per minute."""
        self._on_close(connection.port, reason)
        now_s = monotonic_s()
        if now_s - self._logged_s.get(reason, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._logged_s[reason] = now_s
            log.warning(
                "closing a connection of %s to the %s port: %s; more of them are not logged for"
                " %d s, see tideserve_gateway_connections_closed_total",
                connection.address,
                connection.port,
                _SENTENCES[reason],
                LOG_INTERVAL_S,
            )

    def _make_room(self, connection: ClientConnection) -> bool:
        """Close idle connections until the limits admit the connection."""
        wanted, limits = connection.descriptors, self._limits
        share = self._shares.get(_client_of(connection.address), _Share())
        while share.used + wanted > limits.address_max:
            if not share.idle:
                return False
            next(iter(share.idle)).drop(CloseReason.IDLE)
        while self._used + wanted > limits.all_max:
            if not self._idle:
                return False
            next(iter(self._idle)).drop(CloseReason.IDLE)
        return True

    def _restrict(self, connection: ClientConnection) -> None:
        """Add a restricted connection; the oldest of them make room for it."""
        while self._restricted and (
            self._restricted_used + connection.descriptors > self._limits.restricted_max
        ):
            next(iter(self._restricted)).drop(CloseReason.LIMIT)
        connection.state = "restricted"
        self._restricted[connection] = None
        self._restricted_used += connection.descriptors

    def _unrestrict(self, connection: ClientConnection) -> None:
        if connection.state == "restricted":
            del self._restricted[connection]
            self._restricted_used -= connection.descriptors


def _client_of(address: str) -> str:
    """The client that has an address: a single IPv4 address, or the /64 network of an IPv6 one."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return parsed.exploded[:19]
