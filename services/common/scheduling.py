"""How soon the kernel runs a thread that has just become ready."""

import ctypes
import logging
import os
import platform

SLICE_S = 0.0001
"""The shortest that the kernel grants."""

log = logging.getLogger(__name__)

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_OTHER = 0


class _SchedAttr(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def run_soon() -> None:
    """Ask for short slices for this thread, so that it need not wait for others' to end.

    For threads that have little to do and are waited for: on a machine whose processors are all
    busy, one that wakes up would wait for some milliseconds. It gets no more time than before.
    Linux follows it from 6.12 on; where it cannot be asked for, nothing happens.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or not hasattr(os, "sched_getaffinity"):
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    size = ctypes.sizeof(_SchedAttr)
    wanted = _SchedAttr(size, _SCHED_OTHER, 0, nice, 0, round(SLICE_S * 1e9), 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, 0, ctypes.byref(wanted), 0) != 0:
        log.debug("short slices were refused: %s", os.strerror(ctypes.get_errno()))
