"""Exponential back-off for workers after attempts that were aborted."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """The back-off of a worker doubles with every abort in a row; one entry per worker."""

    _failures: dict[str, int] = field(default_factory=dict)
    _until_s: dict[str, float] = field(default_factory=dict)

    def failed(
        self, worker_ids: Iterable[str], now_s: float, first_s: float, longest_s: float
    ) -> None:
        """An attempt with these workers was aborted."""
        for worker_id in worker_ids:
            failures = self._failures.get(worker_id, 0) + 1
            self._failures[worker_id] = failures
            # The exponent is bounded, as a float is.
            wait_s = min(longest_s, first_s * 2 ** min(failures - 1, 30))
            self._until_s[worker_id] = now_s + wait_s

    def succeeded(self, worker_ids: Iterable[str]) -> None:
        """An attempt with these workers was committed."""
        for worker_id in worker_ids:
            self._failures.pop(worker_id, None)
            self._until_s.pop(worker_id, None)

    def wait_s(self, worker_ids: Iterable[str], now_s: float) -> float:
        """Seconds until none of these workers is in back-off; 0 if none is now."""
        waits_s = [self._until_s.get(worker_id, 0.0) - now_s for worker_id in worker_ids]
        return max(0.0, *waits_s) if waits_s else 0.0
