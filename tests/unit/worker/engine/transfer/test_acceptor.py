"""A lane's listener while no file descriptor is left."""

import select
import socket

import pytest

from services.common.address import listen
from services.worker.engine.transfer.acceptor import PAUSE_S, Acceptor
from tests.support.exhausted import no_free_descriptor

WAIT_S = 30.0


def test_exhausted_descriptors_are_retried_every_second_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with listen("127.0.0.1", 0, 8) as listener, select.epoll() as poll:
        listener.setblocking(False)
        acceptor = Acceptor(listener, poll)
        readable = [(listener.fileno(), select.EPOLLIN)]
        with socket.create_connection(listener.getsockname(), timeout=WAIT_S):
            with no_free_descriptor():
                for attempt in range(3):
                    now_s = attempt * PAUSE_S
                    acceptor.tick(now_s)
                    assert poll.poll(WAIT_S) == readable
                    assert acceptor.accept(now_s) is None
                    acceptor.tick(now_s + PAUSE_S / 2)
                    assert poll.poll(0) == [], "a watched listener would keep the thread awake"
            (record,) = caplog.records
            assert "Too many open files" in record.message
            acceptor.tick(3 * PAUSE_S)
            accepted = acceptor.accept(3 * PAUSE_S)
            assert accepted is not None
            accepted.close()
        assert acceptor.accept(3 * PAUSE_S) is None
        with socket.create_connection(listener.getsockname(), timeout=WAIT_S):
            assert poll.poll(WAIT_S) == readable, "an empty backlog is no reason for a pause"
