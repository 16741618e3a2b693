"""The two lanes of an engine: over UCX, or none that leads anywhere."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.common.address import is_loopback
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


@dataclass(frozen=True, slots=True)
class LanesConfig:
    """Where lanes listen, and how peers reach them.

    `host` is listened on, `advertise` is the host that peers dial; ports may be 0 for any. `ucx`
    without devices means the loopback if `host` is one, else all.
    """

    host: str
    advertise: str
    activation_port: int
    bulk_port: int
    ucx: UcxConfig


def open_lanes(identity: Identity, config: LanesConfig, kinds: Mapping[int, type[Any]]) -> Lanes:
    """Lanes that listen; without UCX the worker serves on, but cannot merge.

    `kinds` are the headers of frames on the activation lane.

    Raises:
        ConfigError: if a lane cannot listen where it is to.
    """
    activations, bulk = FrameCodec(kinds), FrameCodec(BULK_KINDS)
    ucx = config.ucx
    if not ucx.devices and is_loopback(config.host):
        ucx = replace(ucx, devices="lo")
    settings = UcxLaneConfig(
        host=config.host, port=config.activation_port, advertise=config.advertise, ucx=ucx
    )
    # A damaged piece fails its transfer; only the mover can tell, so the lane does not look.
    bulk_settings = replace(settings, port=config.bulk_port, verify=False)
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
