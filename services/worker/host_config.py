"""Settings of host copies: KV blocks that a worker also keeps in host memory."""

from dataclasses import dataclass

from services.common.errors import ConfigError
from services.core.host.vocabulary import HostSettings, Save
from services.core.setting import AUTO_BYTES, choice, number, option, size

AUTO_PART = 4
"""`host_memory: auto` is at most this fraction of the available memory."""


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Host memory for KV blocks, and how it is used; see `core.host.vocabulary`."""

    host_memory: int = size(
        0,
        "Host memory of each worker for copies of KV: a second level of the prefix cache, which"
        " keeps prefixes after the device's memory was reused. auto: as much as its KV cache, at"
        " most a quarter of the available memory; 0: none. Needs `prefix_caching`.",
        minimum=0,
        maximum=2**50,
        auto=True,
    )
    save: Save = choice(
        Save.BATCH,
        Save,
        "With host_memory, which KV is copied to the host before it is lost: off (none), batch"
        " (cached prefixes and running batch requests) or all (online requests, too, when KV is"
        " scarce).",
    )
    save_from: float = number(
        0.5,
        "With host_memory: share of the KV cache in use from which running requests are saved.",
        minimum=0,
        maximum=1,
        expert=True,
    )
    lane_share: float = number(
        0.5,
        "With host_memory: maximum share of the link to host memory that saves use.",
        minimum=0.01,
        maximum=1,
        expert=True,
    )
    prefetch: bool = option(
        True,
        "With host_memory: whether KV is copied back while other requests run; off is for"
        " comparisons.",
        expert=True,
    )
    host_link_bytes_per_s: int | None = size(
        None,
        "With host_memory: bandwidth between device and host memory, in bytes per second.",
        minimum=1,
        maximum=2**50,
        default_text="that of the profile, else measured at the start",
        expert=True,
    )

    def check(self, *, prefix_caching: bool) -> None:
        """Raise ConfigError if copies would have no effect."""
        if self.host_memory and not prefix_caching:
            raise ConfigError(
                "'host_memory' has no effect without `prefix_caching`, since copies are found by"
                " the hashes of prefixes; set 'prefix_caching' to true, or 'host_memory' to 0"
            )

    def capacity_bytes(self, kv_bytes: int, available_bytes: int) -> int:
        """Host memory for copies of a worker with `kv_bytes` of KV cache."""
        if self.host_memory != AUTO_BYTES:
            return self.host_memory
        return min(kv_bytes, available_bytes // AUTO_PART)

    def settings(self, block_bytes: int, link_bytes_per_s: float) -> HostSettings:
        """Settings of the planner; see `HostSettings`."""
        return HostSettings(
            block_bytes=block_bytes,
            link_bytes_per_s=link_bytes_per_s,
            save=self.save,
            save_from=self.save_from,
            lane_share=self.lane_share,
            prefetch=self.prefetch,
        )
