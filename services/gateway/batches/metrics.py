"""Prometheus metrics of batches."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.core.batches.vocabulary import ENDED, BatchState

OPEN_STATES = tuple(state for state in BatchState if state not in ENDED)
LINE_STATES = ("open", "queued", "placed")
OUTCOMES = ("done", "failed", "returned")
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


class BatchMetrics:
    """Metrics of the batches that this gateway leads, and of its database calls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        batches = Gauge(
            "tideserve_gateway_batches",
            "Batches that have not ended, by state; 0 unless this gateway leads the batches.",
            ["state"],
            registry=registry,
        )
        self._batches = {state: batches.labels(state.value) for state in OPEN_STATES}
        lines = Gauge(
            "tideserve_gateway_batch_lines",
            "Lines of batches in progress, by state: open (not ended), queued (at the scheduler),"
            " placed (at a worker).",
            ["state"],
            registry=registry,
        )
        self._lines = {state: lines.labels(state) for state in LINE_STATES}
        outcomes = Counter(
            "tideserve_gateway_batch_lines_ended",
            "Runs of lines by outcome: done, failed, returned (to run again).",
            ["outcome"],
            registry=registry,
        )
        self._outcomes = {outcome: outcomes.labels(outcome) for outcome in OUTCOMES}
        self._store_seconds = Histogram(
            "tideserve_gateway_batch_store_seconds",
            "Duration of transactions of the batch store.",
            ["call"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._store_errors = Counter(
            "tideserve_gateway_batch_store_errors",
            "Transactions of the batch store that failed.",
            registry=registry,
        )

    def observe_call(self, name: str, seconds: float, failed: bool) -> None:
        """Observe a transaction of the store; any thread may call it."""
        self._store_seconds.labels(name).observe(seconds)
        if failed:
            self._store_errors.inc()

    def count_line(self, outcome: str) -> None:
        """Count a run of a line that ended."""
        self._outcomes[outcome].inc()

    def set_states(self, batches: Mapping[BatchState, int], lines: Mapping[str, int]) -> None:
        """Set the numbers of batches and lines; missing states have none."""
        for state, gauge in self._batches.items():
            gauge.set(batches.get(state, 0))
        for name, gauge in self._lines.items():
            gauge.set(lines.get(name, 0))
