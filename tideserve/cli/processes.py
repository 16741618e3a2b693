"""Compares the processes of a cluster with those that run and are registered."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import psutil

from tideserve.cli.service_config import is_worker


def process_faults(
    state: Mapping[str, Any],
    registered: Collection[str] | None = None,
    lives: Callable[[int], bool] = psutil.pid_exists,
) -> list[str]:
    """A sentence for each process of a local cluster that is dead or not registered.

    `state`: contents of cluster.json. `registered`: ids of the registered workers, None if unknown.
    """
    supervisor = int(state.get("pid", -1))
    if not lives(supervisor):
        return [
            f"the `tideserve up` that started this cluster (process {supervisor}) has ended with"
            " all its processes; start it again"
        ]
    return list(_faults(state, registered, lives))


def _faults(
    state: Mapping[str, Any], registered: Collection[str] | None, lives: Callable[[int], bool]
) -> Iterator[str]:
    pids = state.get("pids", {})
    for name in state.get("programs", pids):
        pid = pids.get(name)
        if pid is None or not lives(pid):
            yield f"{name} is dead; `tideserve up` will restart it; see `tideserve logs {name}`"
        elif registered is not None and is_worker(name) and name not in registered:
            yield (
                f"{name} (process {pid}) runs but is not registered: it is loading the model or"
                f" cannot reach etcd; wait, or see `tideserve logs {name}`"
            )
