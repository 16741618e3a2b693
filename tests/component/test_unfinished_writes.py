"""A process that is killed while it writes into another process's memory."""

import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.engine.transfer import ucx_lane
from services.worker.engine.transfer.errors import UcxUnavailable
from services.worker.engine.transfer.lane import PeerLost
from services.worker.engine.transfer.ucx_config import UcxConfig
from services.worker.engine.transfer.ucx_lane import UcxLane
from services.worker.engine.transfer.ucx_transport import UcxTransport, load_ucxx
from tests.support.ports import free_port
from tests.support.transfer import NONCE
from tests.support.transfer_peer import TESTER, lane
from tests.support.writing_peer import WRITER

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
KILLS_MAX = 150
"""Number of kills, most of which do not hit a write."""


@pytest.fixture
def tester() -> Iterator[UcxLane]:
    try:
        load_ucxx()
    except UcxUnavailable as error:
        pytest.skip(str(error))
    opened = lane(TESTER, "sm,tcp")
    yield opened
    opened.close()


def write(tester: UcxLane) -> "subprocess.Popen[bytes]":
    """A connected writer process, which then writes."""
    tester.expect(WRITER, NONCE)
    endpoint = tester._transport.address.hex()
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.writing_peer", tester.address, endpoint],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )


def await_note(tester: UcxLane) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not tester.receive():
        assert time.monotonic() < end_s, "the lane receives nothing of a new peer"
        select.select([tester], [], [], 0.05)


def await_loss(tester: UcxLane) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not any(isinstance(event, PeerLost) for event in tester.events()):
        assert time.monotonic() < end_s, "the lane has not noticed that its peer was killed"
        select.select([tester], [], [], 0.05)
    while tester._check.under_way or tester._connections.lost_in_memory:
        assert time.monotonic() < end_s, "the lane does not come to a conclusion"
        time.sleep(0.01)


def test_a_lane_still_receives_after_a_peer_was_killed_during_a_write(
    tester: UcxLane, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger=ucx_lane.__name__)
    for _ in range(KILLS_MAX):
        writer = write(tester)
        try:
            await_note(tester)
            time.sleep(0.05)  # it is writing
        finally:
            writer.kill()
            writer.wait()
        await_loss(tester)
        if "is restarted" in caplog.text:
            break
    else:
        pytest.fail(f"none of {KILLS_MAX} kills came in the middle of a write")
    last = write(tester)
    try:
        await_note(tester)
    finally:
        last.kill()
        last.wait()


def test_ucx_restarts_even_without_a_spare_port() -> None:
    """It would search forever for a free port while the old worker holds them all."""
    port = free_port()
    config = UcxConfig("sm,tcp", "lo", f"{port}-{port}")
    try:
        transport = UcxTransport(config)
    except UcxUnavailable as error:
        pytest.skip(str(error))
    peer = UcxTransport(UcxConfig())
    for _ in range(3):
        endpoint = transport.open(peer.address)
        endpoint.abort()
        del endpoint
        transport.renew()
