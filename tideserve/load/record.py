"""The client's record of each request. Times are seconds on the machine's monotonic clock."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from tideserve.load.workload import DEFAULT_CLASS


class RequestOutcome(StrEnum):
    """How a request ended. A refusal (429 or 503) is no failure."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"


class SentRequest(msgspec.Struct, frozen=True):
    """One request. `token_times_s` holds one entry per event with output, the first included."""

    due_s: float
    sent_s: float
    end_s: float
    outcome: RequestOutcome
    prompt_tokens: int
    output_tokens: int = 0
    token_times_s: tuple[float, ...] = ()
    late: bool = False
    short: bool = False
    """Completed with fewer tokens than were asked for: the server does not force lengths."""
    slo_class: str = DEFAULT_CLASS
    target: int = 0
    request_id: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """From the due time to the first token: a late send counts as waiting for the system."""
        return self.token_times_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        """From the due time to the last token."""
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
    """Tokens that the servers have counted by one moment. None is unknown.

    Processed: prompt tokens that ran for the first time, and output tokens. Recomputed: tokens that
    ran again. `batch_…` are those of the class batch, which are in the others, too.
    """

    time_s: float
    processed: float
    output: float | None = None
    recomputed: float | None = None
    batch_processed: float | None = None
    batch_recomputed: float | None = None


class Round(msgspec.Struct, frozen=True):
    """All requests of one measured round of one system, and the server's counts of that time."""

    records: tuple[SentRequest, ...]
    preemptions: int | None = None
    capacity_tokens: int | None = None
    capacity_samples: tuple[tuple[float, int], ...] = ()
    """(seconds on the monotonic clock, tokens of KV cache) where merges change it."""
    busy_s: float | None = None
    bubble_s: float | None = None
    """Seconds that all stages of pipelines spent in microbatches, and in bubbles."""
    prefill_s: float | None = None
    prefill_predicted_s: float | None = None
    decode_s: float | None = None
    decode_predicted_s: float | None = None
    """Seconds that iterations of all workers took, and that their cost model predicted."""
    pipeline_samples: tuple[tuple[float, float, float], ...] = ()
    """(seconds on the monotonic clock, busy_s, bubble_s so far) as the server reported it."""
    token_samples: tuple[TokenSample, ...] = ()


def duration_s(records: Sequence[SentRequest]) -> float:
    """From the first request's due time to the last one's end."""
    if not records:
        return 0.0
    return max(r.end_s for r in records) - min(r.due_s for r in records)
