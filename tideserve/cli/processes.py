"""The processes that `tideserve up` keeps alive, beside those that live and are registered."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import psutil

from tideserve.cli.service_config import is_worker


def process_faults(
    state: Mapping[str, Any],
    registered: Collection[str] | None = None,
    lives: Callable[[int], bool] = psutil.pid_exists,
) -> list[str]:
    """A sentence for each process of a cluster on this machine that is not as it should be.

    `state`: as `tideserve up` writes it to cluster.json. `registered`: ids of the workers that the
    cluster knows of, None if that cannot be told.
    """
    supervisor = int(state.get("pid", -1))
    if not lives(supervisor):
        return [
            f"the `tideserve up` that started this cluster (process {supervisor}) is gone, and its"
            " processes with it; start it again"
        ]
    return list(_faults(state, registered, lives))


def _faults(
    state: Mapping[str, Any], registered: Collection[str] | None, lives: Callable[[int], bool]
) -> Iterator[str]:
    pids = state.get("pids", {})
    for name in state.get("programs", pids):
        pid = pids.get(name)
        if pid is None or not lives(pid):
            yield f"{name} is dead; `tideserve up` starts it again, see `tideserve logs {name}`"
        elif registered is not None and is_worker(name) and name not in registered:
            yield (
                f"{name} (process {pid}) runs and is not registered: it loads the model, or does"
                f" not reach etcd; wait, or see `tideserve logs {name}`"
            )
