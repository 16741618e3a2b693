"""Records of requests by the load generator; times are seconds of the monotonic clock."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from tideserve.load.workload import DEFAULT_CLASS


class RequestOutcome(StrEnum):
    """How a request ended. A rejection (429 or 503) is not a failure."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"


class ClientAttempt(msgspec.Struct, frozen=True):
    """An attempt of a client that returns after refusals.

    `returns`: how often it has returned; `at_once`: without waiting for Retry-After.
    """

    returns: int = 0
    at_once: bool = False


class SentRequest(msgspec.Struct, frozen=True):
    """A request. `token_times_s` has an entry per event with output."""

    due_s: float
    sent_s: float
    end_s: float
    outcome: RequestOutcome
    prompt_tokens: int
    output_tokens: int = 0
    token_times_s: tuple[float, ...] = ()
    late: bool = False
    short: bool = False
    """Completed with fewer tokens than requested: the server does not enforce `min_tokens`."""
    slo_class: str = DEFAULT_CLASS
    target: int = 0
    request_id: str = ""
    error: str = ""
    attempt: ClientAttempt = ClientAttempt()
    retry_after_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Time from the due time to the first token; the delay of a late send counts."""
        return self.token_times_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        """Time from the due time to the last token."""
        return self.token_times_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def normalized_s(self) -> float:
        """End-to-end latency per output token."""
        return self.e2e_s / max(1, self.output_tokens)

    @property
    def inter_token_s(self) -> list[float]:
        """Gaps between events with output."""
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


class TokenSample(msgspec.Struct, frozen=True):
    """Token counters of the servers at `time_s`; None is unknown.

    Processed: prompt tokens that were computed for the first time, and output tokens. Recomputed:
    tokens that were computed again. `batch_…` count the class batch, which the other counters
    include.
    """

    time_s: float
    processed: float
    output: float | None = None
    recomputed: float | None = None
    batch_processed: float | None = None
    batch_recomputed: float | None = None


class Round(msgspec.Struct, frozen=True):
    """Requests of a measured round of a system, and the server's counters of that time."""

    records: tuple[SentRequest, ...]
    preemptions: int | None = None
    capacity_tokens: int | None = None
    capacity_samples: tuple[tuple[float, int], ...] = ()
    """(seconds of the monotonic clock, KV cache tokens) if merges change the capacity."""
    busy_s: float | None = None
    bubble_s: float | None = None
    """Seconds that all pipeline stages spent in microbatches, and in bubbles."""
    prefill_s: float | None = None
    prefill_predicted_s: float | None = None
    decode_s: float | None = None
    decode_predicted_s: float | None = None
    """Seconds of the iterations of all workers, measured and as predicted by the cost model."""
    pipeline_samples: tuple[tuple[float, float, float], ...] = ()
    """(seconds of the monotonic clock, busy_s, bubble_s so far) as reported by the server."""
    token_samples: tuple[TokenSample, ...] = ()
    recomputed_tokens: float | None = None
    """Tokens that all workers computed again."""


def duration_s(records: Sequence[SentRequest]) -> float:
    """Return the time from the first due time to the last end."""
    if not records:
        return 0.0
    return max(r.end_s for r in records) - min(r.due_s for r in records)
