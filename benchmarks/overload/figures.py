"""Figures of a load of `overload`, from the records of its requests. Pure: no clock, no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.overload.load import INTERACTIVE, Targets
from benchmarks.stats import Figures, percentiles, quotient
from tideserve.load.client import UNFINISHED
from tideserve.load.record import RequestOutcome, SentRequest
from tideserve.load.workload import BATCH_CLASS

RECOVERED_FACTOR = 1.5
"""Limit of the TTFT of probes after the recovery, relative to that of an idle cluster."""
RECOVERED_PROBES = 3
"""Probes in a row of which all but one are within the limit after the recovery."""
EXPIRED = "HTTP 504"


@dataclass(frozen=True, slots=True)
class Probe:
    """A request that measures recovery; `ttft_s` None: refused or without a token."""

    sent_s: float
    ttft_s: float | None


@dataclass(slots=True)
class Measured:
    """A measured load of a system. Times are on the monotonic clock.

    Figures of the steady state cover `window_s`, from its start to its end.
    """

    targets: Targets
    idle_ttft_s: float
    records: Sequence[SentRequest] = ()
    window_s: tuple[float, float] = (0.0, 0.0)
    probes: Sequence[Probe] = ()
    gateway_bytes: list[int] = field(default_factory=list)  # the first before the load
    iterations_over_paced: float | None = None
    cores: Mapping[str, float] = field(default_factory=dict)  # in use, by kind of process

    @property
    def span_s(self) -> tuple[float, float]:
        """From the first arrival to the last end."""
        return min(r.due_s for r in self.records), max(r.end_s for r in self.records)


def in_time(record: SentRequest, targets: Targets) -> bool:
    """Whether an attempt was served completely within the targets of its class.

    Its times count from its own due time, which of a return is when Retry-After has passed. A class
    without targets is in time when completed.
    """
    if record.outcome is not RequestOutcome.COMPLETED or not record.token_times_s:
        return False
    target = targets.of_class.get(record.slo_class)
    if target is None:
        return True
    return record.ttft_s <= target.ttft_s and (record.tpot_s or 0.0) <= target.tpot_s


def tokens_within(record: SentRequest, from_s: float, to_s: float) -> float:
    """Tokens processed within the time: the prompt, at the first token, and output tokens."""
    times_s = record.token_times_s
    if not times_s:
        return 0.0
    prompt = record.prompt_tokens if from_s <= times_s[0] < to_s else 0
    events = sum(from_s <= time_s < to_s for time_s in times_s)
    return prompt + record.output_tokens * events / len(times_s)


def is_refusal(record: SentRequest) -> bool:
    """Whether an attempt was refused, also after waiting in vain."""
    return record.outcome is RequestOutcome.REJECTED or record.error.startswith(EXPIRED)


def recovered_s(probes: Sequence[Probe], limit_s: float) -> float | None:
    """Time of the first token of the first probe with a TTFT within `limit_s`, if at most one of
    three probes in a row exceeds it; None if the cluster has not recovered."""
    for at in range(len(probes) - RECOVERED_PROBES + 1):
        fast_s = [
            probe.sent_s + probe.ttft_s
            for probe in probes[at : at + RECOVERED_PROBES]
            if probe.ttft_s is not None and probe.ttft_s <= limit_s
        ]
        if len(fast_s) >= RECOVERED_PROBES - 1:
            return fast_s[0]
    return None


def recovery_s(measured: Measured) -> float | None:
    """Seconds from the last arrival, returns included, until TTFT is about that of an idle cluster;
    None if the cluster did not recover."""
    last_s = max(record.due_s for record in measured.records)
    at_s = recovered_s(measured.probes, RECOVERED_FACTOR * measured.idle_ttft_s)
    return None if at_s is None else max(0.0, at_s - last_s)


def load_figures(measured: Measured, with_room_s: Sequence[float] = ()) -> Figures:
    """The figures of a load by name. `with_room_s`: times of refusals with room."""
    records, targets, (from_s, to_s) = measured.records, measured.targets, measured.window_s
    online = [r for r in records if r.slo_class != BATCH_CLASS and in_time(r, targets)]
    refusals = [record for record in records if is_refusal(record)]
    obeying = [r for r in records if r.attempt.returns and not r.attempt.at_once]
    interactive = [r for r in records if r.slo_class == INTERACTIVE and not r.attempt.returns]
    interactive = [r for r in interactive if from_s <= r.due_s < to_s]
    met = sum(in_time(record, targets) for record in interactive)
    begin_s, end_s = measured.span_s
    waits_s = [r.retry_after_s for r in refusals if r.retry_after_s is not None]
    memory = measured.gateway_bytes
    return {
        "in_time_tokens_s": _tokens_s(online, measured),
        "tokens_s": _tokens_s(records, measured),
        "refusal_s": percentiles([record.end_s - record.due_s for record in refusals]),
        "obeying_due": len(obeying),
        "obeying_served": sum(in_time(record, targets) for record in obeying),
        "refused_with_room": sum(begin_s <= time_s <= end_s for time_s in with_room_s),
        "interactive_in_time_share": quotient(met, len(interactive)),
        "recovery_s": recovery_s(measured),
        "idle_ttft_s": measured.idle_ttft_s,
        "probe_ttft_s": [probe.ttft_s for probe in measured.probes],
        "retry_after_s": percentiles(waits_s),
        **_counts(records),
        "classes": {
            name: _class_figures([r for r in records if r.slo_class == name], measured)
            for name in sorted({record.slo_class for record in records})
        },
        "gateway_growth": quotient(max(memory), memory[0]) if memory else None,
        "iterations_over_paced": measured.iterations_over_paced,
        "cores": measured.cores,
        "client_lag_s": percentiles([record.sent_s - record.due_s for record in records]),
    }


def _counts(records: Sequence[SentRequest]) -> Figures:
    """Attempts by ending. Unfinished: cut off `recovery_max_s` after the last arrival."""
    failed = [r for r in records if r.outcome is RequestOutcome.FAILED and not is_refusal(r)]
    unfinished = sum(record.error == UNFINISHED for record in failed)
    return {
        "attempts": len(records),
        "returns": sum(record.attempt.returns > 0 for record in records),
        "refused": sum(is_refusal(record) for record in records),
        "expired": sum(record.error.startswith(EXPIRED) for record in records),
        "unfinished": unfinished,
        "failed": len(failed) - unfinished,
    }


def _class_figures(records: Sequence[SentRequest], measured: Measured) -> Figures:
    """Attempts of a class that are due in the window, and its tokens in the window."""
    from_s, to_s = measured.window_s
    due = [record for record in records if from_s <= record.due_s < to_s]
    return {
        "attempts": len(due),
        "in_time": sum(in_time(record, measured.targets) for record in due),
        "refused": sum(is_refusal(record) for record in due),
        "tokens_s": _tokens_s(records, measured),
        "ttft_s": percentiles([record.ttft_s for record in due if record.token_times_s]),
    }


def _tokens_s(records: Sequence[SentRequest], measured: Measured) -> float:
    """Tokens per second in the window."""
    from_s, to_s = measured.window_s
    return sum(tokens_within(record, from_s, to_s) for record in records) / (to_s - from_s)
