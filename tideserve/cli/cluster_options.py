"""What a person chooses about a cluster: from the file given with --config, then from flags."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.common.config import (
    PAGE_BYTES,
    choice,
    device_name,
    from_mapping,
    number,
    parse_size_bytes,
    read_yaml,
)
from services.common.device_profile import load_profile, split_slowdown
from services.common.errors import ConfigError
from tideserve.cli.default import DEFAULT_PORT

WORKERS_MAX = 64
SECTIONS = ("gateway", "scheduler", "memmgr", "worker")
# These follow from the cluster itself: a section that set one would break it apart.
SETTLED_KEYS = frozenset(
    {
        "etcd_url",
        "expected_workers",
        "host",
        "model_dir",
        "model_name",
        "port",
        "run_dir",
        "worker_id",
    }
)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options of `tideserve up`; a key in the --config file has the flag's name in snake_case.

    Sizes are text such as "1GiB" or a number of bytes, durations are seconds. None leaves the
    choice to the service. The sections are passed on to that service's own configuration.
    """

    model: str | None = None
    model_name: str | None = None
    workers: int = number(2, minimum=1, maximum=WORKERS_MAX)
    host: str = "127.0.0.1"
    port: int = number(DEFAULT_PORT, minimum=1, maximum=65535)
    memory: str | int = "1GiB"
    dtype: str = choice("bfloat16", ("bfloat16", "float32", "float64"))
    device: str = device_name("cpu")
    load_format: str = choice("auto", ("auto", "dummy"))
    api_key: str | None = None
    etcd: str | None = None
    chunk_size: str | int | None = None
    block_size: int | None = number(None, minimum=1, maximum=1024)
    max_running: int | None = number(None, minimum=1, maximum=65536)
    max_batch_tokens: int | None = number(None, minimum=1, maximum=2**20)
    max_model_len: int | None = number(None, minimum=1, maximum=2**31 - 1)
    threads: int | None = number(None, minimum=1, maximum=1024)
    queue_limit: int | None = number(None, minimum=1, maximum=10**6)
    queue_deadline: float | None = number(None, minimum=0.1, maximum=86400)
    lease_ttl: int | None = number(None, minimum=2, maximum=600)
    overload_policy: str | None = choice(None, ("drop", "recompute"))
    ready_timeout: float = number(180.0, minimum=1, maximum=86400)
    paced: str | None = None
    cluster_dir: Path | None = None
    gateway: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    memmgr: dict[str, Any] = field(default_factory=dict)
    worker: dict[str, Any] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        """Device memory budget of each worker."""
        return size_bytes(self.memory)

    @property
    def chunk_bytes(self) -> int | None:
        """Size of an arena chunk, None for the worker's own default."""
        return None if self.chunk_size is None else size_bytes(self.chunk_size)

    @property
    def threads_per_worker(self) -> int:
        """Compute threads of each worker: the processors this process may use, shared out."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.workers)


def size_bytes(size: str | int) -> int:
    """Bytes in a size that YAML may have read as a number. Raises ConfigError."""
    return parse_size_bytes(str(size))


def read_options(path: Path | None, flags: Mapping[str, Any]) -> ClusterOptions:
    """Options from the file at `path`, overridden by those `flags` that are not None.

    Raises:
        ConfigError: one sentence about the first key or value that cannot be used.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    options = from_mapping(ClusterOptions, given, "the command line")
    if path is not None:
        options = from_mapping(ClusterOptions, read_yaml(path) | given, str(path))
    for size, name in ((options.memory, "memory"), (options.chunk_size, "chunk_size")):
        if size is not None:
            _check_size(size, name)
    if options.chunk_bytes is not None and options.chunk_bytes % PAGE_BYTES:
        raise ConfigError(
            f"chunk_size: {options.chunk_size} is not a multiple of the page size; choose a"
            f" multiple of {PAGE_BYTES} bytes, such as 64KiB"
        )
    if options.paced is not None:
        options = replace(options, paced=profile_name(options.paced))
    for section in SECTIONS:
        _check_section(getattr(options, section), section)
    if options.api_key is not None and not options.api_key.strip():
        raise ConfigError("the API key is empty; give one, or leave the option out")
    return options


def _check_size(size: str | int, name: str) -> None:
    try:
        size_bytes(size)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def profile_name(name_or_path: str) -> str:
    """The name of a shipped profile, or an absolute path: workers run in another folder."""
    load_profile(name_or_path)
    place, _ = split_slowdown(name_or_path)
    path = Path(place).expanduser()
    if not path.is_file():
        return name_or_path
    return str(path.absolute()) + name_or_path.removeprefix(place)


def _check_section(section: Mapping[Any, Any], name: str) -> None:
    """The service itself knows its keys; here only what would break the cluster is refused."""
    for key in section:
        if not isinstance(key, str):
            raise ConfigError(f"the key {key!r} of section '{name}' must be text")
        if key in SETTLED_KEYS:
            raise ConfigError(
                f"'{key}' cannot be set in section '{name}': it follows from the options of the"
                " cluster; take it out"
            )
