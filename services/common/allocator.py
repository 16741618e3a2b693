"""Bounds what glibc's allocator keeps of memory that the process has released."""

import contextlib
import ctypes

ARENA_MAX = -8
"""`M_ARENA_MAX` of malloc.h."""
ARENAS = 2


def limit_arenas() -> None:
    """Let all threads allocate from a few arenas; call before they start.

    With eight arenas per core, gRPC's threads leave released blocks scattered over all of them, and
    the resident size stays at the sum of the peaks of the arenas.
    """
    # Other C libraries have no mallopt.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(ARENA_MAX, ARENAS)
