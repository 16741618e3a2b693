"""The two lanes of an engine: over UCX, or none that leads anywhere."""

import ipaddress
import logging
from dataclasses import dataclass, replace

from services.worker.engine.pipeline.frames import KINDS
from services.worker.engine.transfer.errors import UcxUnavailable
from services.worker.engine.transfer.frame import FrameCodec
from services.worker.engine.transfer.lane import Identity, Lane
from services.worker.engine.transfer.local_lane import LocalNetwork
from services.worker.engine.transfer.pieces import BULK_KINDS
from services.worker.engine.transfer.ucx_config import UcxConfig, UcxLaneConfig
from services.worker.engine.transfer.ucx_lane import UcxLane

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lanes:
    """One for activations, one for bulk; unless `reachable`, no peer can be connected."""

    activations: Lane
    bulk: Lane
    reachable: bool


def open_lanes(identity: Identity, host: str, transports: str, devices: str) -> Lanes:
    """Lanes that listen on `host`; without UCX the worker serves on, but cannot merge.

    `transports` and `devices` as in `UcxConfig`; no devices on a loopback host means that one.
    """
    activations, bulk = FrameCodec(KINDS), FrameCodec(BULK_KINDS)
    if not devices and ipaddress.ip_address(host).is_loopback:
        devices = "lo"
    settings = UcxLaneConfig(host=host, ucx=UcxConfig(transports, devices))
    # A damaged piece fails its transfer; only the mover can tell, so the lane does not look.
    bulk_settings = replace(settings, verify=False)
    try:
        return Lanes(
            UcxLane(identity, activations, settings),
            UcxLane(identity, bulk, bulk_settings),
            reachable=True,
        )
    except UcxUnavailable as error:
        log.warning("%s", error)
        return Lanes(
            LocalNetwork(activations).lane(identity),
            LocalNetwork(bulk).lane(identity),
            reachable=False,
        )
