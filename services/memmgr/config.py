"""Configuration of the memory manager."""

from dataclasses import dataclass

from services.common.service_config import ServiceConfig
from services.core.groups.coordinator import CoordinatorConfig
from services.core.overload.events import OverloadConfig, OverloadPolicy
from services.core.setting import choice, number, option, tcp_port

BOUNDS = CoordinatorConfig()
MONITOR = OverloadConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemmgrConfig(ServiceConfig):
    """The options of the memory manager."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = tcp_port(0, "Port of gRPC; 0: any free one.")
    overload_policy: OverloadPolicy = choice(
        MONITOR.policy,
        OverloadPolicy,
        "When requests overflow the KV cache: drop replicated layers, or recompute.",
    )
    overload_dwell_s: float = number(
        MONITOR.overload_dwell_s,
        "Seconds that overload lasts before groups merge.",
        minimum=0,
        maximum=600,
    )
    split_dwell_s: float = number(
        MONITOR.split_dwell_s,
        "Seconds that demand is low before groups split.",
        minimum=0,
        maximum=3600,
    )
    prepare_timeout_s: float = number(
        BOUNDS.protocol.prepare_timeout_s,
        "Seconds that members may take to get ready for a change of groups, which may fetch"
        " layers.",
        minimum=0.1,
        maximum=3600,
    )
    change_over_timeout_s: float = number(
        BOUNDS.change_over_timeout_s,
        "Seconds that a change by hand waits for the members to change over.",
        minimum=0.1,
        maximum=3600,
        expert=True,
    )
    backoff_s: float = number(
        BOUNDS.protocol.backoff_s,
        "Pause after an aborted change, in seconds; doubles with each one in a row.",
        minimum=0.01,
        maximum=600,
        expert=True,
    )
