"""Ports of /metrics for the processes of a local cluster, and Prometheus' file of targets."""

import json
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from tideserve.cli.host import hold_port

LOOPBACK = "127.0.0.1"


class MetricsPorts:
    """Free ports of this machine, reserved until `release`."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def hold(self, names: Iterable[str]) -> dict[str, int]:
        """A free port for each name. Raises CommandError."""
        return {name: self._hold() for name in names}

    def release(self) -> None:
        """Release all ports."""
        while self._held:
            self._held.pop().close()

    def _hold(self) -> int:
        held = hold_port(LOOPBACK, 0, "metrics")
        self._held.append(held)
        return int(held.getsockname()[1])


def targets_json(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Targets for Prometheus' file_sd_configs; `configs`: configuration of each process by name.

    Label `job` is the service, as in Kubernetes; `process` is the name, such as worker-0.
    """
    groups = [
        {
            "targets": [f"{_host_of(name, config)}:{config['metrics_port']}"],
            "labels": {"job": name.partition("-")[0], "process": name},
        }
        for name, config in configs.items()
        if config.get("metrics_port")
    ]
    return json.dumps(groups, indent=1) + "\n"


def _host_of(name: str, config: Mapping[str, Any]) -> str:
    """Host of the service's gRPC port, whose address also serves its metrics."""
    host = str(config.get("grpc_host" if name == "gateway" else "host", LOOPBACK))
    return LOOPBACK if host in ("0.0.0.0", "::") else host
