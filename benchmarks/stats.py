"""Figures computed from records. Pure: no clock, no I/O."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tideserve.load.record import RequestOutcome, Round, SentRequest, duration_s
from tideserve.sim.report import PERCENTILES, percentile

LATENCIES: Mapping[str, Callable[[SentRequest], float | None]] = {
    "ttft_s": lambda record: record.ttft_s,
    "tpot_s": lambda record: record.tpot_s,
    "e2e_s": lambda record: record.e2e_s,
    "normalized_latency_s": lambda record: record.normalized_s,
}
REPORT_S = 1.0
"""Maximum seconds between counter reports of a worker."""
PHASES = ("prefill", "decode")
COMPARED_FROM = {"p99.9": 1000}
"""Minimum number of requests to compare a percentile; with fewer it is merely the maximum."""

BLOCK_TOKENS = 16
Timeline = list[tuple[float, int]]
"""(time in seconds, tokens of KV)."""
Figures = dict[str, Any]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """A latency target: at most `limit` seconds, or `limit` × the best system's P50."""

    metric: str
    limit: float
    relative: bool = False

    def __str__(self) -> str:
        unit = "× best p50" if self.relative else " s"
        return f"{self.metric.removesuffix('_s')} ≤ {self.limit:g}{unit}"


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """The percentiles in `PERCENTILES`."""
    return {name: percentile(values, share) for name, share in PERCENTILES.items()}


def distribution(values: Sequence[float]) -> dict[str, float | None]:
    """The percentiles in `PERCENTILES`, the mean and the maximum."""
    mean = quotient(sum(values), len(values))
    return {"mean": mean, **percentiles(values), "max": max(values, default=None)}


def latencies(records: Iterable[SentRequest], metric: str) -> list[float]:
    """The latency `metric` of every completed request that has it."""
    measure = LATENCIES[metric]
    values = [
        measure(r) for r in records if r.outcome is RequestOutcome.COMPLETED and r.token_times_s
    ]
    return [value for value in values if value is not None]


def throughput(rounds: Sequence[Sequence[SentRequest]]) -> float | None:
    """Output tokens of completed requests per second of measured rounds."""
    done = [r for records in rounds for r in records if r.outcome is RequestOutcome.COMPLETED]
    seconds = sum(duration_s(records) for records in rounds)
    return quotient(sum(r.output_tokens for r in done), seconds)


def attainment(
    records: Sequence[SentRequest], target: LatencyTarget, best_p50_s: float | None
) -> float | None:
    """Share of all sent requests that met the target; refused and failed requests did not."""
    if not records or (target.relative and best_p50_s is None):
        return None
    limit_s = target.limit * best_p50_s if target.relative and best_p50_s else target.limit
    # A request with a single token has no TPOT, so it cannot miss it.
    measure = LATENCIES[target.metric]
    completed = [r for r in records if r.outcome is RequestOutcome.COMPLETED and r.token_times_s]
    return sum((measure(r) or 0.0) <= limit_s for r in completed) / len(records)


def figures(
    rounds: Sequence[Round],
    targets: Sequence[LatencyTarget],
    best_p50_s: Mapping[str, float | None],
) -> Figures:
    """A system's figures, pooled over its rounds, with the spread between rounds."""
    pooled = _core([list(round_.records) for round_ in rounds], targets, best_p50_s)
    pooled["preemptions"] = _sum([round_.preemptions for round_ in rounds])
    pooled["recomputed_tokens"] = _sum([round_.recomputed_tokens for round_ in rounds])
    pooled["busy_s"] = _sum([round_.busy_s for round_ in rounds])
    pooled["bubble_s"] = _sum([round_.bubble_s for round_ in rounds])
    pooled["cost_scale"] = {phase: cost_scale(rounds, phase) for phase in PHASES}
    pooled["bubble_share"] = bubble_share(rounds)
    pooled["bubble_share_arriving"] = bubble_share_arriving(rounds)
    ratios = [
        peak_ratio(round_.records, round_.capacity_tokens)
        for round_ in rounds
        if round_.capacity_tokens
    ]
    # Use the mildest round: only an overload in every round counts.
    pooled["kv_demand_peak_ratio"] = min(ratios) if ratios else None
    classes = sorted({record.slo_class for round_ in rounds for record in round_.records})
    pooled["classes"] = {
        name: _core(
            [[r for r in round_.records if r.slo_class == name] for round_ in rounds],
            targets,
            best_p50_s,
        )
        for name in classes
    }
    pooled["rounds"] = [
        _round_figures(list(round_.records))
        | {
            "bubble_share": bubble_share([round_]),
            "bubble_share_arriving": bubble_share_arriving([round_]),
        }
        for round_ in rounds
    ]
    pooled["spread"] = _spread(pooled["rounds"])
    return pooled


def cost_scale(rounds: Sequence[Round], phase: str) -> float | None:
    """Measured over predicted time of the iterations of a phase; None if unknown."""
    measured_s = sum(getattr(round_, f"{phase}_s") or 0.0 for round_ in rounds)
    predicted_s = sum(getattr(round_, f"{phase}_predicted_s") or 0.0 for round_ in rounds)
    return quotient(measured_s or None, predicted_s)


def bubble_share(rounds: Sequence[Round]) -> float | None:
    """Share of bubbles in the stages' time in pipelines; None without pipelines."""
    busy_s = sum(round_.busy_s or 0.0 for round_ in rounds)
    bubble_s = sum(round_.bubble_s or 0.0 for round_ in rounds if round_.busy_s is not None)
    return bubble_s / (busy_s + bubble_s) if busy_s else None


def bubble_share_arriving(rounds: Sequence[Round]) -> float | None:
    """The bubble share while requests arrive, since the last answers cannot fill a pipeline.

    None without pipelines or samples in that time.
    """
    busy_s = bubble_s = 0.0
    for round_ in rounds:
        due_s = [record.due_s for record in round_.records]
        within = [
            sample
            for sample in round_.pipeline_samples
            if due_s and min(due_s) <= sample[0] <= max(due_s) + REPORT_S
        ]
        if within:
            busy_s += within[-1][1] - within[0][1]
            bubble_s += within[-1][2] - within[0][2]
    return bubble_s / (busy_s + bubble_s) if busy_s > 0 else None


def ratios(systems: Mapping[str, Figures]) -> dict[str, dict[str, float]]:
    """Ratios of every system to every other: `a/b` above 1 means that a's value is larger.

    Percentiles over too few requests (`COMPARED_FROM`) are left out.
    """
    return {
        f"{name}/{other}": _ratios(systems[name], systems[other])
        for name in systems
        for other in systems
        if name != other
    }


def best_p50_s(systems: Mapping[str, Sequence[Round]]) -> dict[str, float | None]:
    """The smallest median over the systems, by latency."""
    best: dict[str, float | None] = {}
    for metric in LATENCIES:
        medians = [
            percentile([v for round_ in rounds for v in latencies(round_.records, metric)], 0.5)
            for rounds in systems.values()
        ]
        best[metric] = min((m for m in medians if m is not None), default=None)
    return best


def _core(
    rounds: Sequence[Sequence[SentRequest]],
    targets: Sequence[LatencyTarget],
    best: Mapping[str, float | None],
) -> Figures:
    records = [record for round_ in rounds for record in round_]
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
    spread: dict[str, float | None] = {}
    for name in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "throughput_tokens_per_s"):
        values = [round_[name] for round_ in rounds if round_[name] is not None]
        middle = percentile(values, 0.5)
        spread[name] = (max(values) - min(values)) / middle if middle else None
    return spread


def _ratios(own: Figures, other: Figures) -> dict[str, float]:
    requests = min(own["completed"], other["completed"])
    compared = [name for name in PERCENTILES if requests >= COMPARED_FROM.get(name, 0)]
    quotients = {
        f"{metric}.{name}": quotient(own[metric][name], other[metric][name])
        for metric in LATENCIES
        for name in compared
    }
    key = "throughput_tokens_per_s"
    quotients[key] = quotient(own[key], other[key])
    # A stall of the machine sets the pooled P99 of a hundred requests, but affects a single round.
    middle = (_middle_round(figures, "ttft_p99_s") for figures in (own, other))
    quotients["ttft_s.p99.median_round"] = quotient(*middle)
    return {key: ratio for key, ratio in quotients.items() if ratio is not None}


def _middle_round(system: Figures, key: str) -> float | None:
    return percentile([round_[key] for round_ in system["rounds"] if round_[key] is not None], 0.5)


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    """The ratio of two figures; None if either is unknown or the denominator is 0."""
    return numerator / denominator if numerator is not None and denominator else None


def _sum(values: Sequence[Number | None]) -> Number | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def timeline(records: Sequence[SentRequest], block_tokens: int = BLOCK_TOKENS) -> Timeline:
    """KV demand over time as seen by the client, an entry per change.

    A request without a token needs its prompt and a further block. A request with tokens needs its
    prompt and these tokens, whether it is running or preempted.
    """
    changes: list[tuple[float, int]] = []
    for record in records:
        changes += _changes(record, block_tokens)
    changes.sort()
    demand, points = 0, Timeline()
    for time_s, change in changes:
        demand += change
        if points and points[-1][0] == time_s:
            points[-1] = (time_s, demand)
        else:
            points.append((time_s, demand))
    return points


def peak_ratio(records: Sequence[SentRequest], capacity_tokens: int) -> float:
    """The peak demand as a multiple of the capacity."""
    peak = max((demand for _, demand in timeline(records)), default=0)
    return peak / capacity_tokens


def _changes(record: SentRequest, block_tokens: int) -> Timeline:
    if record.outcome is RequestOutcome.REJECTED:
        return []
    held = _blocks(record.prompt_tokens, block_tokens) + block_tokens
    changes = [(record.sent_s, held)]
    for index, time_s in enumerate(record.token_times_s, start=1):
        wanted = _blocks(record.prompt_tokens + index, block_tokens)
        if wanted != held:
            changes.append((time_s, wanted - held))
            held = wanted
    changes.append((record.end_s, -held))
    return changes


def _blocks(tokens: int, block_tokens: int) -> int:
    """`tokens` rounded up to whole blocks."""
    return -(-tokens // block_tokens) * block_tokens
