"""Checks of the machine before a cluster starts."""

import ctypes
import errno
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from services.common.clock import monotonic_s
from services.common.host_memory import available_bytes
from services.common.settings import PREFIX
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError

FREE_DISK_BYTES = 256 * 2**20
FULL_DISK_BYTES = 72 * 2**20
"""etcd reserves 64 MiB at a time, and ends when that fails; when it ends it returns as much."""
RELEASE_TIMEOUT_S = 5.0
RETRY_S = 0.1


def check_port(host: str, port: int, wait_for_release: bool) -> None:
    """Check that a server can listen on `host`:`port`.

    `wait_for_release`: retry for a while, because the gateway of a killed cluster may still run.

    Raises:
        CommandError: if the port cannot be used.
    """
    deadline_s = monotonic_s() + (RELEASE_TIMEOUT_S if wait_for_release else 0.0)
    while True:
        try:
            _bind(host, port)
            return
        except socket.gaierror as error:
            raise CommandError(
                f"the host '{host}' cannot be resolved ({error.strerror}); correct --host",
                EXIT_UNUSABLE,
            ) from error
        except OSError as error:
            if monotonic_s() >= deadline_s or error.errno != errno.EADDRINUSE:
                raise CommandError(
                    f"cannot listen on {host} port {port} ({error.strerror}); {_remedy(error)}",
                    EXIT_UNUSABLE,
                ) from error
        time.sleep(RETRY_S)


def hold_port(host: str, wanted: int, purpose: str) -> socket.socket:
    """Reserve a port of `host` for a server that starts later: `wanted` if free, else any.

    The socket is bound but does not listen. While the socket is open, the system does not assign
    the port, yet a server with SO_REUSEADDR, as ours, can listen there, also after a restart.

    Raises:
        CommandError: if no port is free; `purpose` appears in the message.
    """
    for port in (wanted, 0):
        try:
            # With SO_REUSEADDR, binding alone does not detect a listener.
            _bind(host, port)
            family, kind, protocol, _, address = _address(host, port)
            held = socket.socket(family, kind, protocol)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(address)
            return held
        except OSError as error:
            reason = error.strerror
    raise CommandError(
        f"no port of {host} is free for {purpose} ({reason}); stop programs that use ports",
        EXIT_UNUSABLE,
    )


def _remedy(error: OSError) -> str:
    another = "choose another port with --port (make serve PORT=…)"
    if error.errno == errno.EADDRINUSE:
        return f"stop the program that uses the port, or {another}"
    if error.errno == errno.EACCES:
        return f"ports below 1024 require root: {another}"
    return "correct --host: it must be an address of this machine"


def _bind(host: str, port: int) -> None:
    family, kind, protocol, _, address = _address(host, port)
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: ignore connections in TIME_WAIT, but not listeners.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)


def _address(host: str, port: int) -> tuple[Any, ...]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]


def shortages(device: str, memory_bytes: int, host_bytes: int, folder: Path) -> list[str]:
    """Warnings about scarce resources; both memories are sums of all workers.

    `memory_bytes` are on `device`, `host_bytes` are for copies of KV in host memory.
    """
    warnings = []
    free_bytes = available_bytes()
    used_bytes = host_bytes + (memory_bytes if device == "cpu" else 0)
    if used_bytes > free_bytes:
        ways = ["--memory"] * (device == "cpu") + ["--host-memory"] * bool(host_bytes)
        warnings.append(
            f"the workers may use {used_bytes / 2**30:.1f} GiB together, but only"
            f" {free_bytes / 2**30:.1f} GiB are available, so the kernel may kill some; lower"
            f" {', '.join(ways)} or --workers"
        )
    disk_bytes = psutil.disk_usage(str(folder)).free
    if disk_bytes < FREE_DISK_BYTES:
        warnings.append(
            f"{folder} has only {disk_bytes >> 20} MiB of disk left for etcd and logs; free some,"
            " or choose another folder with --cluster-dir"
        )
    return warnings


def disk_faults(folder: Path) -> list[str]:
    """A sentence if the disk of a running cluster's `folder` is full or nearly so."""
    free_bytes = psutil.disk_usage(str(folder)).free
    if free_bytes >= FULL_DISK_BYTES:
        return []
    return [
        f"the disk of {folder} is full or nearly so ({free_bytes >> 20} MiB left; etcd reserves 64"
        " at a time): logs may be lost, process ids may be old, and etcd may stop, without which"
        " workers cannot register and groups cannot change; free some disk space"
    ]


def gpu_memory_bytes() -> list[int]:
    """Bytes of memory of each GPU in CUDA_VISIBLE_DEVICES; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    sizes = []
    for ordinal in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        sizes.append(total.value)
    return sizes


def unused_variables(environment: Mapping[str, str]) -> list[str]:
    """A warning if `environment` has options that `tideserve up` ignores."""
    names = ", ".join(sorted(name for name in environment if name.startswith(PREFIX)))
    if not names:
        return []
    return [
        f"{names}: these variables configure services that run without `tideserve up` and have no"
        " effect here; use options of `tideserve up`, or sections of its --config file"
    ]


def url_of(host: str, port: int, tls: bool = False) -> str:
    """URL for clients on this machine of a server that listens on `host`:`port`."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    host = f"[{reachable}]" if ":" in reachable else reachable
    return f"{'https' if tls else 'http'}://{host}:{port}"
