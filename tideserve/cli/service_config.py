"""The configuration of each service, derived from the options of a cluster. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from services.common.service_config import ServiceConfig
from services.core.engine_kind import EngineKind
from services.worker.config import WorkerConfig
from tideserve.cli.cluster_options import CONFIGS, ClusterOptions, with_absolute_paths


@dataclass(frozen=True, slots=True)
class Placement:
    """What `up` settles before it writes the configurations."""

    model_dir: Path
    model_name: str
    etcd_url: str
    run_dir: Path
    profile_dir: Path | None = None
    metrics_ports: Mapping[str, int] = field(default_factory=dict)
    admin_port: int | None = None
    grpc_port: int | None = None
    engine_python: Path | None = None


# For vLLM where nothing else was chosen: its kernels for CPUs want blocks of a multiple of 32
# tokens, and its iterations are longer than ours.
VLLM_DEFAULTS: Mapping[str, Any] = {"block_size": 32, "max_batch_tokens": 2048}

# For our own engine on a GPU, which is hardly busy with the defaults for processors.
GPU_DEFAULTS: Mapping[str, Any] = {"max_batch_tokens": 2048, "max_running": 256}


def worker_names(count: int) -> list[str]:
    """Ids of the workers of a cluster."""
    return [f"worker-{index}" for index in range(count)]


def is_worker(name: str) -> bool:
    """Whether the process called so is a worker."""
    return name.startswith("worker-")


def service_configs(options: ClusterOptions, placement: Placement) -> dict[str, dict[str, Any]]:
    """Configuration of every process by its name, in the order in which they are started.

    Keys whose option is None are left out: the service has its default. A section's keys win.
    """
    model = {"model_name": placement.model_name, "model_dir": str(placement.model_dir)}
    ports = placement.metrics_ports
    settled: dict[str, dict[str, Any]] = {
        "memmgr": {"metrics_port": ports.get("memmgr")},
        "scheduler": {"metrics_port": ports.get("scheduler")},
        "gateway": model
        | {
            "expected_workers": options.workers,
            "expected_wait_s": options.ready_timeout_s,
            "metrics_port": ports.get("gateway"),
            "admin_port": placement.admin_port,
            "public_grpc_host": options.host,
            "public_grpc_port": placement.grpc_port,
        },
    }
    for name in worker_names(options.workers):
        settled[name] = model | {
            "memory_bytes": options.memory,
            "threads": options.threads_per_worker,
            "worker_id": name,
            "metrics_port": ports.get(name),
            "run_dir": str(placement.run_dir / name),
            "profile_dir": placement.profile_dir and str(placement.profile_dir),
            "engine_python": placement.engine_python and str(placement.engine_python),
        }
    configs = {}
    for name, own in settled.items():
        section = name if name in CONFIGS else "worker"
        derived = {"etcd_url": placement.etcd_url} | _passed_on(options, CONFIGS[section]) | own
        chosen = with_absolute_paths(options.services | getattr(options, section))
        config = {key: value for key, value in derived.items() if value is not None} | chosen
        configs[name] = _worker(config, options.engine_kind) if section == "worker" else config
    return configs


def _worker(config: dict[str, Any], engine: str) -> dict[str, Any]:
    """A worker's configuration with the defaults of its engine and device, on a GPU of its own."""
    device = config.get("device", "cpu")
    if engine == EngineKind.VLLM:
        config = {**VLLM_DEFAULTS, **config}
    elif device != "cpu":
        config = {**GPU_DEFAULTS, **config}
    if device == "cuda":
        config["device"] = "cuda:" + config["worker_id"].rpartition("-")[2]
    return _with_room(config)


def _passed_on(options: ClusterOptions, config: type[ServiceConfig]) -> dict[str, Any]:
    """What of the options is an option of the service with that configuration."""
    passed = {}
    for one in fields(options):
        cls, key = one.metadata.get("passed_to", (None, ""))
        if cls is not None and issubclass(config, cls):
            passed[key] = getattr(options, one.name)
    return with_absolute_paths(passed)


def _with_room(worker: dict[str, Any]) -> dict[str, Any]:
    """The configuration with both limits when one of them was chosen against the other's default.

    A batch must have room for one token of every running request.
    """
    defaults = {field.name: field.default for field in fields(WorkerConfig)}
    running = worker.get("max_running", defaults["max_running"])
    tokens = worker.get("max_batch_tokens", defaults["max_batch_tokens"])
    if not isinstance(running, int) or not isinstance(tokens, int) or running <= tokens:
        return worker
    return {"max_batch_tokens": running, "max_running": tokens} | worker
