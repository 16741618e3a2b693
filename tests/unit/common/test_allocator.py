"""The number of arenas of glibc's allocator."""

import platform
import subprocess
import sys

import pytest

ARENAS = """
import ctypes, sys, threading
from services.common.allocator import limit_arenas
if sys.argv[1] == "limited":
    limit_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.fdopen.restype = ctypes.c_void_p
barrier = threading.Barrier(9)
def allocate():
    libc.malloc(1000)
    barrier.wait()
    barrier.wait()
for _ in range(8):
    threading.Thread(target=allocate).start()
barrier.wait()
stream = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, stream)
libc.fflush(stream)
barrier.wait()
"""


def arenas(mode: str) -> int:
    """The number of arenas of a process with nine threads."""
    command = [sys.executable, "-c", ARENAS, mode]
    return subprocess.run(command, capture_output=True, check=True).stdout.count(b"<heap nr=")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no arenas")
def test_threads_share_2_malloc_arenas() -> None:
    assert arenas("limited") == 2 < arenas("default")
