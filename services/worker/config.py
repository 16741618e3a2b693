"""Configuration of a worker."""

from dataclasses import dataclass
from pathlib import Path

from services.common.config import PAGE_BYTES, choice, device_name, number
from services.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker serves, on which device, within which memory."""

    worker_id: str
    etcd_url: str
    model_name: str
    model_dir: Path
    run_dir: Path  # private folder for the socket between servicer and engine
    memory_bytes: int = number(minimum=1, maximum=2**50)
    host: str = "127.0.0.1"
    port: int = number(0, minimum=0, maximum=65535)
    lease_ttl_s: int = number(10, minimum=2, maximum=600)
    device: str = device_name("cpu")
    dtype: str = choice("bfloat16", "bfloat16", "float32", "float64")
    load_format: str = choice("auto", "auto", "dummy")
    block_size: int = number(16, minimum=1, maximum=1024)
    chunk_bytes: int | None = number(
        None, minimum=PAGE_BYTES, maximum=2**30, multiple_of=PAGE_BYTES
    )
    # An abort waits for the running iteration, so a slow device gets small ones.
    max_batch_tokens: int = number(256, minimum=1, maximum=2**20)
    max_model_len: int | None = number(None, minimum=1, maximum=2**31 - 1)
    max_running: int = number(128, minimum=1, maximum=2**16)
    max_waiting: int = number(4096, minimum=1, maximum=2**20)
    threads: int = number(1, minimum=1, maximum=1024)
    start_timeout_s: float = number(600.0, minimum=1, maximum=86400)
    # How a pipeline's microbatches are formed: by equal cost, looking ahead, or by token count.
    batch_formation: str = choice("lookahead", "lookahead", "token_count")
    min_microbatch_tokens: int = number(128, minimum=1, maximum=2**20)
    # Whether KV and parameters stand aside for activations.
    coordinated_exchange: bool = True
    # UCX_TLS and UCX_NET_DEVICES between engines: "rc,sm,tcp" for RDMA between hosts; devices ""
    # are the loopback if `host` is, else all.
    ucx_transports: str = "sm,tcp"
    ucx_devices: str = ""
    # A silent engine first gets no new requests, then is started anew. Its iterations are bounded
    # by max_batch_tokens, so a slow device with a large model needs more time or smaller ones.
    engine_unready_s: float = number(10.0, minimum=1, maximum=3600)
    engine_dead_s: float = number(60.0, minimum=1, maximum=86400)
    drain_timeout_s: float = number(30.0, minimum=0, maximum=86400)
    paced: str | None = None  # device profile whose times the iterations are padded to
    profile_dir: Path | None = None  # where measured profiles are kept; None: nowhere
    profile_when_idle: bool = True
    # Folder for a log of all events, prompts included; nothing is profiled then.
    event_log: Path | None = None

    def __post_init__(self) -> None:
        if self.max_running > self.max_batch_tokens:
            raise ConfigError(
                f"'max_running' is {self.max_running}, but must not exceed 'max_batch_tokens' "
                f"({self.max_batch_tokens}): every running request decodes one token an iteration"
            )
