"""Figures of merges, splits and moves of requests in a simulation."""

from collections.abc import Callable, Sequence
from typing import Any

from tideserve.sim.pipeline import ChangeLog, ChangeRecord


def change_figures(log: ChangeLog) -> dict[str, Any]:
    """Compute counts, durations and bytes of merges and splits."""
    merges = [change for change in log.changes if change.is_merge]
    splits = [change for change in log.changes if not change.is_merge]
    freed_bytes = peak_bytes = 0
    for change in log.changes:
        freed_bytes += change.freed_bytes
        peak_bytes = max(peak_bytes, freed_bytes)
    return {
        "merges": len(merges),
        "splits": len(splits),
        "failed": dict(log.failed),
        "decisions": len(log.decisions),
        "moved_requests": log.shipped,
        "moved_request_bytes": log.shipped_bytes,
        "moves_of_none": log.shipped_none,
        "freed_bytes": sum(change.freed_bytes for change in merges),
        "freed_bytes_peak": peak_bytes,
        "moved_bytes": sum(change.moved_bytes for change in log.changes),
        "merge_s": _durations(merges, lambda change: change.committed_s - change.decided_s),
        "restore_s": _durations(splits, lambda change: change.committed_s - change.decided_s),
        "exchange_s": _durations(
            log.changes,
            lambda change: (
                None if change.settled_s is None else change.settled_s - change.committed_s
            ),
        ),
        "bubble_share": 1 - log.busy_s / log.present_s if log.present_s else None,
        "over_time": [
            {
                "committed_s": change.committed_s,
                "settled_s": change.settled_s,
                "workers": list(change.workers),
                "kind": "merge" if change.is_merge else "split",
                "freed_bytes": change.freed_bytes,
                "moved_bytes": change.moved_bytes,
            }
            for change in log.changes
        ],
    }


def _durations(
    records: Sequence[ChangeRecord], measure: Callable[[ChangeRecord], float | None]
) -> dict[str, float | None]:
    """Return mean and maximum of a duration over the changes for which `measure` has one."""
    values = [value for record in records if (value := measure(record)) is not None]
    mean = sum(values) / len(values) if values else None
    return {"mean": mean, "max": max(values, default=None)}
