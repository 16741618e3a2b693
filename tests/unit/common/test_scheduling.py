import ctypes
import os
import threading

from services.common import scheduling
from services.common.scheduling import run_soon


def test_it_changes_neither_nice_nor_policy() -> None:
    found: list[tuple[int, int]] = []

    def look() -> None:
        run_soon()
        found.append((os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(os.SCHED_OTHER, before)]


def test_the_kernel_is_told_of_a_whole_structure() -> None:
    assert ctypes.sizeof(scheduling._SchedAttr) == 48  # SCHED_ATTR_SIZE_VER0
