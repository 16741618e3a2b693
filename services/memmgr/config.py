"""Configuration of the memory manager."""

from dataclasses import dataclass

from services.common.config import choice, number, option, tcp_port
from services.common.service_config import ServiceConfig
from services.core.overload.events import OverloadPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class MemmgrConfig(ServiceConfig):
    """The options of the memory manager."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = tcp_port(0, "Port of gRPC; 0: any free one.")
    overload_policy: str = choice(
        "drop",
        OverloadPolicy,
        "When requests overflow the KV cache: drop replicated layers, or recompute.",
    )
    overload_dwell_s: float = number(
        0.2, "Seconds that overload lasts before groups merge.", minimum=0, maximum=600
    )
    split_dwell_s: float = number(
        5.0, "Seconds that demand is low before groups split.", minimum=0, maximum=3600
    )
    lookahead_s: float = number(
        1.0, "Seconds ahead for which arrivals count as demand.", minimum=0, maximum=600
    )
    prepare_timeout_s: float = number(
        60.0,
        "Seconds that members may take to get ready for a change of groups, which may fetch"
        " layers.",
        minimum=0.1,
        maximum=3600,
    )
    change_over_timeout_s: float = number(
        30.0,
        "Seconds that a change by hand waits for the members to change over.",
        minimum=0.1,
        maximum=3600,
    )
    gone_after_s: float = number(
        3600.0,
        "Seconds after which the records of a worker that is not registered any more are removed.",
        minimum=1,
        maximum=30 * 86_400,
    )
    backoff_s: float = number(
        1.0,
        "Pause after an aborted change, in seconds; doubles with each one in a row.",
        minimum=0.01,
        maximum=600,
    )
    backoff_max_s: float = number(
        30.0, "Longest pause after an aborted change, in seconds.", minimum=0.01, maximum=3600
    )
