"""Figures of a system that co-serves online and batch requests. Pure: no clock, no I/O.

A round is measured in its *window*: from some seconds after the first online request, when batch
work is running, to the arrival of the last online request. The servers count processed tokens
within the window; online requests count if they arrive within it, and are observed to their end.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import msgspec

from benchmarks.co_serving.online_load import WINDOW_FROM_S, OnlineTargets
from benchmarks.stats import (
    Figures,
    LatencyTarget,
    distribution,
    figures,
    latencies,
    percentiles,
    quotient,
)
from tideserve.load.client import UNFINISHED
from tideserve.load.record import RequestOutcome, Round, SentRequest, TokenSample
from tideserve.load.workload import BATCH_CLASS
from tideserve.sim.token_times import NO_TARGETS_MET, TargetsMet, TokenGroups, attainment, goodput

Span = tuple[float, float]
Count = Callable[[TokenSample], float | None]


def co_serving_figures(
    rounds: Sequence[Round],
    targets: Sequence[LatencyTarget],
    best_p50_s: Mapping[str, float | None],
    promised: OnlineTargets,
    window_from_s: float = WINDOW_FROM_S,
) -> Figures:
    """A system's figures, pooled over its rounds: `figures` of the online requests, and more.

    A request without a token counts in `ttft_s` with its waiting time: to its end, or to the end of
    the round if it was refused or failed before. It counts as missing the targets of `promised`.
    """
    # Online figures cover only arrivals in the window, outside of which the load is not steady.
    windows = [window(round_.records, window_from_s) for round_ in rounds]
    online_rounds = [
        msgspec.structs.replace(round_, records=_within(round_.records, span))
        for round_, span in zip(rounds, windows, strict=True)
    ]
    pooled = figures(online_rounds, targets, best_p50_s)
    ends_s = [max((r.end_s for r in round_.records), default=0.0) for round_ in rounds]
    waited = [
        ttft_s(record, end_s)
        for round_, end_s in zip(online_rounds, ends_s, strict=True)
        for record in round_.records
    ]
    records = [record for round_ in online_rounds for record in round_.records]
    online = pooled["classes"].pop(records[0].slo_class if records else "", {}) | _class_figures(
        records, waited
    )
    kept = [targets_met(record, promised) for record in records]
    online["slo_attainment"] = online.get("slo_attainment", {}) | attainment(kept)
    batch_rounds = [[r for r in round_.records if r.slo_class == BATCH_CLASS] for round_ in rounds]
    batch = [record for of_round in batch_rounds for record in of_round]
    batch_waited = [r.ttft_s for r in batch if r.token_times_s]
    counted = _Counted(rounds, windows)
    pooled |= {name: online[name] for name in ("ttft_s", "inter_token_s", "normalized_latency_s")}
    pooled |= counted.all_tokens() | {"window_s": counted.seconds}
    pooled["classes"] = {
        "online": online | counted.of_class(online=True) | goodput(kept, counted.seconds),
        "batch": _class_figures(batch, batch_waited)
        | counted.of_class(online=False)
        | _ended_figures(batch_rounds, windows),
    }
    pooled["rounds"] = [
        of_round | _Counted([round_], [span]).all_tokens()
        for of_round, round_, span in zip(pooled["rounds"], rounds, windows, strict=True)
    ]
    return pooled


def window(records: Sequence[SentRequest], from_s: float = WINDOW_FROM_S) -> Span | None:
    """Start and end of a round's window on the clock; None if no online request arrived in it."""
    due_s = [record.due_s for record in records if record.slo_class != BATCH_CLASS]
    if not due_s or max(due_s) <= min(due_s) + from_s:
        return None
    return min(due_s) + from_s, max(due_s)


def targets_met(record: SentRequest, promised: OnlineTargets) -> TargetsMet:
    """Which targets an online request met.

    A request cut off at the end of a round is judged by its tokens so far and by the time since the
    last token; a failed or refused request met none.
    """
    cut_off = record.error == UNFINISHED
    if not record.token_times_s or not (cut_off or record.outcome is RequestOutcome.COMPLETED):
        return NO_TARGETS_MET
    first_s, *later_s = record.token_times_s
    groups = TokenGroups(promised.token_group, promised.tpot_s, first_s)
    for time_s in later_s:
        groups.note(time_s)
    tpot_s = record.tpot_s or 0.0
    if cut_off:
        groups.give_up(record.end_s)
        tpot_s = (record.end_s - first_s) / len(record.token_times_s)
    return TargetsMet(record.ttft_s <= promised.ttft_s, tpot_s <= promised.tpot_s, groups.share)


def ttft_s(record: SentRequest, round_end_s: float) -> float:
    """Seconds from the due time to the first token; without a token, the waiting time."""
    if record.token_times_s:
        return record.ttft_s
    waited = record.outcome is RequestOutcome.FAILED and record.error == UNFINISHED
    return (record.end_s if waited else round_end_s) - record.due_s


def counted_at(samples: Sequence[TokenSample], time_s: float, count: Count) -> float | None:
    """A counter at `time_s`, interpolated linearly between the neighbouring samples; None if
    unknown.

    Before the first and after the last sample, it is the value of that sample.
    """
    known = [(sample.time_s, value) for sample in samples if (value := count(sample)) is not None]
    if not known:
        return None
    after = bisect_left(known, (time_s, float("-inf")))
    if after == 0 or after == len(known):
        return known[min(after, len(known) - 1)][1]
    (begin_s, low), (end_s, high) = known[after - 1], known[after]
    return low + (high - low) * (time_s - begin_s) / (end_s - begin_s)


class _Counted:
    """Tokens that the servers counted within the windows of rounds."""

    def __init__(self, rounds: Sequence[Round], windows: Sequence[Span | None]) -> None:
        parts = zip(rounds, windows, strict=True)
        self._parts = [(samples.token_samples, span) for samples, span in parts if span is not None]
        self.seconds = sum(end_s - begin_s for _, (begin_s, end_s) in self._parts)

    def all_tokens(self) -> Figures:
        """The figures of both classes combined."""
        output = self._rise(lambda sample: sample.output)
        return {
            **self._tokens(lambda sample: sample.processed, lambda sample: sample.recomputed),
            "output_tokens_per_s": quotient(output, self.seconds),
        }

    def of_class(self, online: bool) -> Figures:
        """The figures of online requests, or of batch requests."""
        if not online:
            return self._tokens(
                lambda sample: sample.batch_processed, lambda sample: sample.batch_recomputed
            )
        return self._tokens(
            lambda sample: _less(sample.processed, sample.batch_processed),
            lambda sample: _less(sample.recomputed, sample.batch_recomputed),
        )

    def _tokens(self, processed: Count, recomputed: Count) -> Figures:
        tokens, again = self._rise(processed), self._rise(recomputed)
        whole = None if tokens is None or again is None else tokens + again
        return {
            "processed_tokens_per_s": quotient(tokens, self.seconds),
            "recomputed_share": quotient(again, whole),
        }

    def _rise(self, count: Count) -> float | None:
        total = 0.0
        for samples, (begin_s, end_s) in self._parts:
            first, last = (counted_at(samples, time_s, count) for time_s in (begin_s, end_s))
            if first is None or last is None or last < first:
                return None
            total += last - first
        return total if self._parts else None


def _class_figures(records: Sequence[SentRequest], waited_s: Sequence[float]) -> Figures:
    """Latencies of one class. Inter-token gaps include every request with more than one token."""
    gaps = [gap for r in records for gap in r.inter_token_s]
    done = [r for r in records if r.outcome is RequestOutcome.COMPLETED]
    normalized = latencies(done, "normalized_latency_s")
    cut_off = sum(r.error == UNFINISHED for r in records)
    return {
        "sent": len(records),
        "completed": len(done),
        "cut_off": cut_off,
        "rejected": sum(r.outcome is RequestOutcome.REJECTED for r in records),
        "failed": sum(r.outcome is RequestOutcome.FAILED for r in records) - cut_off,
        "without_token": sum(not r.token_times_s for r in records),
        "ttft_s": distribution(waited_s),
        "inter_token_s": percentiles(gaps) | {"max": max(gaps, default=None)},
        "normalized_latency_s": distribution(normalized),
    }


def _ended_figures(
    rounds: Sequence[Sequence[SentRequest]], windows: Sequence[Span | None]
) -> Figures:
    """Batch requests per second that ended in the windows, and their output tokens."""
    known = [(records, span) for records, span in zip(rounds, windows, strict=True) if span]
    seconds = sum(end_s - begin_s for _, (begin_s, end_s) in known)
    tokens = [
        record.output_tokens
        for records, (begin_s, end_s) in known
        for record in records
        if record.outcome is RequestOutcome.COMPLETED and begin_s <= record.end_s <= end_s
    ]
    return {
        "throughput_requests_per_s": quotient(len(tokens), seconds),
        "throughput_tokens_per_s": quotient(sum(tokens), seconds),
    }


def _within(records: Sequence[SentRequest], span: Span | None) -> tuple[SentRequest, ...]:
    """The online requests that arrived in the window."""
    if span is None:
        return ()
    return tuple(r for r in records if r.slo_class != BATCH_CLASS and span[0] <= r.due_s <= span[1])


def _less(whole: float | None, part: float | None) -> float | None:
    return None if whole is None or part is None else whole - part
