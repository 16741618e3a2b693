"""Bounds the connections of clients, so that the process always has descriptors for its own.

Without room for a new connection, the longest idle connection is closed. If none is idle, the new
connection is restricted: its client may only check the gateway's health. A connection is not idle
while its client may still send the first request: `FIRST_REQUEST_S`.
"""

import contextlib
import ipaddress
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from services.common.clock import monotonic_s
from services.common.log_limiter import LOG_INTERVAL_S, LogLimiter

FIRST_REQUEST_S = 5.0
"""Time for a new connection to send its first request, before it makes room for others."""
OWN_MIN, OWN_PART = 128, 8
"""Descriptors for channels, files and probes: `OWN_MIN`, or 1 / `OWN_PART` of all if more."""
RESTRICTED_PART, RESTRICTED_MAX = 3 / 8, 512
"""Part of these that restricted connections may have, and the maximum."""

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
    CloseReason.HEADERS: "its headers exceed the limit of bytes or time",
    CloseReason.IDLE: "connections are at their limit, and it was idle for the longest time",
    CloseReason.LIMIT: "connections are at their limit, and none is idle",
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits in descriptors: of all connections, of an address, and of restricted connections."""

    all_max: int
    address_max: int
    restricted_max: int


def limits_of(open_files_max: int, address_max: int | None) -> ConnectionLimits:
    """The limits of a process that may open so many files.

    `address_max` None: an address may have half of the descriptors of all.
    """
    own = min(open_files_max // 2, max(OWN_MIN, open_files_max // OWN_PART))
    all_max = max(2, open_files_max - own)
    restricted_max = min(RESTRICTED_MAX, int(own * RESTRICTED_PART))
    return ConnectionLimits(all_max, address_max or all_max // 2, restricted_max)


class ClientConnection:
    """A client's connection, from its acceptance to its end.

    `close` closes it at once; its transport replaces it.
    """

    __slots__ = (
        "_connections",
        "_requests",
        "address",
        "close",
        "descriptors",
        "idle_since_s",
        "port",
        "requested",
        "state",
    )

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
        self.idle_since_s = 0.0
        self.requested = False
        """Whether its client has sent a request."""

    @property
    def idle(self) -> bool:
        """Whether it has no running request."""
        return self._requests == 0

    def admit(self) -> bool:
        """Whether its client may send requests; else only health checks are served."""
        return self.state == "admitted" or self._connections.admit(self)

    def begin(self) -> None:
        """Count a running request."""
        self.requested = True
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

    def touch(self) -> None:
        """Count a request that does not keep it from making room for others."""
        with self.request():
            pass

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
    """The connections of an address, or of all."""

    __slots__ = ("_idle", "_unrequested", "used")

    def __init__(self) -> None:
        self.used = 0
        # Connections without a running request, in the order in which they became idle: those
        # that have had a request, and those that have had none.
        self._idle: dict[ClientConnection, None] = {}
        self._unrequested: dict[ClientConnection, None] = {}

    def add(self, connection: ClientConnection) -> None:
        """Add an idle connection."""
        (self._idle if connection.requested else self._unrequested)[connection] = None

    def remove(self, connection: ClientConnection) -> None:
        """Remove a connection that is busy or has ended."""
        self._idle.pop(connection, None)
        self._unrequested.pop(connection, None)

    def longest_idle(self, now_s: float) -> ClientConnection | None:
        """The connection that makes room for another one."""
        idle = next(iter(self._idle), None)
        unrequested = next(iter(self._unrequested), None)
        if unrequested is None or now_s - unrequested.idle_since_s < FIRST_REQUEST_S:
            return idle
        if idle is None or unrequested.idle_since_s < idle.idle_since_s:
            return unrequested
        return idle


class ClientConnections:
    """The connections of all ports of clients."""

    def __init__(
        self,
        limits: ConnectionLimits,
        on_close: Callable[[str, str], None] = lambda *_: None,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        """`on_close(port, reason)` is called for each connection that the gateway closes."""
        self._limits = limits
        self._on_close = on_close
        self._now_s = now_s
        self._all = _Share()
        self._shares: dict[str, _Share] = {}
        # In the order of their acceptance.
        self._restricted: dict[ClientConnection, None] = {}
        self._restricted_used = 0
        self._of_port: Counter[str] = Counter()
        self._limiter = LogLimiter(now_s)

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
        self._shares.setdefault(client_of(connection.address), _Share())
        for share in self._shares_of(connection):
            share.used += connection.descriptors
        if connection.idle:
            self.mark_idle(connection)
        return True

    def mark_busy(self, connection: ClientConnection) -> None:
        """The connection has a running request."""
        if connection.state == "admitted":
            for share in self._shares_of(connection):
                share.remove(connection)

    def mark_idle(self, connection: ClientConnection) -> None:
        """The connection has no running request."""
        if connection.state == "admitted":
            connection.idle_since_s = self._now_s()
            for share in self._shares_of(connection):
                share.add(connection)

    def leave(self, connection: ClientConnection) -> None:
        """Remove the connection, unless it is removed already."""
        if connection.state == "left":
            return
        if connection.state == "admitted":
            for share in self._shares_of(connection):
                share.used -= connection.descriptors
                share.remove(connection)
            client = client_of(connection.address)
            if not self._shares[client].used:
                del self._shares[client]
        self._unrestrict(connection)
        connection.state = "left"
        self._of_port[connection.port] -= 1

    def note(self, connection: ClientConnection, reason: CloseReason) -> None:
        """Count that the gateway closes a connection; log some of a port and reason."""
        self._on_close(connection.port, reason)
        omitted = self._limiter.due((connection.port, reason), client_of(connection.address))
        if omitted is not None:
            log.warning(
                "closing a connection of %s to the %s port: %s; others of the port since the last"
                " such line: %s; the next line follows after %d s at the earliest, see"
                " tideserve_gateway_connections_closed_total",
                connection.address,
                connection.port,
                _SENTENCES[reason],
                omitted,
                LOG_INTERVAL_S,
            )

    def _shares_of(self, connection: ClientConnection) -> tuple[_Share, _Share]:
        """The shares in which an admitted connection is counted."""
        return self._all, self._shares[client_of(connection.address)]

    def _make_room(self, connection: ClientConnection) -> bool:
        """Close idle connections until the limits admit the connection."""
        own = self._shares.get(client_of(connection.address), _Share())
        limits = ((own, self._limits.address_max), (self._all, self._limits.all_max))
        for share, used_max in limits:
            while share.used + connection.descriptors > used_max:
                idle = share.longest_idle(self._now_s())
                if idle is None:
                    return False
                idle.drop(CloseReason.IDLE)
        return True

    def _restrict(self, connection: ClientConnection) -> None:
        """Add a restricted connection; the oldest of the address with most make room for it."""
        while self._restricted and (
            self._restricted_used + connection.descriptors > self._limits.restricted_max
        ):
            clients = {other: client_of(other.address) for other in self._restricted}
            ((most, _),) = Counter(clients.values()).most_common(1)
            next(other for other in clients if clients[other] == most).drop(CloseReason.LIMIT)
        connection.state = "restricted"
        self._restricted[connection] = None
        self._restricted_used += connection.descriptors

    def _unrestrict(self, connection: ClientConnection) -> None:
        if connection.state == "restricted":
            del self._restricted[connection]
            self._restricted_used -= connection.descriptors


def client_of(address: str) -> str:
    """The client that has an address: a single IPv4 address, or the /64 network of an IPv6 one."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return parsed.exploded[:19]
