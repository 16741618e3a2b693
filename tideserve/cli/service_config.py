"""Derives the configuration of each service from the options of a cluster. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.config import plain
from services.common.setting import settings_of
from services.worker.engine_args import devices_of, normalized
from tideserve.cli.cluster_options import CONFIGS, ClusterOptions, with_absolute_paths
from tideserve.cli.model_list import PlacedModel


@dataclass(frozen=True, slots=True)
class Placement:
    """Paths, ports and names that `up` chooses before it writes the configurations.

    `models`: the models of the option `models`; then `model_dir` and `model_name` have no effect.
    """

    model_dir: Path
    model_name: str
    etcd_url: str
    run_dir: Path
    profile_dir: Path | None = None
    metrics_ports: Mapping[str, int] = field(default_factory=dict)
    admin_port: int | None = None
    grpc_port: int | None = None
    engine_python: Path | None = None
    batch_dir: Path | None = None
    models: tuple[PlacedModel, ...] = ()


def worker_names(count: int) -> list[str]:
    """Ids of the workers of a cluster."""
    return [f"worker-{index}" for index in range(count)]


def is_worker(name: str) -> bool:
    """Whether the process named `name` is a worker."""
    return name.startswith("worker-")


def service_configs(options: ClusterOptions, placement: Placement) -> dict[str, dict[str, Any]]:
    """Configuration of every process by name, in start order.

    Keys whose option is None are omitted, so the service uses its default. Keys of a section
    override derived keys.
    """
    ports = placement.metrics_ports
    settled: dict[str, dict[str, Any]] = {
        "memmgr": {"metrics_port": ports.get("memmgr")},
        "scheduler": {"metrics_port": ports.get("scheduler")},
        "gateway": _gateway_models(options, placement)
        | {
            "expected_wait_s": options.ready_timeout_s,
            "metrics_port": ports.get("gateway"),
            "admin_port": placement.admin_port,
            "public_grpc_host": options.host,
            "public_grpc_port": placement.grpc_port,
            "batch_store": placement.batch_dir and f"sqlite:///{placement.batch_dir}/batches.db",
        },
    }
    for index, (name, keys) in enumerate(_worker_keys(options, placement).items()):
        settled[name] = keys | {
            "upstream_url": options.upstream[index] if options.upstream else None,
            "threads": options.threads_per_worker,
            "worker_id": name,
            "metrics_port": ports.get(name),
            "run_dir": str(placement.run_dir / name),
            "profile_dir": placement.profile_dir and str(placement.profile_dir),
            "engine_python": placement.engine_python and str(placement.engine_python),
        }
    sections = _worker_sections(placement)
    configs, devices = {}, 0
    for name, own in settled.items():
        section = name if name in CONFIGS else "worker"
        derived = {"etcd_url": placement.etcd_url} | _passed_on(options, section) | own
        chosen = options.services | getattr(options, section) | sections.get(name, {})
        chosen = with_absolute_paths(chosen)
        config = {key: value for key, value in derived.items() if value is not None} | chosen
        if section == "worker" and config.get("device") == "cuda":
            # A worker uses the devices from this one on.
            config["device"] = f"cuda:{devices}"
            devices += devices_of(normalized(config.get("engine_args", {})))
        configs[name] = config
    return configs


def _gateway_models(options: ClusterOptions, placement: Placement) -> dict[str, Any]:
    """The keys of the gateway that name its models."""
    if placement.models:
        return {"models": [model.gateway_entry() for model in placement.models]}
    return {
        "model_name": placement.model_name,
        "model_dir": str(placement.model_dir),
        "expected_workers": options.workers,
    }


def _worker_keys(options: ClusterOptions, placement: Placement) -> dict[str, dict[str, Any]]:
    """The keys of each worker that depend on its model."""
    if not placement.models:
        keys: dict[str, Any] = {
            "model_name": placement.model_name,
            "model_dir": str(placement.model_dir),
            "memory_bytes": None if options.upstream else options.memory,
        }
        return dict.fromkeys(worker_names(options.workers), keys)
    keys_of = [
        model.worker_keys(options.memory)
        for model in placement.models
        for _ in range(model.listed.workers)
    ]
    return dict(zip(worker_names(options.workers), keys_of, strict=True))


def _worker_sections(placement: Placement) -> dict[str, dict[str, Any]]:
    """The section `worker` of each worker's model."""
    sections = [m.listed.worker for m in placement.models for _ in range(m.listed.workers)]
    return dict(zip(worker_names(len(sections)), sections, strict=True))


def _passed_on(options: ClusterOptions, service: str) -> dict[str, Any]:
    """Options that the service takes under the same or another name."""
    passed = {}
    for option in settings_of(ClusterOptions).values():
        services, key = option.metadata.get("passed_to", ((), ""))
        if service in services:
            passed[key] = plain(getattr(options, option.key))
    return with_absolute_paths(passed)
