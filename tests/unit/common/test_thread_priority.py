import ctypes
import os
import threading

from services.common import thread_priority
from services.common.thread_priority import request_short_slices


def test_slice_change_keeps_nice_and_policy() -> None:
    policies: list[tuple[int, int]] = []

    def look() -> None:
        request_short_slices()
        policies.append((os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert policies == [(os.SCHED_OTHER, before)]


def test_the_kernel_gets_a_complete_structure() -> None:
    assert ctypes.sizeof(thread_priority._SchedAttr) == 48  # SCHED_ATTR_SIZE_VER0
