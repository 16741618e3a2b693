"""What became of the simulated requests, in the figures that `tideserve bench` has."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum
from typing import Any

from services.core.report import ClassTokens
from services.core.service import NO_PROMISE, Service, ServiceClass
from tideserve.sim.pipeline import ChangeLog, ChangeRecord
from tideserve.sim.token_times import (
    NOTHING_KEPT,
    Gaps,
    Kept,
    TokenGroups,
    attainment,
    goodput,
    percentiles_of,
    together,
)

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
    service: Service = NO_PROMISE
    groups: TokenGroups | None = None
    """Its groups of tokens, if a time per token was promised and there was batch work."""

    @property
    def service_class(self) -> ServiceClass:
        """The class that was promised."""
        return self.service.service_class

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
    were looked up in prefix caches, `prefix_hits` were there. `tokens` and `gaps` are known where
    batch work is served beside online work: what had been computed at the begin and at the end of
    the window, and the gaps between tokens by class.
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
    tokens: list[tuple[float, ClassTokens]] = field(default_factory=list)
    gaps: dict[ServiceClass, Gaps] = field(default_factory=dict)
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
    found |= class_figures([outcomes])
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
    found |= _latency_figures(completed)
    seconds = sum(_duration_s(one.records) for one in rounds)
    tokens = sum(record.output_tokens for record in completed)
    found["throughput_tokens_per_s"] = tokens / seconds if seconds > 0 else None
    return found


def class_figures(rounds: Sequence[Outcomes]) -> dict[str, Any]:
    """What was computed in the windows of all `rounds`, and latencies, by class.

    Empty where no backlog had a part. `online`: all classes but `batch`, and of their requests
    those that were sent in a window. One of them without a token counts in `ttft_s` with the time
    that it has waited, and has kept none of its targets. Batch requests that ended in a window make
    the throughput of `batch`.
    """
    known = [one for one in rounds if len(one.tokens) == 2]
    if not known:
        return {}
    seconds = sum(end_s - begin_s for begin_s, end_s in map(_window_s, known))
    made = sum_of([_less(one.tokens[1][1], one.tokens[0][1]) for one in known])
    online = made.online_processed_tokens_total, made.online_recomputed_tokens_total
    batch = made.batch_processed_tokens_total, made.batch_recomputed_tokens_total
    both = online[0] + batch[0], online[1] + batch[1]
    return {
        **_token_figures(both, seconds),
        "window_s": seconds,
        "classes": {
            "online": _figures_of_class(known, batch=False)
            | _token_figures(online, seconds)
            | _kept_figures(known, seconds),
            "batch": _figures_of_class(known, batch=True)
            | _token_figures(batch, seconds)
            | {"throughput_requests_per_s": _share(_batch_ended(known), seconds)},
        },
    }


def kept_of(record: Record, now_s: float) -> Kept:
    """What an online request was given of its promises.

    One that runs at the end, `now_s`, counts by what it had got and by how long nothing had come
    since.
    """
    service = record.service
    if math.isnan(record.first_s) or record.outcome is Outcome.REJECTED:
        return Kept(
            None if service.ttft_s is None else NOTHING_KEPT.ttft,
            None if service.tpot_s is None else NOTHING_KEPT.tpot,
            None if service.tpot_s is None else NOTHING_KEPT.token_group,
        )
    first = None if service.ttft_s is None else record.ttft_s <= service.ttft_s
    groups, tpot_s = record.groups, record.tpot_s or 0.0
    if service.tpot_s is None or groups is None:
        return Kept(first, None, None)
    if record.outcome is Outcome.RUNNING:
        groups = replace(groups)
        groups.give_up(now_s)
        tpot_s = (now_s - record.first_s) / (groups.tokens + 1)
    return Kept(first, tpot_s <= service.tpot_s, groups.share)


def _kept_figures(rounds: Sequence[Outcomes], seconds: float) -> dict[str, Any]:
    """What online requests that were sent in the windows got of their promises."""
    kept = []
    for one in rounds:
        begin_s, end_s = _window_s(one)
        kept += [
            kept_of(record, one.simulated_s)
            for record in one.records
            if record.service.online and begin_s <= record.sent_s <= end_s
        ]
    return {"slo_attainment": attainment(kept)} | goodput(kept, seconds)


def _batch_ended(rounds: Sequence[Outcomes]) -> int:
    """Batch requests that were completed in the windows."""
    ended = 0
    for one in rounds:
        begin_s, end_s = _window_s(one)
        ended += sum(
            record.outcome is Outcome.COMPLETED and begin_s <= record.end_s <= end_s
            for record in one.records
            if not record.service.online
        )
    return ended


def _figures_of_class(rounds: Sequence[Outcomes], *, batch: bool) -> dict[str, Any]:
    records: list[Record] = []
    waited_s: list[float] = []
    for one in rounds:
        begin_s, end_s = (-math.inf, math.inf) if batch else _window_s(one)
        own = [
            record
            for record in one.records
            if (record.service_class is ServiceClass.BATCH) == batch
            and begin_s <= record.sent_s <= end_s
        ]
        records += own
        waited_s += [one.simulated_s - r.sent_s for r in own if math.isnan(r.ttft_s) and not batch]
        waited_s += [record.ttft_s for record in own if not math.isnan(record.ttft_s)]
    gaps = [
        part
        for one in rounds
        for name, part in one.gaps.items()
        if (name is ServiceClass.BATCH) == batch
    ]
    completed = [one for one in records if one.outcome is Outcome.COMPLETED]
    found = {"sent": len(records), "completed": len(completed)} | _latency_figures(completed)
    found["ttft_s"] = _distribution(waited_s)
    normalized_s = [record.normalized_s for record in completed]
    found["normalized_latency_s"]["mean"] = _share(sum(normalized_s), len(normalized_s))
    return found | {"inter_token_s": percentiles_of(together(gaps), PERCENTILES)}


def _token_figures(tokens: tuple[int, int], seconds: float) -> dict[str, float | None]:
    """`tokens`: how many were processed, and how many recomputed."""
    return {
        "processed_tokens_per_s": _share(tokens[0], seconds),
        "recomputed_share": _share(tokens[1], sum(tokens)),
    }


def sum_of(counts: Iterable[ClassTokens]) -> ClassTokens:
    """The tokens of several workers."""
    return ClassTokens(*(sum(column) for column in zip(*map(astuple, counts), strict=True)))


def _less(whole: ClassTokens, part: ClassTokens) -> ClassTokens:
    pairs = zip(astuple(whole), astuple(part), strict=True)
    return ClassTokens(*(one - other for one, other in pairs))


def _window_s(outcomes: Outcomes) -> tuple[float, float]:
    (begin_s, _), (end_s, _) = outcomes.tokens
    return begin_s, end_s


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _latency_figures(completed: Sequence[Record]) -> dict[str, Any]:
    return {
        name: _distribution([v for record in completed if (v := measure(record)) is not None])
        for name, measure in LATENCIES.items()
    }


def _distribution(values: Sequence[float]) -> dict[str, float | None]:
    found = {name: percentile(values, share) for name, share in PERCENTILES.items()}
    return found | {"max": max(values, default=None)}


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
