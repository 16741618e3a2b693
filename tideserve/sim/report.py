"""Outcomes of a simulation, and the figures computed from them, named as by `tideserve bench`."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum
from typing import Any

from services.core.report import ClassTokens
from services.core.service import DEFAULT_SERVICE, Service, ServiceClass
from tideserve.sim.change_figures import change_figures
from tideserve.sim.pipeline import ChangeLog
from tideserve.sim.token_times import (
    NO_TARGETS_MET,
    Gaps,
    TargetsMet,
    TokenGroups,
    attainment,
    goodput,
    merge_gaps,
    percentiles_of,
)

WINDOW_S = 10.0
"""Width of the windows of figures over time."""
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}


class Outcome(StrEnum):
    """How a request ended."""

    RUNNING = "running"
    COMPLETED = "completed"
    REJECTED = "rejected"


@dataclass(slots=True)
class Record:
    """A request as its client sees it; times are in seconds of the simulation.

    `worker_id` is the leader of the last group that the request was assigned to.
    """

    sent_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float = math.nan
    end_s: float = math.nan
    outcome: Outcome = Outcome.RUNNING
    reason: str = ""
    worker_id: str = ""
    service: Service = DEFAULT_SERVICE
    groups: TokenGroups | None = None
    """Groups of tokens with a deadline: only with a TPOT target, beside batch work."""

    @property
    def service_class(self) -> ServiceClass:
        """Service class of the request."""
        return self.service.service_class

    @property
    def ttft_s(self) -> float:
        """Time from sending to the first token."""
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time from sending to the last token."""
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
    """The cluster's KV blocks at `time_s`.

    `wanted`: blocks that requests wait for, at workers or in the queue; `capacity`: blocks of the
    current groups; `processed`: tokens that were computed for the first time, since the start.
    """

    time_s: float
    used: int
    wanted: int
    running: int
    queued: int
    capacity: int
    processed: int


@dataclass(slots=True)
class Outcomes:
    """Raw results of a simulation. Counts are totals of the cluster.

    `kv_blocks` is the capacity without dropped layers. `prefix_queries` counts prompt tokens that
    were looked up in prefix caches, `prefix_hits` those that were cached. Only simulations of batch
    work beside online work have `tokens`, the processed tokens at the begin and the end of the
    window, and `gaps`, the times between tokens by class; `second_gaps`: those before the second
    token of online requests.
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
    second_gaps: Gaps = field(default_factory=Gaps)
    events: int = 0
    simulated_s: float = 0.0


def percentile(values: Sequence[float], share: float) -> float | None:
    """Percentile by linear interpolation between the two nearest ranks; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def figures(outcomes: Outcomes) -> dict[str, Any]:
    """Compute the figures of a simulation, ready for JSON."""
    report = pooled_figures([outcomes])
    report |= class_figures([outcomes])
    report |= _kv_figures(outcomes)
    report["over_time"] = _windows(outcomes)
    report["changes"] = change_figures(outcomes.changes)
    report["iterations"] = outcomes.iterations
    report["iterations_fast_forwarded"] = outcomes.iterations_fast_forwarded
    report["events"] = outcomes.events
    report["simulated_s"] = outcomes.simulated_s
    return report


def pooled_figures(rounds: Sequence[Outcomes]) -> dict[str, Any]:
    """Compute the figures of the requests of all `rounds`, which have separate clocks."""
    records = [record for outcomes in rounds for record in outcomes.records]
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    rejected = [record for record in records if record.outcome is Outcome.REJECTED]
    report: dict[str, Any] = {
        "sent": len(records),
        "completed": len(completed),
        "rejected": len(rejected),
        "failed": 0,
        "unfinished": len(records) - len(completed) - len(rejected),
        "preemptions": sum(outcomes.preemptions for outcomes in rounds),
        "prefix_queries": sum(outcomes.prefix_queries for outcomes in rounds),
        "prefix_hits": sum(outcomes.prefix_hits for outcomes in rounds),
    }
    report |= _latency_figures(completed)
    seconds = sum(_duration_s(outcomes.records) for outcomes in rounds)
    tokens = sum(record.output_tokens for record in completed)
    report["throughput_tokens_per_s"] = tokens / seconds if seconds > 0 else None
    return report


def class_figures(rounds: Sequence[Outcomes]) -> dict[str, Any]:
    """Compute throughput in the windows of all `rounds`, and latencies, by class.

    Empty without a backlog of batch work. `online`: the requests of all classes but `batch` that
    were sent in a window. An online request without a token counts in `ttft_s` with the time that
    it has waited, and has met none of its targets. The throughput of `batch` counts the requests
    that ended in a window.
    """
    # Only simulations with a backlog count tokens at both ends of the window.
    known = [outcomes for outcomes in rounds if len(outcomes.tokens) == 2]
    if not known:
        return {}
    seconds = sum(end_s - begin_s for begin_s, end_s in map(_window_s, known))
    counts = sum_of([_difference(part.tokens[1][1], part.tokens[0][1]) for part in known])
    online = counts.online_processed_tokens_total, counts.online_recomputed_tokens_total
    batch = counts.batch_processed_tokens_total, counts.batch_recomputed_tokens_total
    both = online[0] + batch[0], online[1] + batch[1]
    return {
        **_token_figures(both, seconds),
        "window_s": seconds,
        "classes": {
            "online": _figures_of_class(known, batch=False)
            | _token_figures(online, seconds)
            | _target_figures(known, seconds)
            | {"second_token_s": _second_token_s(known)},
            "batch": _figures_of_class(known, batch=True)
            | _token_figures(batch, seconds)
            | {"throughput_requests_per_s": _share(_batch_ended(known), seconds)},
        },
    }


def _second_token_s(rounds: Sequence[Outcomes]) -> dict[str, float | None]:
    """Percentiles of the gap between the first and the second token of online requests."""
    return percentiles_of(merge_gaps(part.second_gaps for part in rounds), PERCENTILES)


def targets_met(record: Record, now_s: float) -> TargetsMet:
    """Return which targets an online request met.

    A request that still runs at the end, `now_s`, is judged by its tokens so far and by the time
    since the last of them.
    """
    service = record.service
    if math.isnan(record.first_s) or record.outcome is Outcome.REJECTED:
        return TargetsMet(
            None if service.ttft_s is None else NO_TARGETS_MET.ttft,
            None if service.tpot_s is None else NO_TARGETS_MET.tpot,
            None if service.tpot_s is None else NO_TARGETS_MET.token_group,
        )
    first = None if service.ttft_s is None else record.ttft_s <= service.ttft_s
    groups, tpot_s = record.groups, record.tpot_s or 0.0
    if service.tpot_s is None or groups is None:
        return TargetsMet(first, None, None)
    if record.outcome is Outcome.RUNNING:
        groups = replace(groups)
        groups.give_up(now_s)
        tpot_s = (now_s - record.first_s) / (groups.tokens + 1)
    return TargetsMet(first, tpot_s <= service.tpot_s, groups.share)


def _target_figures(rounds: Sequence[Outcomes], seconds: float) -> dict[str, Any]:
    """Compute attainment and goodput of the online requests that were sent in the windows."""
    kept = []
    for outcomes in rounds:
        begin_s, end_s = _window_s(outcomes)
        kept += [
            targets_met(record, outcomes.simulated_s)
            for record in outcomes.records
            if record.service.online and begin_s <= record.sent_s <= end_s
        ]
    return {"slo_attainment": attainment(kept)} | goodput(kept, seconds)


def _batch_ended(rounds: Sequence[Outcomes]) -> int:
    """Count the batch requests that were completed in the windows."""
    ended = 0
    for outcomes in rounds:
        begin_s, end_s = _window_s(outcomes)
        ended += sum(
            record.outcome is Outcome.COMPLETED and begin_s <= record.end_s <= end_s
            for record in outcomes.records
            if not record.service.online
        )
    return ended


def _figures_of_class(rounds: Sequence[Outcomes], *, batch: bool) -> dict[str, Any]:
    records: list[Record] = []
    waited_s: list[float] = []
    for outcomes in rounds:
        # Latencies of batch work include all its requests, whenever they were sent.
        begin_s, end_s = (-math.inf, math.inf) if batch else _window_s(outcomes)
        own = [
            record
            for record in outcomes.records
            if (record.service_class is ServiceClass.BATCH) == batch
            and begin_s <= record.sent_s <= end_s
        ]
        records += own
        # Leaving out requests without a first token would hide overload.
        waited_s += [
            outcomes.simulated_s - r.sent_s for r in own if math.isnan(r.ttft_s) and not batch
        ]
        waited_s += [record.ttft_s for record in own if not math.isnan(record.ttft_s)]
    gaps = [
        part
        for outcomes in rounds
        for name, part in outcomes.gaps.items()
        if (name is ServiceClass.BATCH) == batch
    ]
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    report = {"sent": len(records), "completed": len(completed)} | _latency_figures(completed)
    report["ttft_s"] = _distribution(waited_s)
    return report | {"inter_token_s": percentiles_of(merge_gaps(gaps), PERCENTILES)}


def _token_figures(tokens: tuple[int, int], seconds: float) -> dict[str, float | None]:
    """`tokens`: numbers of processed and of recomputed tokens."""
    return {
        "processed_tokens_per_s": _share(tokens[0], seconds),
        "recomputed_share": _share(tokens[1], sum(tokens)),
    }


def sum_of(counts: Iterable[ClassTokens]) -> ClassTokens:
    """Sum the token counts of several workers."""
    return ClassTokens(*(sum(column) for column in zip(*map(astuple, counts), strict=True)))


def _difference(end: ClassTokens, begin: ClassTokens) -> ClassTokens:
    pairs = zip(astuple(end), astuple(begin), strict=True)
    return ClassTokens(*(later - earlier for later, earlier in pairs))


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
    percentiles = {name: percentile(values, share) for name, share in PERCENTILES.items()}
    mean = _share(sum(values), len(values))
    return {"mean": mean, **percentiles, "max": max(values, default=None)}


def _duration_s(records: Sequence[Record]) -> float:
    """Return the time from the first request's sending to the last end."""
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


def _windows(outcomes: Outcomes) -> list[dict[str, float | None]]:
    """Compute figures of each window: mean TTFT of the requests sent in it, tokens/s."""
    waits_s: dict[int, list[float]] = {}
    for record in outcomes.records:
        if record.outcome is Outcome.COMPLETED:
            waits_s.setdefault(int(record.sent_s // WINDOW_S), []).append(record.ttft_s)
    # The last sample of each window, which counts the tokens until then.
    last = {int(sample.time_s // WINDOW_S): sample for sample in outcomes.samples}
    if outcomes.samples:
        last[-1] = outcomes.samples[0]
    figures: list[dict[str, float | None]] = []
    for window, sample in sorted(last.items()):
        if (before := last.get(window - 1)) is None:
            continue
        own_s = waits_s.get(window, [])
        tokens, seconds = sample.processed - before.processed, sample.time_s - before.time_s
        figures.append(
            {
                "time_s": (window + 1) * WINDOW_S,
                "ttft_mean_s": _share(sum(own_s), len(own_s)),
                "processed_tokens_per_s": _share(tokens, seconds),
            }
        )
    return figures
