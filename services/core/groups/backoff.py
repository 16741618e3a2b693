"""Exponential back-off after failed changes of groups, for the coordinator and merge planning."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """Back-off by worker id, or by model name; the time doubles with each consecutive failure."""

    _failures: dict[str, int] = field(default_factory=dict)  # consecutive failures
    _until_s: dict[str, float] = field(default_factory=dict)  # end of the back-off

    def note_failure(
        self, worker_ids: Iterable[str], now_s: float, first_s: float, longest_s: float
    ) -> None:
        """Start the back-off of these workers: `first_s`, doubled up to `longest_s`."""
        for worker_id in worker_ids:
            failures = self._failures.get(worker_id, 0) + 1
            self._failures[worker_id] = failures
            # Bound the exponent: 2 ** failures overflows a float.
            wait_s = min(longest_s, first_s * 2 ** min(failures - 1, 30))
            self._until_s[worker_id] = now_s + wait_s

    def note_success(self, worker_ids: Iterable[str]) -> None:
        """End the back-off of these workers."""
        for worker_id in worker_ids:
            self._failures.pop(worker_id, None)
            self._until_s.pop(worker_id, None)

    def wait_s(self, worker_ids: Iterable[str], now_s: float) -> float:
        """Remaining seconds until the back-off of all these workers has ended; 0 if it has."""
        waits_s = [self._until_s.get(worker_id, 0.0) - now_s for worker_id in worker_ids]
        return max(0.0, *waits_s) if waits_s else 0.0
