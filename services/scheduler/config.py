"""Configuration of the scheduler."""

from dataclasses import dataclass

from services.common.service_config import ServiceConfig
from services.core.scheduler.state_config import StateConfig
from services.core.setting import nested, number, option, tcp_port


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(ServiceConfig):
    """The options of the scheduler."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = tcp_port(0, "gRPC port; 0: any free port.")
    state: StateConfig = nested(StateConfig())
    cost_profile: str = option(
        "A100-14B",
        "Device profile for the TTFT prediction of dispatch prefix: a name, or a file such as"
        " `tideserve profile` writes. Only the ratio of decode cost to prefill cost matters, not"
        " the device's overall speed.",
    )
    gateway_grace_s: float = number(
        10.0,
        "Seconds for which the requests of a disconnected gateway are kept for its return.",
        minimum=0,
        maximum=3600,
        expert=True,
    )
