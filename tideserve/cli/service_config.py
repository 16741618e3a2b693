"""The configuration of each service, derived from the options of a cluster. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from services.worker.config import WorkerConfig
from tideserve.cli.cluster_options import ClusterOptions


@dataclass(frozen=True, slots=True)
class Placement:
    """What `up` settles before it writes the configurations."""

    model_dir: Path
    model_name: str
    etcd_url: str
    run_dir: Path
    profile_dir: Path | None = None


def worker_names(count: int) -> list[str]:
    """Ids of the workers of a cluster."""
    return [f"worker-{index}" for index in range(count)]


def service_configs(options: ClusterOptions, placement: Placement) -> dict[str, dict[str, Any]]:
    """Configuration of every process by its name, in the order in which they are started.

    Keys whose option is None are left out: the service has its default. A section's keys win.
    """
    shared = {"etcd_url": placement.etcd_url, "lease_ttl_s": options.lease_ttl}
    model = {"model_name": placement.model_name, "model_dir": str(placement.model_dir)}
    configs = {
        "memmgr": _merged(shared | {"overload_policy": options.overload_policy}, options.memmgr),
        "scheduler": _merged(
            shared
            | {"queue_limit": options.queue_limit, "queue_deadline_s": options.queue_deadline},
            options.scheduler,
        ),
        "gateway": _merged(
            shared
            | model
            | {
                "host": options.host,
                "port": options.port,
                "expected_workers": options.workers,
                "api_key": options.api_key,
            },
            options.gateway,
        ),
    }
    for name in worker_names(options.workers):
        own = _worker(options) | {
            "worker_id": name,
            "run_dir": str(placement.run_dir / name),
            "profile_dir": placement.profile_dir and str(placement.profile_dir),
        }
        configs[name] = _with_room(_merged(shared | model | own, options.worker))
    return configs


def _worker(options: ClusterOptions) -> dict[str, Any]:
    return {
        "device": options.device,
        "dtype": options.dtype,
        "load_format": options.load_format,
        "memory_bytes": options.memory_bytes,
        "chunk_bytes": options.chunk_bytes,
        "block_size": options.block_size,
        "max_running": options.max_running,
        "max_batch_tokens": options.max_batch_tokens,
        "max_model_len": options.max_model_len,
        "threads": options.threads_per_worker,
        "paced": options.paced,
    }


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


def _merged(derived: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in derived.items() if value is not None} | dict(chosen)
