"""Connections that are admitted, restricted and closed."""

from collections import Counter

import pytest

from services.gateway.bounds.connections import (
    FIRST_REQUEST_S,
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
        self.at_s = 0.0
        super().__init__(
            ConnectionLimits(all_max, address_max, restricted_max),
            lambda port, reason: self.reasons.update([reason]),
            lambda: self.at_s,
        )

    def open(
        self, address: str, *, busy: bool = False, idle: bool = True, descriptors: int = 1
    ) -> ClientConnection:
        """A new connection; `idle`: after a request, otherwise its client has sent none."""
        connection = self.enter("http", address, descriptors)
        connection.close = lambda: self.closed.append(connection)
        if busy:
            connection.begin()
        elif idle:
            connection.touch()
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


def test_an_ipv6_client_counts_by_its_network() -> None:
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


def test_a_connection_without_a_request_makes_room_only_after_a_time() -> None:
    table = Table(all_max=3, address_max=3, restricted_max=3)
    busy = [table.open("a", busy=True) for _ in range(2)]
    new = [table.open(address, idle=False) for address in "bcd"]
    assert not table.closed
    assert [connection.admit() for connection in new] == [True, False, False]
    table.at_s = FIRST_REQUEST_S
    assert new[1].admit()
    assert table.closed == [new[0]]
    busy[0].end()
    # One has waited for its first request since before the other one was last idle.
    assert new[2].admit()
    assert table.closed == [new[0], busy[0]]


def test_the_longest_idle_connection_is_found_regardless_of_history() -> None:
    table = Table(all_max=4, address_max=4)
    opened = []
    for number in range(4):
        table.at_s = number
        opened.append(table.open("a", idle=number % 2 == 0))
    table.at_s = 2 * FIRST_REQUEST_S
    for number in range(4):
        table.open("a", busy=True)
        assert table.closed == opened[: number + 1]


def test_a_connection_without_a_key_makes_room() -> None:
    table = Table(all_max=2, address_max=2)
    probing = [table.open("a", idle=False) for _ in range(2)]
    probing[0].touch()
    assert table.open("b").admit()
    assert table.closed == probing[:1]


def test_the_address_with_most_restricted_connections_makes_room_for_others() -> None:
    table = Table(all_max=1, address_max=1, restricted_max=4)
    table.open("a", busy=True)
    probe = table.open("b", idle=False)
    flood = [table.open("c", idle=False) for _ in range(10)]
    assert table.closed == flood[:7]
    assert probe.state == "restricted"


def test_a_line_is_logged_for_each_port_and_reason_with_the_number_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = Table(all_max=100, address_max=100)
    for port in ("http", "grpc"):
        for address in ("192.0.2.1", "192.0.2.2", "192.0.2.2"):
            table.enter(port, address).drop(CloseReason.INVALID)
    table.at_s += 60
    table.enter("grpc", "192.0.2.3").drop(CloseReason.INVALID)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert "192.0.2.1 to the http port" in lines[0]
    assert "192.0.2.1 to the grpc port" in lines[1]
    assert "192.0.2.3 to the grpc port" in lines[2]
    assert "2 (2 of 192.0.2.2)" in lines[2]


def test_a_closed_connection_is_counted_once() -> None:
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


def test_descriptors_are_reserved_for_the_process() -> None:
    for open_files in (64, 256, 1024, 20_000, 65_536):
        limits = limits_of(open_files, None)
        own = open_files - limits.all_max
        assert own >= min(open_files // 2, 128)
        assert limits.restricted_max <= own / 2
        assert limits.address_max == limits.all_max // 2
        if open_files >= 1024:
            # 64 gRPC connections of an address.
            assert limits.address_max >= 3 * 64
    assert limits_of(1024, 7).address_max == 7
