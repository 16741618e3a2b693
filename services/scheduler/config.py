"""Configuration of the scheduler."""

from dataclasses import dataclass

from services.common.service_config import ServiceConfig
from services.core.scheduler.state_config import StateConfig
from services.core.setting import nested, number, option, tcp_port


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(ServiceConfig):
    """The options of the scheduler."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = tcp_port(0, "Port of gRPC; 0: any free one.")
    state: StateConfig = nested(StateConfig())
    cost_profile: str = option(
        "A100-14B",
        "Device profile by which dispatch prefix predicts TTFT, by name or file, such as"
        " `tideserve profile` makes. It says how much a decode costs beside a prompt's token; that"
        " the device is faster or slower altogether changes nothing.",
    )
    gateway_grace_s: float = number(
        10.0,
        "Seconds that the requests of a gateway whose stream ended are kept for its return.",
        minimum=0,
        maximum=3600,
        expert=True,
    )
