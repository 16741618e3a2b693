"""Checks limits of this machine that a cluster needs."""

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tideserve.cli.doctor.finding import Check, Finding
from tideserve.cli.errors import CommandError
from tideserve.cli.host import check_port

CHECK, PORTS = Check("limits"), Check("ports")
OPEN_FILES_MIN = 8192
MAPS_MIN = 65530
SHARED_BYTES_MIN = 64 * 2**20


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Maximum of open files and of memory mappings per process, free bytes of shared memory."""

    open_files: int
    maps: int
    shared_bytes: int


def read_limits() -> ProcessLimits:
    """The limits of this machine; an unknown limit counts as sufficient."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        maps = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        maps = MAPS_MIN
    try:
        shared_bytes = psutil.disk_usage("/dev/shm").free
    except OSError:
        shared_bytes = SHARED_BYTES_MIN
    return ProcessLimits(
        OPEN_FILES_MIN if hard == resource.RLIM_INFINITY else hard, maps, shared_bytes
    )


def check_limits(limits: ProcessLimits) -> list[Finding]:
    """Warn about limits that are too low for many streams or large models."""
    faults = list(_too_low(limits))
    return faults or [CHECK.fine("open files, mappings and shared memory are sufficient")]


def _too_low(limits: ProcessLimits) -> Iterator[Finding]:
    if limits.open_files < OPEN_FILES_MIN:
        yield CHECK.warning(
            f"a process may open {limits.open_files} files here, and every stream needs a"
            f" descriptor; raise the limit to {OPEN_FILES_MIN} or more (ulimit -n, LimitNOFILE=,"
            " or ulimits of the container)"
        )
    if limits.maps < MAPS_MIN:
        yield CHECK.warning(
            f"a process may have {limits.maps} mappings here, and a worker needs one"
            f" for each run of chunks; set vm.max_map_count to {MAPS_MIN} or more with sysctl"
        )
    if limits.shared_bytes < SHARED_BYTES_MIN:
        yield CHECK.warning(
            f"/dev/shm has {limits.shared_bytes >> 20} MiB free, so workers on one machine"
            f" exchange data over TCP; provide {SHARED_BYTES_MIN >> 20} MiB or more (shm_size of"
            " the container)"
        )


def check_free_port(host: str, port: int) -> Finding:
    """Check that a new cluster could listen on the port."""
    try:
        check_port(host, port, False)
    except CommandError as error:
        return PORTS.warning(f"the cache folder has no cluster on that port, and {error}")
    return PORTS.fine(f"port {port} of {host} is free for a cluster")
