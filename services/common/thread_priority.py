"""Requests short time slices from the kernel for latency-critical threads."""

import ctypes
import logging
import os
import platform

SLICE_S = 0.0001
"""The shortest time slice that the kernel grants."""

log = logging.getLogger(__name__)

# libc has no wrapper for sched_setattr: call it by its number.
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


def request_short_slices() -> None:
    """Request short time slices for this thread, so that it is scheduled soon after it wakes up.

    For threads that do little work, but for which others wait: if all processors are busy, a woken
    thread would otherwise wait for some milliseconds. Its share of CPU time does not change.
    Effective on Linux 6.12 or later; no effect on other systems.
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
