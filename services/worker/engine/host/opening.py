"""Opens host copies for an engine: sizes of the store, and speed of the link to host memory."""

import logging
from dataclasses import dataclass

from services.common.device_profile import DeviceProfile
from services.common.errors import ConfigError
from services.common.host_memory import available_bytes, limit_bytes
from services.core.host.vocabulary import HostSettings
from services.core.planner.state import PlannerState
from services.worker.config import WorkerConfig
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.host.copier import HostCopier, LockedCopies
from services.worker.engine.host.driver import HostDriver
from services.worker.engine.host.lane import HostLane
from services.worker.engine.host.store import HostMemoryError, HostStore
from services.worker.engine.memory.stage_memory import StageMemory
from services.worker.engine.profile.host_link import measure_host_link

MEASURED_BYTES = 16 << 20
"""Copied at the start to measure the link, without a profile that has it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedHost:
    """The host store of an engine, the planner's settings and the lane to the store."""

    store: HostStore
    settings: HostSettings
    lane: HostLane

    def driver(
        self, planner: PlannerState, copies: LockedCopies, memory: StageMemory
    ) -> HostDriver:
        """Return the driver of the planner's host copies."""
        tier = planner.host
        assert tier is not None, "the planner has the settings"
        copier = HostCopier(copies, memory, self.store, tier.block_of)
        return HostDriver(self.store, copier, self.lane, tier)


def open_host(
    config: WorkerConfig,
    runner: ModelRunner,
    paced: DeviceProfile | None,
    stored: DeviceProfile | None,
) -> OpenedHost | None:
    """Open host copies as configured; None with `host_memory: 0`.

    `paced` is the profile that the engine is paced to, `stored` that of its model and device.

    Raises:
        HostMemoryError: if the machine or container has too little memory.
        ConfigError: if the profile that the engine is paced to lacks the sizes of its KV.
    """
    if not config.host_copies.host_memory:
        return None
    kv_range = runner.stage_memory.kv_ranges[0]
    layers, layer_bytes = runner.stage_memory.num_layers, kv_range.shape.size_bytes
    kv_bytes = runner.num_blocks * layers * layer_bytes
    capacity_bytes = config.host_copies.capacity_bytes(kv_bytes, available_bytes())
    _check_limit(config, capacity_bytes)
    store = HostStore(layers, layer_bytes, capacity_bytes, available_bytes)
    if paced is None:
        block_bytes = layers * layer_bytes
        link = config.host_copies.host_link_bytes_per_s or _link_bytes_per_s(config, stored)
    else:
        block_bytes, link = _modelled(config, paced, runner.block_size)
    log.info(
        "host copies: up to %d KV blocks in %d MiB of host memory, link %.1f GB/s",
        *(store.slots_max, capacity_bytes >> 20, link / 1e9),
    )
    lane = HostLane(block_bytes / link, paced=paced is not None)
    return OpenedHost(store, config.host_copies.settings(block_bytes, link), lane)


def _check_limit(config: WorkerConfig, capacity_bytes: int) -> None:
    """Raise HostMemoryError if this machine or container can never hold the copies."""
    own_bytes = config.memory_bytes if config.device == "cpu" else 0
    limit = limit_bytes()
    if capacity_bytes + own_bytes > limit:
        own = f" and 'memory' {own_bytes >> 20} MiB" if own_bytes else ""
        raise HostMemoryError(
            f"'host_memory' is {capacity_bytes >> 20} MiB{own}, but this machine or container has"
            f" {limit >> 20} MiB; lower it, or raise the container's memory limit"
        )


def _modelled(config: WorkerConfig, paced: DeviceProfile, block_size: int) -> tuple[int, float]:
    """Bytes of a KV block and bandwidth of the modelled device. Raises ConfigError."""
    link = config.host_copies.host_link_bytes_per_s or paced.host_link_bytes_per_s
    if paced.kv_bytes_per_token is None or link is None:
        raise ConfigError(
            f"'host_memory' needs the size of the KV and the link to host memory of the modelled"
            f" device, which the profile {paced.name} lacks; use another profile, or remove"
            " 'host_memory'"
        )
    return paced.kv_bytes_per_token * block_size, link


def _link_bytes_per_s(config: WorkerConfig, stored: DeviceProfile | None) -> float:
    """The bandwidth of the stored profile, else a measured one."""
    if stored is not None and stored.host_link_bytes_per_s is not None:
        return stored.host_link_bytes_per_s
    return measure_host_link(config.device, MEASURED_BYTES).bytes_per_s
