"""Configuration of the gateway."""

from dataclasses import dataclass
from pathlib import Path

from services.common.config import number


@dataclass(frozen=True)
class Config:
    """What the gateway is told at its start."""

    host: str
    etcd_url: str
    model_name: str
    model_dir: Path
    port: int = number(minimum=0, maximum=65535)
    expected_workers: int = number(minimum=1, maximum=100_000)
    grpc_host: str = "127.0.0.1"
    grpc_port: int = number(0, minimum=0, maximum=65535)
    lease_ttl_s: int = number(10, minimum=2, maximum=600)
    api_key: str | None = None
    # Requests that may be in the gateway at once; more get 503.
    inflight_max: int = number(4096, minimum=1, maximum=1_000_000)
    # What bodies that are being read, parsed or tokenised may hold together; a large body beyond
    # gets 503. There is room for at least one of the largest.
    body_bytes_max: int = number(32 * 2**20, minimum=4 * 2**20, maximum=2**40)
    # How long running streams may go on after `stop`.
    drain_timeout_s: float = number(10.0, minimum=0, maximum=3600)
    # A request that takes longer ends with 504.
    request_timeout_s: float = number(3600.0, minimum=1, maximum=86_400)
    # A client that takes nothing for this long is cut.
    client_stall_s: float = number(30.0, minimum=0.1, maximum=3600)
    # A request that no living scheduler knows for this long gets 503.
    admit_timeout_s: float = number(4.0, minimum=0.1, maximum=600)
    # A stream fails when its request has moved to a worker that does not answer for this long. More
    # than the 10 s that a worker waits for a request, so that its answer comes first.
    attach_timeout_s: float = number(12.0, minimum=0.1, maximum=600)
    tokenizer_threads: int = number(2, minimum=1, maximum=64)
    # Folder for a log of all streams, output tokens included; a debugging aid.
    event_log: Path | None = None
