"""Configuration of the scheduler."""

from dataclasses import dataclass

from services.common.service_config import ServiceConfig
from services.core.scheduler.state_config import StateConfig
from services.core.setting import nested, number, option, tcp_port

UNKNOWN_WORKERS = "A100-14B"
"""Device profile that predicts TTFT while no worker of a model publishes a cost model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(ServiceConfig):
    """The options of the scheduler."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = tcp_port(0, "gRPC port; 0: any free port.")
    state: StateConfig = nested(StateConfig())
    cost_profile: str | None = option(
        None,
        "Device profile for the TTFT prediction of dispatch prefix, for all workers: a name, or a"
        " file such as `tideserve profile` writes.",
        default_text=f"each worker's own cost model; {UNKNOWN_WORKERS} if no worker has one",
        expert=True,
    )
    gateway_grace_s: float = number(
        10.0,
        "Seconds for which the requests of a disconnected gateway are kept for its return.",
        minimum=0,
        maximum=3600,
        expert=True,
    )
