"""Listening addresses of lanes, and the addresses that they advertise."""

import select
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from services.common.address import listen
from services.common.errors import ConfigError
from services.worker.engine.pipeline.frames import KINDS, SlabRefused
from services.worker.engine.transfer import lanes as lanes_module
from services.worker.engine.transfer.errors import PeerUnknown
from services.worker.engine.transfer.frame import Frame, FrameCodec
from services.worker.engine.transfer.lane import Identity, Lane, PeerLost
from services.worker.engine.transfer.lanes import Lanes, LanesConfig, NoLane, open_lanes
from services.worker.engine.transfer.mover import CHUNK_BYTES_MAX, FAST_LINK_TIMES
from services.worker.engine.transfer.piece_window import PIECES_MIN
from services.worker.engine.transfer.ucx_config import UcxConfig, UcxLaneConfig

UCX_SEGMENTS = 256
"""UCX_SYSV_FIFO_SIZE."""


@contextmanager
def opened(config: LanesConfig) -> Iterator[Lanes]:
    lanes = open_lanes(Identity("w0", "a"), config, KINDS)
    try:
        if lanes.unavailable:
            pytest.skip("UCX cannot be loaded on this machine")
        yield lanes
    finally:
        lanes.activations.close()
        lanes.bulk.close()


def free_ports(count: int) -> list[int]:
    held = [listen("127.0.0.1", 0, 1) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in held]
    for bound in held:
        bound.close()
    return ports


def test_lanes_listen_on_configured_ports_and_advertise_another_host() -> None:
    first, second = free_ports(2)
    config = LanesConfig("0.0.0.0", "worker-7", first, second, UcxConfig("tcp", "lo"))
    with opened(config) as lanes:
        assert lanes.activations.address == f"worker-7:{first}"
        assert lanes.bulk.address == f"worker-7:{second}"
        for port in (first, second):
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass


def test_each_lane_has_its_own_name_in_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def lane(identity: Identity, codec: FrameCodec, config: UcxLaneConfig) -> Lane:
        names.append(config.name)
        return NoLane()

    monkeypatch.setattr(lanes_module, "UcxLane", lane)
    open_lanes(Identity("w0", "a"), LanesConfig("", "", 0, 0, UcxConfig()), KINDS)
    assert names == ["activation lane", "bulk lane"]


def test_a_name_is_listened_on_and_an_ipv6_address_gets_brackets() -> None:
    config = LanesConfig("localhost", "fd00::7", 0, 0, UcxConfig("tcp", ""))
    with opened(config) as lanes:
        assert lanes.activations.address.startswith("[fd00::7]:")


def test_without_ucx_there_are_lanes_that_reach_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libucx", None)
    config = LanesConfig("127.0.0.1", "127.0.0.1", 0, 0, UcxConfig("tcp", "lo"))
    lanes = open_lanes(Identity("w0", "a"), config, KINDS)
    assert "libucx-cu13" in lanes.unavailable
    for lane in (lanes.activations, lanes.bulk):
        lane.expect(Identity("w1", "b"), bytes(16))
        lane.connect("w1", "127.0.0.1:1", bytes(16))
        assert select.select([lane], [], [], 0)[0] == [lane]
        assert lane.receive() == []
        assert lane.events() == [PeerLost(Identity("w1", ""), "this worker runs without UCX")]
        assert lane.events() == [] and select.select([lane], [], [], 0)[0] == []
        with pytest.raises(PeerUnknown, match="without UCX"):
            lane.send("w1", Frame("g", 1, SlabRefused("layer 0", "t")))
        lane.disconnect("w1")
        lane.close()


def test_a_port_in_use_is_a_short_error() -> None:
    with listen("127.0.0.1", 0, 1) as held:
        port = held.getsockname()[1]
        config = LanesConfig("127.0.0.1", "127.0.0.1", port, 0, UcxConfig("tcp", "lo"))
        with pytest.raises(ConfigError, match="choose another port"), opened(config):
            pass


def test_ucx_ports_and_devices_are_set_only_if_configured() -> None:
    options = UcxConfig("tcp", "eth0", "50063-50066").options()
    assert (options["NET_DEVICES"], options["TCP_PORT_RANGE"]) == ("eth0", "50063-50066")
    assert not {"NET_DEVICES", "TCP_PORT_RANGE"} & UcxConfig("tcp", "").options().keys()


def test_the_largest_pieces_under_way_fit_into_the_segments_of_a_lane() -> None:
    """Otherwise their sender spins until the receiver's process has run."""
    under_way_bytes = PIECES_MIN * FAST_LINK_TIMES * CHUNK_BYTES_MAX
    assert UCX_SEGMENTS * int(UcxConfig().options()["SYSV_SEG_SIZE"]) >= under_way_bytes
