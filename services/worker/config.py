"""Configuration of a worker."""

from dataclasses import dataclass
from pathlib import Path

from services.common.config import choice, number
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
    device: str = "cpu"
    dtype: str = choice("bfloat16", "bfloat16", "float32", "float64")
    load_format: str = choice("auto", "auto", "dummy")
    block_size: int = number(16, minimum=1, maximum=1024)
    chunk_bytes: int | None = number(None, minimum=4096, maximum=2**30)
    # An abort waits for the running iteration, so a slow device gets small ones.
    max_batch_tokens: int = number(256, minimum=1, maximum=2**20)
    max_running: int = number(128, minimum=1, maximum=2**16)
    max_waiting: int = number(4096, minimum=1, maximum=2**20)
    threads: int = number(1, minimum=1, maximum=1024)
    start_timeout_s: float = number(600.0, minimum=1, maximum=86400)
    drain_timeout_s: float = number(30.0, minimum=0, maximum=86400)

    def __post_init__(self) -> None:
        if self.max_running > self.max_batch_tokens:
            raise ConfigError(
                f"'max_running' is {self.max_running}, but must not exceed 'max_batch_tokens' "
                f"({self.max_batch_tokens}): every running request decodes one token an iteration"
            )
