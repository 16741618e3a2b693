"""Checks of the machine before anything is started."""

import contextlib
import ctypes
import errno
import resource
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from services.common.clock import monotonic_s
from services.common.settings import PREFIX
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError

OPEN_FILES_WANTED = 65536
FREE_DISK_BYTES = 256 * 2**20
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
RELEASE_TIMEOUT_S = 5.0
RETRY_S = 0.1


def check_port(host: str, port: int, wait_for_release: bool) -> None:
    """Make sure that a server can listen on `host`:`port`.

    `wait_for_release`: a predecessor was killed, and its gateway may be about to die.

    Raises:
        CommandError: if it cannot.
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
    """A port of `host` for a server that starts later: `wanted` if it is free, else any.

    The socket is bound and does not listen. While it is open, nobody is given the port by chance,
    and a server that reuses addresses, as ours do, can still listen there, also after a restart.

    Raises:
        CommandError: if there is none; `purpose` is what it says the port is for.
    """
    for port in (wanted, 0):
        try:
            # Where addresses are reused, binding alone does not tell whether somebody listens.
            _bind(host, port)
            family, kind, protocol, _, address = _address(host, port)
            held = socket.socket(family, kind, protocol)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(address)
            return held
        except OSError as error:
            reason = error.strerror
    raise CommandError(
        f"no port of {host} is free for {purpose} ({reason}); end what uses them",
        EXIT_UNUSABLE,
    )


def _remedy(error: OSError) -> str:
    another = "choose another with --port (make serve PORT=…)"
    if error.errno == errno.EADDRINUSE:
        return f"stop what uses it, or {another}"
    if error.errno == errno.EACCES:
        return f"ports below 1024 are for the administrator: {another}"
    return "correct --host: it must be an address of this machine"


def _bind(host: str, port: int) -> None:
    family, kind, protocol, _, address = _address(host, port)
    with socket.socket(family, kind, protocol) as one:
        # As servers do: connections that linger in TIME_WAIT do not matter, listeners do.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
        one.listen(1)


def _address(host: str, port: int) -> tuple[Any, ...]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]


def raise_open_files_limit() -> None:
    """Raise the limit of open files, for children too, to its maximum: every stream is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def shortages(device: str, memory_bytes: int, folder: Path) -> list[str]:
    """Warnings about scarce resources; `memory_bytes` is that of all workers together."""
    found = []
    free_bytes = psutil.virtual_memory().available
    if device == "cpu" and memory_bytes > free_bytes:
        found.append(
            f"the workers may use {memory_bytes / 2**30:.1f} GiB together, but the machine has only"
            f" {free_bytes / 2**30:.1f} GiB available, so it may kill some; lower --memory or"
            " --workers"
        )
    disk_bytes = psutil.disk_usage(str(folder)).free
    if disk_bytes < FREE_DISK_BYTES:
        found.append(
            f"{folder} has only {disk_bytes >> 20} MiB of disk left for etcd and logs; free some,"
            " or choose another folder with --cluster-dir"
        )
    return found


def host_memory_bytes() -> int:
    """This machine's memory, or the limit of the container if that is lower."""
    limits = [psutil.virtual_memory().total]
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limits.append(int(CONTAINER_LIMIT.read_text()))
    return min(limits)


def gpu_memory_bytes() -> list[int]:
    """The memory of each GPU that CUDA_VISIBLE_DEVICES leaves; none without a driver."""
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
    """A sentence if `environment` has options that `tideserve up` does not read."""
    names = ", ".join(sorted(name for name in environment if name.startswith(PREFIX)))
    if not names:
        return []
    return [
        f"{names}: options in the environment are for services that are started by themselves and"
        " have no effect here; use those of `tideserve up`, or the sections of its --config file"
    ]


def url_of(host: str, port: int, tls: bool = False) -> str:
    """Where a client on this machine reaches a server that listens on `host`:`port`."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    host = f"[{reachable}]" if ":" in reachable else reachable
    return f"{'https' if tls else 'http'}://{host}:{port}"
