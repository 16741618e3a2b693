"""Opens the activation lane and the bulk lane of an engine: over UCX, or dummies without UCX."""

import logging
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.common.address import is_loopback
from services.worker.engine.transfer.doorbell import Doorbell
from services.worker.engine.transfer.errors import PeerUnknown, UcxUnavailable
from services.worker.engine.transfer.frame import Frame, FrameCodec
from services.worker.engine.transfer.lane import Identity, Lane, LaneEvent, PeerLost, Sent
from services.worker.engine.transfer.pieces import BULK_KINDS
from services.worker.engine.transfer.ucx_config import UcxConfig, UcxLaneConfig
from services.worker.engine.transfer.ucx_lane import UcxLane

log = logging.getLogger(__name__)


class NoLane(Lane):
    """The lane of a worker that cannot load UCX: every peer that it dials is lost at once."""

    def __init__(self) -> None:
        self._bell = Doorbell()
        self._events: deque[LaneEvent] = deque()

    @property
    def address(self) -> str:
        return ""

    def expect(self, peer: Identity, nonce: bytes) -> None:
        """No effect: no peer can connect."""

    def connect(self, peer: str, address: str, nonce: bytes) -> None:
        self._events.append(PeerLost(Identity(peer, ""), "this worker runs without UCX"))
        self._bell.ring()

    def disconnect(self, peer: str) -> None:
        """No effect: no peer is connected."""

    def has(self, peer: str) -> bool:
        return False

    def send(self, peer: str, frame: Frame) -> Sent:
        raise PeerUnknown(f"there is no connection to {peer}: this worker runs without UCX")

    def receive(self, leave: Collection[str] = ()) -> list[tuple[str, Frame]]:
        self._bell.clear()
        return []

    def give_back(self, frame: Frame) -> None:
        """No effect: no frame is received."""

    def events(self) -> list[LaneEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]

    def fileno(self) -> int:
        return self._bell.fileno()

    def close(self) -> None:
        self._bell.close()


@dataclass(frozen=True, slots=True)
class Lanes:
    """The two lanes of an engine; dummies if `unavailable`, which is the reason, is not empty."""

    activations: Lane
    bulk: Lane
    unavailable: str = ""


@dataclass(frozen=True, slots=True)
class LanesConfig:
    """Addresses and UCX options of the lanes."""

    host: str  # to listen on
    advertise: str  # host that peers dial
    activation_port: int  # 0: any free port
    bulk_port: int  # 0: any free port
    ucx: UcxConfig  # without devices: the loopback device for a loopback host, else all devices


def open_lanes(identity: Identity, config: LanesConfig, kinds: Mapping[int, type[Any]]) -> Lanes:
    """Open both lanes; without UCX the worker cannot merge with others into a pipeline group.

    `kinds`: header types of the activation lane by their number.

    Raises:
        ConfigError: if a lane cannot listen at its address.
    """
    ucx = config.ucx
    if not ucx.devices and is_loopback(config.host):
        ucx = replace(ucx, devices="lo")
    settings = UcxLaneConfig(
        name="activation lane",
        host=config.host,
        port=config.activation_port,
        advertise=config.advertise,
        ucx=ucx,
    )
    # The mover verifies bulk frames itself: a damaged piece fails its transfer, not the connection.
    bulk_settings = replace(settings, name="bulk lane", port=config.bulk_port, verify=False)
    try:
        return Lanes(
            UcxLane(identity, FrameCodec(kinds), settings),
            UcxLane(identity, FrameCodec(BULK_KINDS), bulk_settings),
        )
    except UcxUnavailable as error:
        log.warning("%s", error)
        return Lanes(NoLane(), NoLane(), str(error))
