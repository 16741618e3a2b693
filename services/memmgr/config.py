"""Configuration of the memory manager."""

from dataclasses import dataclass

from services.common.config import number


@dataclass(frozen=True, slots=True)
class Config:
    """What the memory manager is told at its start."""

    etcd_url: str
    host: str = "127.0.0.1"
    port: int = number(0, minimum=0, maximum=65535)
    lease_ttl_s: int = number(10, minimum=2, maximum=600)
    # Port of /metrics; none by default.
    metrics_port: int | None = number(None, minimum=0, maximum=65535)
