"""Figures of a load of `overload`, from the records of its requests. Pure: no clock, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.overload.load import INTERACTIVE, Targets
from benchmarks.stats import Figures, percentiles, quotient
from tideserve.load.record import RequestOutcome, SentRequest
from tideserve.load.workload import BATCH_CLASS

RECOVERED_FACTOR = 1.5
"""The cluster has recovered when a probe's TTFT is at most this times that of an idle cluster."""
EXPIRED = "HTTP 504"


@dataclass(frozen=True, slots=True)
class Probe:
    """A request that measures recovery; `ttft_s` None: refused or without a token."""

    sent_s: float
    ttft_s: float | None


@dataclass(slots=True)
class Measured:
    """A measured load of a system. Times are on the monotonic clock.

    Figures of steady state cover `window_s`, from its start to its end.
    """

    records: Sequence[SentRequest]
    window_s: tuple[float, float]
    idle_ttft_s: float
    probes: Sequence[Probe]
    gateway_bytes: list[int] = field(default_factory=list)  # the first one before the load
    decode_over_paced: float | None = None
    refused_with_room: int | None = None


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


def recovery_s(measured: Measured) -> float | None:
    """Seconds from the last arrival, returns included, to the first token of the first probe that
    is about as fast as on an idle cluster; None if there was none."""
    last_s = max(record.due_s for record in measured.records)
    limit_s = RECOVERED_FACTOR * measured.idle_ttft_s
    for probe in measured.probes:
        if probe.ttft_s is not None and probe.ttft_s <= limit_s:
            return max(0.0, probe.sent_s + probe.ttft_s - last_s)
    return None


def load_figures(measured: Measured, targets: Targets) -> Figures:
    """The figures of a load by name."""
    records, (from_s, to_s) = measured.records, measured.window_s
    seconds = to_s - from_s
    served = [record for record in records if in_time(record, targets)]
    online = [record for record in served if record.slo_class != BATCH_CLASS]
    refusals = [record for record in records if is_refusal(record)]
    returns = [record for record in records if record.returns and not record.at_once]
    interactive = [
        record
        for record in records
        if record.slo_class == INTERACTIVE and not record.returns and from_s <= record.due_s < to_s
    ]
    lags = [record.sent_s - record.due_s for record in records]
    first = measured.gateway_bytes[0] if measured.gateway_bytes else None
    return {
        "in_time_tokens_s": _tokens(online, from_s, to_s) / seconds,
        "refusal_s": percentiles([record.end_s - record.due_s for record in refusals]),
        "obeying_due": len(returns),
        "obeying_served": sum(in_time(record, targets) for record in returns),
        "refused_with_room": measured.refused_with_room,
        "interactive_in_time_share": quotient(
            sum(in_time(record, targets) for record in interactive), len(interactive)
        ),
        "recovery_s": recovery_s(measured),
        "idle_ttft_s": measured.idle_ttft_s,
        "sent": len(records),
        "returns": sum(record.returns > 0 for record in records),
        "refused": len(refusals),
        "expired": sum(record.error.startswith(EXPIRED) for record in records),
        "failed": sum(
            record.outcome is RequestOutcome.FAILED and not is_refusal(record) for record in records
        ),
        "tokens_s": _tokens(records, from_s, to_s) / seconds,
        "classes": {
            cls: _class_figures(records, cls, measured, targets) for cls in _classes(records)
        },
        "retry_after_s": percentiles(
            [r.retry_after_s for r in refusals if r.retry_after_s is not None]
        ),
        "gateway_growth": quotient(max(measured.gateway_bytes, default=None), first),
        "decode_over_paced": measured.decode_over_paced,
        "client_lag_s": percentiles(lags),
    }


def _class_figures(
    records: Sequence[SentRequest], slo_class: str, measured: Measured, targets: Targets
) -> Figures:
    """Attempts of a class that are due in the window, and its tokens in the window."""
    from_s, to_s = measured.window_s
    own = [record for record in records if record.slo_class == slo_class]
    due = [record for record in own if from_s <= record.due_s < to_s]
    return {
        "attempts": len(due),
        "in_time": sum(in_time(record, targets) for record in due),
        "refused": sum(is_refusal(record) for record in due),
        "tokens_s": _tokens(own, from_s, to_s) / (to_s - from_s),
        "ttft_s": percentiles([record.ttft_s for record in due if record.token_times_s]),
    }


def _tokens(records: Sequence[SentRequest], from_s: float, to_s: float) -> float:
    return sum(tokens_within(record, from_s, to_s) for record in records)


def _classes(records: Sequence[SentRequest]) -> list[str]:
    return sorted({record.slo_class for record in records})
