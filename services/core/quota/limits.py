"""Limits of an owner, and the refusal of a request beyond them."""

from dataclasses import dataclass
from enum import StrEnum


class Limit(StrEnum):
    """The kinds of limits."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """What all requests of one owner may take together, at all gateways; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None

    def __bool__(self) -> bool:
        return self != NO_LIMITS

    def given(self) -> dict[Limit, int]:
        """The limits that are set."""
        values = {
            Limit.REQUESTS: self.requests_per_minute,
            Limit.TOKENS: self.tokens_per_minute,
            Limit.CONCURRENT: self.concurrent,
        }
        return {limit: value for limit, value in values.items() if value is not None}


NO_LIMITS = QuotaLimits()


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A request does not fit: it needs `asked`, and `remaining` are left of the limit `maximum`.

    `retry_after_s` None: it never will have room.
    """

    limit: Limit
    maximum: int
    remaining: int
    asked: int
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class LimitStanding:
    """What is left of a limit a minute at this gateway, and the time until all of that is back."""

    maximum: int
    remaining: int
    reset_s: float
