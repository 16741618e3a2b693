"""Memory of this machine, or of the container that a process runs in."""

import contextlib
from pathlib import Path

import psutil

CONTAINER = Path("/sys/fs/cgroup")
"""The own control group (version 2), as a container sees it."""


def limit_bytes() -> int:
    """Bytes of memory of this machine, or the container's limit if lower."""
    return min([int(psutil.virtual_memory().total), *_container_limit()])


def available_bytes() -> int:
    """Bytes that this machine and the container can still provide without swapping."""
    available = [int(psutil.virtual_memory().available)]
    with contextlib.suppress(OSError, ValueError):
        used = int((CONTAINER / "memory.current").read_text())
        available += [max(0, limit - used + _cached_bytes()) for limit in _container_limit()]
    return min(available)


def _container_limit() -> list[int]:
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        return [int((CONTAINER / "memory.max").read_text())]
    return []


def _cached_bytes() -> int:
    """File pages of the container that the kernel frees on demand."""
    values = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
    return int(values.get("inactive_file", 0))
