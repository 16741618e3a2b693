"""What became of the simulated requests, in the figures that `tideserve bench` has."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tideserve.sim.change_log import ChangeLog, ChangeRecord

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}


class Outcome(StrEnum):
    """How a request ended."""

    RUNNING = "running"
    COMPLETED = "completed"
    REJECTED = "rejected"


@dataclass(slots=True)
class Record:
    """One request as its client sees it; times in seconds of the simulation.

    `worker_id` leads the group where it went last.
    """

    sent_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float = math.nan
    end_s: float = math.nan
    outcome: Outcome = Outcome.RUNNING
    reason: str = ""
    worker_id: str = ""

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending to the last token."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)

    @property
    def normalized_s(self) -> float:
        """End-to-end latency per output token."""
        return self.e2e_s / self.output_tokens


LATENCIES: Mapping[str, Callable[[Record], float | None]] = {
    "ttft_s": lambda record: record.ttft_s,
    "tpot_s": lambda record: record.tpot_s,
    "e2e_s": lambda record: record.e2e_s,
    "normalized_latency_s": lambda record: record.normalized_s,
}


@dataclass(frozen=True, slots=True)
class KvSample:
    """The cluster's KV blocks at one moment; `wanted` is what waits, in workers or the queue.

    `capacity` counts what the groups hold now.
    """

    time_s: float
    used: int
    wanted: int
    running: int
    queued: int
    capacity: int


@dataclass(slots=True)
class Outcomes:
    """Everything that a simulation leaves behind. Counts are totals of the cluster.

    `kv_blocks` is the capacity with all parameters in place. Of `prefix_queries` prompt tokens that
    were looked up in prefix caches, `prefix_hits` were there.
    """

    kv_blocks: int
    records: list[Record] = field(default_factory=list)
    samples: list[KvSample] = field(default_factory=list)
    changes: ChangeLog = field(default_factory=ChangeLog)
    preemptions: int = 0
    returns: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    iterations: int = 0
    iterations_fast_forwarded: int = 0
    events: int = 0
    simulated_s: float = 0.0


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear interpolation between the two nearest ranks; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def figures(outcomes: Outcomes) -> dict[str, Any]:
    """The figures of one simulated system, ready for JSON."""
    found = pooled_figures([outcomes])
    found |= _kv_figures(outcomes)
    found["changes"] = _change_figures(outcomes.changes)
    found["iterations"] = outcomes.iterations
    found["iterations_fast_forwarded"] = outcomes.iterations_fast_forwarded
    found["events"] = outcomes.events
    found["simulated_s"] = outcomes.simulated_s
    return found


def pooled_figures(rounds: Sequence[Outcomes]) -> dict[str, Any]:
    """What became of the requests of all `rounds`, each with a clock of its own."""
    records = [record for one in rounds for record in one.records]
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    rejected = [record for record in records if record.outcome is Outcome.REJECTED]
    found: dict[str, Any] = {
        "sent": len(records),
        "completed": len(completed),
        "rejected": len(rejected),
        "failed": 0,
        "unfinished": len(records) - len(completed) - len(rejected),
        "preemptions": sum(one.preemptions for one in rounds),
        "prefix_queries": sum(one.prefix_queries for one in rounds),
        "prefix_hits": sum(one.prefix_hits for one in rounds),
    }
    for name, measure in LATENCIES.items():
        values = [value for record in completed if (value := measure(record)) is not None]
        found[name] = {key: percentile(values, share) for key, share in PERCENTILES.items()}
        found[name]["max"] = max(values, default=None)
    seconds = sum(_duration_s(one.records) for one in rounds)
    tokens = sum(record.output_tokens for record in completed)
    found["throughput_tokens_per_s"] = tokens / seconds if seconds > 0 else None
    return found


def _duration_s(records: Sequence[Record]) -> float:
    """From the first sending to the last end."""
    ends_s = [record.end_s for record in records if not math.isnan(record.end_s)]
    return max(ends_s) - min(record.sent_s for record in records) if ends_s else 0.0


def _kv_figures(outcomes: Outcomes) -> dict[str, Any]:
    samples, total = outcomes.samples, outcomes.kv_blocks
    shares = [sample.used / total for sample in samples]
    demands = [(sample.used + sample.wanted) / total for sample in samples]
    return {
        "kv_usage_mean": sum(shares) / len(shares) if shares else None,
        "kv_usage_peak": max(shares, default=None),
        "kv_demand_peak_ratio": max(demands, default=None),
        "kv_over_time": [
            {
                "time_s": sample.time_s,
                "used_share": share,
                "demand_share": demand,
                "capacity_share": sample.capacity / total,
                "running": sample.running,
                "queued": sample.queued,
            }
            for sample, share, demand in zip(samples, shares, demands, strict=True)
        ],
    }


def _change_figures(log: ChangeLog) -> dict[str, Any]:
    """What merged and split, and what that took."""
    merges = [one for one in log.changes if one.is_merge]
    splits = [one for one in log.changes if not one.is_merge]
    freed_bytes = peak_bytes = 0
    for one in log.changes:
        freed_bytes += one.freed_bytes
        peak_bytes = max(peak_bytes, freed_bytes)
    return {
        "merges": len(merges),
        "splits": len(splits),
        "failed": dict(log.failed),
        "decisions": len(log.decisions),
        "freed_bytes": sum(one.freed_bytes for one in merges),
        "freed_bytes_peak": peak_bytes,
        "moved_bytes": sum(one.moved_bytes for one in log.changes),
        "merge_s": _durations(merges, lambda one: one.committed_s - one.decided_s),
        "restore_s": _durations(splits, lambda one: one.committed_s - one.decided_s),
        "exchange_s": _durations(
            log.changes,
            lambda one: None if one.settled_s is None else one.settled_s - one.committed_s,
        ),
        "bubble_share": 1 - log.busy_s / log.present_s if log.present_s else None,
        "over_time": [
            {
                "committed_s": one.committed_s,
                "settled_s": one.settled_s,
                "workers": list(one.workers),
                "kind": "merge" if one.is_merge else "split",
                "freed_bytes": one.freed_bytes,
                "moved_bytes": one.moved_bytes,
            }
            for one in log.changes
        ],
    }


def _durations(
    records: Sequence[ChangeRecord], measure: Callable[[ChangeRecord], float | None]
) -> dict[str, float | None]:
    """Mean and maximum of what has ended."""
    values = [value for record in records if (value := measure(record)) is not None]
    mean = sum(values) / len(values) if values else None
    return {"mean": mean, "max": max(values, default=None)}
