"""Run processes on some cores of this machine only."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def halves() -> tuple[frozenset[int], frozenset[int]]:
    """Two sets of cores of this process, as equal as possible; alike if there is a single core."""
    cores = sorted(os.sched_getaffinity(0))
    middle = len(cores) // 2
    return frozenset(cores[:middle] or cores), frozenset(cores[middle:])


def pin(pids: Iterable[int], cores: Iterable[int]) -> None:
    """Run all threads of processes on `cores`, and the threads that they start."""
    for pid in pids:
        # A process or a thread may end meanwhile.
        with suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), cores)


@contextmanager
def child_cores(cores: Iterable[int]) -> Iterator[None]:
    """Run this thread, and the processes that it starts, on `cores`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
