"""Configuration of the scheduler."""

from dataclasses import dataclass
from pathlib import Path

from services.common.config import choice, number
from services.core.scheduler.dispatch import SCORES


@dataclass(frozen=True, slots=True)
class Config:
    """What the scheduler is told at its start."""

    etcd_url: str
    host: str = "127.0.0.1"
    port: int = number(0, minimum=0, maximum=65535)
    lease_ttl_s: int = number(10, minimum=2, maximum=600)
    # Requests that may wait; more are refused.
    queue_limit: int = number(1024, minimum=1, maximum=1_000_000)
    # A request that waits longer is refused.
    queue_deadline_s: float = number(120.0, minimum=0.1, maximum=86_400)
    # How groups are ranked.
    dispatch: str = choice("least_loaded", *SCORES)
    # How long the requests of a gateway whose stream ended are kept for its return.
    gateway_grace_s: float = number(10.0, minimum=0, maximum=3600)
    # Folder for a log of all events, prompts excluded; none by default.
    event_log: Path | None = None
    # Port of /metrics; none by default.
    metrics_port: int | None = number(None, minimum=0, maximum=65535)
