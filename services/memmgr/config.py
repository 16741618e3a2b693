"""Configuration of the memory manager."""

from dataclasses import dataclass
from pathlib import Path

from services.common.config import choice, number
from services.core.memory.overload_events import OverloadPolicy


@dataclass(frozen=True, slots=True)
class Config:
    """What the memory manager is told at its start."""

    etcd_url: str
    host: str = "127.0.0.1"
    port: int = number(0, minimum=0, maximum=65535)
    lease_ttl_s: int = number(10, minimum=2, maximum=600)
    # What is done about overload: drop parameters, or leave it to preemption and recomputation.
    overload_policy: str = choice("drop", *OverloadPolicy)
    # How long overload lasts before groups merge, and relief before they split.
    overload_dwell_s: float = number(0.2, minimum=0, maximum=600)
    relief_dwell_s: float = number(5.0, minimum=0, maximum=3600)
    # How far ahead arrivals count as demand.
    lookahead_s: float = number(1.0, minimum=0, maximum=600)
    # Port of /metrics; none by default.
    metrics_port: int | None = number(None, minimum=0, maximum=65535)
    # How long members may take to get ready for a change of groups; a restore fetches layers.
    prepare_timeout_s: float = number(60.0, minimum=0.1, maximum=3600)
    # How long somebody who changed groups by hand waits for the members to change over.
    change_over_timeout_s: float = number(30.0, minimum=0.1, maximum=3600)
    # Pause after an aborted change; doubles with each one in a row.
    backoff_s: float = number(1.0, minimum=0.01, maximum=600)
    backoff_max_s: float = number(30.0, minimum=0.01, maximum=3600)
    # Folder for a log of all records, attempts and decisions; a debugging aid.
    event_log: Path | None = None
