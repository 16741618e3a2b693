"""Counts the calls of a process to etcd by duration, and their failures, for its metrics."""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.clock import monotonic_s

UPPER_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0)
"""Upper bounds of the histogram's buckets; a call times out after 3 s."""


class EtcdCalls:
    """Duration histogram and failures of all calls of this process.

    `rollbacks`: how often an answer showed that etcd had lost writes.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(UPPER_BOUNDS_S) + 1)
        self.total_s = 0.0
        self.failed = 0
        self.rollbacks = 0

    @contextmanager
    def timed(self, failures: tuple[type[BaseException], ...]) -> Iterator[None]:
        """Count the body as a call, which fails if it raises one of `failures`.

        A body that raises another exception, such as CancelledError, is not counted.
        """
        started_s = monotonic_s()
        try:
            yield
        except failures:
            self.failed += 1
            self._note(started_s)
            raise
        self._note(started_s)

    def _note(self, started_s: float) -> None:
        duration_s = monotonic_s() - started_s
        self.counts[bisect_left(UPPER_BOUNDS_S, duration_s)] += 1
        self.total_s += duration_s
