"""Which connections are admitted, restricted and closed."""

from collections import Counter

from services.gateway.bounds.connections import (
    ClientConnection,
    ClientConnections,
    CloseReason,
    ConnectionLimits,
    limits_of,
)


class Table(ClientConnections):
    """ClientConnections, what was closed of them and why."""

    def __init__(self, all_max: int, address_max: int, restricted_max: int = 2) -> None:
        self.closed: list[ClientConnection] = []
        self.reasons: Counter[str] = Counter()
        super().__init__(
            ConnectionLimits(all_max, address_max, restricted_max),
            lambda port, reason: self.reasons.update([reason]),
        )

    def open(self, address: str, *, busy: bool = False, descriptors: int = 1) -> ClientConnection:
        connection = self.enter("http", address, descriptors)
        connection.close = lambda: self.closed.append(connection)
        if busy:
            connection.begin()
        return connection


def test_the_longest_idle_connection_makes_room() -> None:
    table = Table(all_max=3, address_max=3)
    first, busy, last = table.open("a"), table.open("b", busy=True), table.open("c")
    with first.request():
        pass
    new = table.open("d")
    assert table.closed == [last], "the first became idle again after it"
    assert new.admit() and busy.admit() and not last.admit()
    assert table.reasons == {CloseReason.IDLE: 1}
    assert table.count("http") == 3


def test_an_address_makes_room_for_itself() -> None:
    table = Table(all_max=10, address_max=3)
    other = table.open("b")
    own = [table.open("a") for _ in range(4)]
    assert table.closed == own[:1]
    table.open("a", descriptors=3)
    assert table.closed == own
    assert other.admit()


def test_a_client_of_ipv6_has_a_network() -> None:
    table = Table(all_max=10, address_max=1)
    for address in (
        "2001:db8::1",
        "2001:db8::2",
        "2001:db8:0:1::1",
        "::ffff:192.0.2.1",
        "192.0.2.1",
    ):
        table.open(address)
    assert [connection.address for connection in table.closed] == [
        "2001:db8::1",
        "::ffff:192.0.2.1",
    ]


def test_without_idle_connections_new_ones_are_restricted_until_there_is_room() -> None:
    table = Table(all_max=2, address_max=2)
    busy = [table.open("a", busy=True) for _ in range(2)]
    restricted = [table.open("b") for _ in range(3)]
    assert table.closed == restricted[:1]
    assert table.reasons == {CloseReason.LIMIT: 1}
    assert not any(connection.admit() for connection in restricted)
    busy[0].end()
    assert restricted[1].admit(), "it takes the place of the idle connection"
    assert table.closed == [restricted[0], busy[0]]
    busy[1].leave()
    assert restricted[2].admit()


def test_what_left_is_counted_once() -> None:
    table = Table(all_max=1, address_max=1)
    connection = table.open("a", busy=True)
    connection.leave()
    connection.leave()
    connection.end()
    connection.begin()
    assert not connection.admit()
    assert table.count("http") == 0
    assert table.open("a").admit()
    assert not table.closed


def test_a_process_keeps_descriptors_for_itself() -> None:
    for open_files in (64, 256, 1024, 20_000, 65_536):
        limits = limits_of(open_files, None)
        own = open_files - limits.all_max
        assert own >= min(open_files // 2, 128)
        assert limits.address_max == limits.all_max // 2
        if open_files >= 1024:
            # 64 gRPC connections of an address.
            assert limits.address_max >= 3 * 64
    assert limits_of(1024, 7).address_max == 7
