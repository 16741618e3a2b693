"""Quota limits of an owner of API keys, and the refusal of a request that exceeds them."""

from dataclasses import dataclass
from enum import StrEnum


class Limit(StrEnum):
    """Kinds of limits: requests and tokens per minute, concurrent requests."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Limits on all requests of an owner, over all gateways; None: unlimited.

    `batch_tokens_queued` limits the estimated tokens of all batches that have not ended; the others
    count the lines of batches only with `batch_counts`.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    batch_tokens_queued: int | None = None
    batch_counts: bool = False

    def __bool__(self) -> bool:
        return self != NO_LIMITS

    def given(self) -> dict[Limit, int]:
        """The limits on requests that are set."""
        values = {
            Limit.REQUESTS: self.requests_per_minute,
            Limit.TOKENS: self.tokens_per_minute,
            Limit.CONCURRENT: self.concurrent,
        }
        return {limit: value for limit, value in values.items() if value is not None}


NO_LIMITS = QuotaLimits()


@dataclass(frozen=True, slots=True)
class Exceeded:
    """Refusal: the request needs `asked` of `limit`; `remaining` of `maximum` are left.

    `retry_after_s` None: the request can never fit. `running`: the request had started.
    """

    limit: Limit
    maximum: int
    remaining: int
    asked: int
    retry_after_s: float | None
    running: bool = False


@dataclass(frozen=True, slots=True)
class RemainingLimit:
    """Remainder of a per-minute limit at this gateway; the limit is full again in `reset_s`."""

    maximum: int
    remaining: int
    reset_s: float
