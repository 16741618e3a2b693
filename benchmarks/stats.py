"""Figures from records. Pure: no clock, no I/O."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.kv_demand import peak_ratio
from tideserve.load.record import RequestOutcome, Round, SentRequest, duration_s
from tideserve.sim.report import PERCENTILES, percentile

LATENCIES: Mapping[str, Callable[[SentRequest], float | None]] = {
    "ttft_s": lambda record: record.ttft_s,
    "tpot_s": lambda record: record.tpot_s,
    "e2e_s": lambda record: record.e2e_s,
    "normalized_latency_s": lambda record: record.normalized_s,
}
REPORT_S = 1.0
"""Seconds after which workers report their counters at the latest."""
PHASES = ("prefill", "decode")
RATIO_METRICS = ("ttft_s", "tpot_s", "e2e_s", "normalized_latency_s")
COMPARED_FROM = {"p99.9": 1000}
"""Requests from which a percentile is compared: of fewer it is the maximum, which is chance."""

Figures = dict[str, Any]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """A service level: a latency at most `limit` seconds, or `limit` × the best system's P50."""

    metric: str
    limit: float
    relative: bool = False

    def __str__(self) -> str:
        unit = "× best p50" if self.relative else " s"
        return f"{self.metric.removesuffix('_s')} ≤ {self.limit:g}{unit}"


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """All of `PERCENTILES`."""
    return {name: percentile(values, share) for name, share in PERCENTILES.items()}


def distribution(values: Sequence[float]) -> dict[str, float | None]:
    """All of `PERCENTILES`, and `max`: the slowest one."""
    return percentiles(values) | {"max": max(values, default=None)}


def latencies(records: Iterable[SentRequest], metric: str) -> list[float]:
    """One latency of every completed request that has it."""
    measure = LATENCIES[metric]
    values = [
        measure(r) for r in records if r.outcome is RequestOutcome.COMPLETED and r.token_times_s
    ]
    return [value for value in values if value is not None]


def throughput(rounds: Sequence[Sequence[SentRequest]]) -> float | None:
    """Output tokens of completed requests per second of measured rounds."""
    seconds = sum(duration_s(records) for records in rounds)
    tokens = sum(
        r.output_tokens for rs in rounds for r in rs if r.outcome is RequestOutcome.COMPLETED
    )
    return tokens / seconds if seconds > 0 else None


def attainment(
    records: Sequence[SentRequest], target: LatencyTarget, best_p50_s: float | None
) -> float | None:
    """Share of all sent requests that met the target: refused and failed ones did not."""
    if not records or (target.relative and best_p50_s is None):
        return None
    limit_s = target.limit * best_p50_s if target.relative and best_p50_s else target.limit
    # A request of one token has no time per further token to miss.
    measure = LATENCIES[target.metric]
    completed = [r for r in records if r.outcome is RequestOutcome.COMPLETED and r.token_times_s]
    return sum((measure(r) or 0.0) <= limit_s for r in completed) / len(records)


def figures(
    rounds: Sequence[Round],
    targets: Sequence[LatencyTarget],
    best_p50_s: Mapping[str, float | None],
) -> Figures:
    """One system's figures, pooled over its rounds, with the spread between them."""
    found = _core([list(one.records) for one in rounds], targets, best_p50_s)
    found["preemptions"] = _sum([one.preemptions for one in rounds])
    found["busy_s"] = _sum([one.busy_s for one in rounds])
    found["bubble_s"] = _sum([one.bubble_s for one in rounds])
    found["cost_scale"] = {phase: cost_scale(rounds, phase) for phase in PHASES}
    found["bubble_share"] = bubble_share(rounds)
    found["bubble_share_arriving"] = bubble_share_arriving(rounds)
    ratios = [peak_ratio(one.records, one.capacity_tokens) for one in rounds if one.capacity_tokens]
    # The mildest round counts: an overload is claimed only where every round had it.
    found["kv_demand_peak_ratio"] = min(ratios) if ratios else None
    classes = sorted({record.slo_class for one in rounds for record in one.records})
    found["classes"] = {
        name: _core(
            [[r for r in one.records if r.slo_class == name] for one in rounds],
            targets,
            best_p50_s,
        )
        for name in classes
    }
    found["rounds"] = [
        _round_figures(list(one.records))
        | {
            "bubble_share": bubble_share([one]),
            "bubble_share_arriving": bubble_share_arriving([one]),
        }
        for one in rounds
    ]
    found["spread"] = _spread(found["rounds"])
    return found


def cost_scale(rounds: Sequence[Round], phase: str) -> float | None:
    """Measured over predicted time of the iterations of a phase; None if that is unknown."""
    measured_s = sum(getattr(one, f"{phase}_s") or 0.0 for one in rounds)
    predicted_s = sum(getattr(one, f"{phase}_predicted_s") or 0.0 for one in rounds)
    return measured_s / predicted_s if measured_s and predicted_s else None


def bubble_share(rounds: Sequence[Round]) -> float | None:
    """Bubbles' share of the stages' time in pipelines; None where there was no pipeline."""
    known = [(one.busy_s, one.bubble_s) for one in rounds if one.busy_s is not None]
    busy_s = sum(busy_s for busy_s, _ in known)
    bubble_s = sum(bubble_s or 0.0 for _, bubble_s in known)
    return bubble_s / (busy_s + bubble_s) if busy_s else None


def bubble_share_arriving(rounds: Sequence[Round]) -> float | None:
    """The same while requests arrive: the last answers cannot fill a pipeline, however they are
    planned.

    None where there was no pipeline then, or nothing was sampled.
    """
    busy_s = bubble_s = 0.0
    for one in rounds:
        if not one.records:
            continue
        begin_s, end_s = min(r.due_s for r in one.records), max(r.due_s for r in one.records)
        within = [s for s in one.pipeline_samples if begin_s <= s[0] <= end_s + REPORT_S]
        if within:
            busy_s += within[-1][1] - within[0][1]
            bubble_s += within[-1][2] - within[0][2]
    return bubble_s / (busy_s + bubble_s) if busy_s > 0 else None


def ratios(systems: Mapping[str, Figures]) -> dict[str, dict[str, float]]:
    """Every system against every other: `a/b` above 1 means that a's value is larger.

    Without percentiles that too few requests make (`COMPARED_FROM`).
    """
    found = {}
    for name, one in systems.items():
        for other_name, other in systems.items():
            if name != other_name:
                found[f"{name}/{other_name}"] = _ratio(one, other)
    return found


def best_p50_s(systems: Mapping[str, Sequence[Round]]) -> dict[str, float | None]:
    """The smallest median of each latency over the systems."""
    best: dict[str, float | None] = {}
    for metric in LATENCIES:
        medians = [
            percentile([v for one in rounds for v in latencies(one.records, metric)], 0.5)
            for rounds in systems.values()
        ]
        best[metric] = min((m for m in medians if m is not None), default=None)
    return best


def _core(
    rounds: Sequence[Sequence[SentRequest]],
    targets: Sequence[LatencyTarget],
    best: Mapping[str, float | None],
) -> Figures:
    records = [record for one in rounds for record in one]
    count = {outcome: sum(r.outcome is outcome for r in records) for outcome in RequestOutcome}
    gaps = [g for r in records if r.outcome is RequestOutcome.COMPLETED for g in r.inter_token_s]
    return {
        "sent": len(records),
        "completed": count[RequestOutcome.COMPLETED],
        "rejected": count[RequestOutcome.REJECTED],
        "failed": count[RequestOutcome.FAILED],
        "late_sends": sum(record.late for record in records),
        "short_answers": sum(record.short for record in records),
        **{metric: distribution(latencies(records, metric)) for metric in LATENCIES},
        "inter_token_s": percentiles(gaps),
        "throughput_tokens_per_s": throughput(rounds),
        "slo_attainment": {str(t): attainment(records, t, best.get(t.metric)) for t in targets},
    }


def _round_figures(records: Sequence[SentRequest]) -> Figures:
    ttft, tpot = latencies(records, "ttft_s"), latencies(records, "tpot_s")
    return {
        "requests": len(records),
        "duration_s": duration_s(records),
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p95_s": percentile(ttft, 0.95),
        "ttft_p99_s": percentile(ttft, 0.99),
        "ttft_max_s": max(ttft, default=None),
        "tpot_p50_s": percentile(tpot, 0.5),
        "tpot_p95_s": percentile(tpot, 0.95),
        "throughput_tokens_per_s": throughput([records]),
    }


def _spread(rounds: Sequence[Figures]) -> dict[str, float | None]:
    """(largest − smallest) / median over the rounds."""
    found: dict[str, float | None] = {}
    for name in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "throughput_tokens_per_s"):
        values = [one[name] for one in rounds if one[name] is not None]
        middle = percentile(values, 0.5)
        found[name] = (max(values) - min(values)) / middle if middle else None
    return found


def _ratio(one: Figures, other: Figures) -> dict[str, float]:
    found = {}
    requests = min(one["completed"], other["completed"])
    compared = [name for name in PERCENTILES if requests >= COMPARED_FROM.get(name, 0)]
    for metric in RATIO_METRICS:
        for name in compared:
            if one[metric][name] is not None and other[metric][name]:
                found[f"{metric}.{name}"] = one[metric][name] / other[metric][name]
    key = "throughput_tokens_per_s"
    if one[key] is not None and other[key]:
        found[key] = one[key] / other[key]
    # A stall of the machine sets the pooled P99 of a hundred requests, but is in one round only.
    middle, other_middle = (_middle_round(figures, "ttft_p99_s") for figures in (one, other))
    if middle is not None and other_middle:
        found["ttft_s.p99.median_round"] = middle / other_middle
    return found


def _middle_round(system: Figures, key: str) -> float | None:
    return percentile([one[key] for one in system["rounds"] if one[key] is not None], 0.5)


def _sum(values: Sequence[Number | None]) -> Number | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
