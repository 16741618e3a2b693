"""Opens the two lanes of an engine: over UCX, or without UCX lanes that reach no peer."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.common.address import is_loopback
from services.worker.engine.transfer.errors import UcxUnavailable
from services.worker.engine.transfer.frame import FrameCodec
from services.worker.engine.transfer.lane import Identity, Lane
from services.worker.engine.transfer.no_lane import NoLane
from services.worker.engine.transfer.pieces import BULK_KINDS
from services.worker.engine.transfer.ucx_config import UcxConfig, UcxLaneConfig
from services.worker.engine.transfer.ucx_lane import UcxLane

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lane for activations and the lane for bulk. Unless `reachable`, they reach no peer."""

    activations: Lane
    bulk: Lane
    reachable: bool


@dataclass(frozen=True, slots=True)
class LanesConfig:
    """Where lanes listen, and how peers reach them.

    The lanes listen on `host`; peers dial `advertise`; port 0 is any free port. `ucx` without
    devices means the loopback device if `host` is a loopback address, else all devices.
    """

    host: str
    advertise: str
    activation_port: int
    bulk_port: int
    ucx: UcxConfig


def open_lanes(identity: Identity, config: LanesConfig, kinds: Mapping[int, type[Any]]) -> Lanes:
    """Open lanes that listen; without UCX the worker serves, but cannot merge.

    `kinds` are the headers of frames on the activation lane.

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
    # A damaged piece fails its transfer, not the lane: so the mover verifies, not the lane.
    bulk_settings = replace(settings, name="bulk lane", port=config.bulk_port, verify=False)
    try:
        return Lanes(
            UcxLane(identity, FrameCodec(kinds), settings),
            UcxLane(identity, FrameCodec(BULK_KINDS), bulk_settings),
            reachable=True,
        )
    except UcxUnavailable as error:
        log.warning("%s", error)
        return Lanes(NoLane(), NoLane(), reachable=False)
