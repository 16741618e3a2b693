"""Control messages over a real socket: split, too large, malformed, and unread."""

import select
import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest

from services.common.address import listen
from services.worker.engine.transfer.control_link import (
    MESSAGE_BYTES_MAX,
    Beat,
    Bye,
    Control,
    ControlLink,
)
from services.worker.engine.transfer.errors import FrameError

DEADLINE_S = 60.0
Ends = tuple[ControlLink, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A link, and the socket at its other end."""
    listener = listen("127.0.0.1", 0, 1)
    link = ControlLink.dial(f"127.0.0.1:{listener.getsockname()[1]}")
    other, _ = listener.accept()
    yield link, other
    link.close()
    other.close()
    listener.close()


def on_wire(message: Control) -> bytes:
    encoded = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(encoded)) + encoded


def received(link: ControlLink) -> list[Control]:
    """The messages that the link parses from the next bytes."""
    ready, _, _ = select.select([link], [], [], DEADLINE_S)
    assert ready, "nothing came"
    return link.receive()


def test_messages_may_arrive_joined_or_split(ends: Ends) -> None:
    link, other = ends
    assert link.receive() == []
    last = on_wire(Bye("done"))
    other.sendall(on_wire(Beat(1)) + on_wire(Beat(2)) + last[:3])
    messages = received(link)
    while len(messages) < 2:
        messages += received(link)
    assert messages == [Beat(1), Beat(2)]
    other.sendall(last[3:])
    messages = received(link)
    while not messages:
        messages = received(link)
    assert messages == [Bye("done")]


def test_messages_arrive_as_they_were_sent(ends: Ends) -> None:
    link, other = ends
    link.send(Beat(7))
    link.flush()
    assert not link.has_unsent
    wanted = on_wire(Beat(7))
    assert other.recv(len(wanted), socket.MSG_WAITALL) == wanted


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<I", MESSAGE_BYTES_MAX + 1), "is too large"),
        (struct.pack("<I", 4) + b"junk", "is malformed"),
        (struct.pack("<I", 6) + msgspec.msgpack.encode(["a", "b"]) + b"\0", "is malformed"),
    ],
)
def test_an_invalid_message_is_an_error(ends: Ends, data: bytes, reason: str) -> None:
    link, other = ends
    other.sendall(data)
    with pytest.raises(FrameError, match=reason):
        while True:
            received(link)


def test_the_end_of_the_peer_is_an_error(ends: Ends) -> None:
    link, other = ends
    other.close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        received(link)


def test_output_for_a_stalled_peer_is_bounded(ends: Ends) -> None:
    link, _ = ends
    with pytest.raises(ConnectionError, match="does not read"):
        for _ in range(10_000):
            link.send(Bye("x" * 30_000))
    assert link.has_unsent
