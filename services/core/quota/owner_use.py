"""The quota use of an owner at a gateway."""

import math
from dataclasses import dataclass

from services.core.quota.demand import OwnerDemand
from services.core.quota.limits import Exceeded, Limit, QuotaLimits, RemainingLimit
from services.core.quota.shared_rate import SharedRate

REQUESTS_BURST_MIN = 5
TOKENS_BURST_MIN = 2048
OUTPUT_GUESS = 256
"""Assumed output length in tokens before the owner's first output."""
# Stands in for a limit that is not set: demand is then measured for the shares alone.
_NOMINAL_PER_MINUTE = 60.0
_LATEST = 0.1
_WAIT_FIRST_S = 1.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens taken for a request before it ran, including those for `choices` outputs."""

    prompt_tokens: int = 0
    choices: int = 0
    tokens: int = 0


@dataclass(slots=True)
class OwnerUse:
    """Token buckets and running requests of an owner at this gateway."""

    limits: QuotaLimits
    # Buckets of requests and of tokens.
    requests: SharedRate
    tokens: SharedRate
    # Running requests here and at other gateways.
    running: int = 0
    running_elsewhere: int = 0
    # Time of the latest request.
    asked_s: float = 0.0
    # Exponential means: output length and total size in tokens, duration of a request.
    _output_mean: float = OUTPUT_GUESS
    _size_mean: float = OUTPUT_GUESS
    _length_mean_s: float = _WAIT_FIRST_S

    @staticmethod
    def begin(limits: QuotaLimits, gateways: int, now_s: float) -> "OwnerUse":
        """The use of a new owner; `gateways` share its limits."""
        requests = SharedRate(REQUESTS_BURST_MIN, 1, gateways=gateways)
        tokens = SharedRate(TOKENS_BURST_MIN, 1, gateways=gateways)
        return OwnerUse(limits, requests, tokens, asked_s=now_s)

    def enter(self, now_s: float) -> Exceeded | None:
        """Take a concurrency slot and a request from the bucket, or nothing if that exceeds."""
        self.asked_s = now_s
        self.requests.note_demand(1, self._requests_per_minute, now_s)
        # The request is taken last, so that other refusals cost none.
        exceeded = self._no_slot() or self._in_debt(now_s) or self._no_request(now_s)
        if exceeded is None:
            self.running += 1
        return exceeded

    def leave(self, length_s: float) -> None:
        """Release the concurrency slot of a request that took `length_s`."""
        self.running -= 1
        self._length_mean_s += _LATEST * (length_s - self._length_mean_s)

    def refund(self, now_s: float) -> None:
        """Return the request to its bucket: the cluster has not served it."""
        self.requests.give_back(1, self._requests_per_minute, now_s)

    def reserve(
        self, prompt_tokens: int, outputs_max: tuple[int, ...], now_s: float
    ) -> Reservation | Exceeded:
        """Take tokens for a request: its prompt, and an estimate for each output.

        The estimate is the owner's recent mean output, at most the output's own maximum.
        """
        guess = sum(min(most, math.ceil(self._output_mean)) for most in outputs_max)
        wanted = Reservation(prompt_tokens, len(outputs_max), prompt_tokens + guess)
        self._size_mean += _LATEST * (wanted.tokens - self._size_mean)
        per_minute = self.limits.tokens_per_minute
        if per_minute is None:
            return wanted
        # More than a whole minute's limit can never fit.
        if prompt_tokens > per_minute:
            return Exceeded(Limit.TOKENS, per_minute, 0, prompt_tokens, None)
        self.tokens.note_demand(wanted.tokens, per_minute, now_s)
        wait_s = self.tokens.take(wanted.tokens, per_minute, now_s)
        if wait_s is not None:
            remaining = self._remaining(self.tokens, per_minute, now_s)
            return Exceeded(Limit.TOKENS, per_minute, remaining, wanted.tokens, wait_s)
        return wanted

    def settle(self, reserved: Reservation, output_tokens: int, served: bool, now_s: float) -> None:
        """Correct a reservation by the actual use: take the excess or return the rest."""
        if served and reserved.choices:
            mean = output_tokens / reserved.choices
            self._output_mean += _LATEST * (mean - self._output_mean)
        if (per_minute := self.limits.tokens_per_minute) is not None and reserved.tokens:
            # A request that the cluster has not served costs nothing.
            used = reserved.prompt_tokens + output_tokens if served else 0
            self.tokens.give_back(reserved.tokens - used, per_minute, now_s)

    def remaining_limits(self, now_s: float) -> dict[Limit, RemainingLimit]:
        """What is left of the per-minute limits that are set."""
        limits = self.limits
        rows = (
            (Limit.REQUESTS, self.requests, limits.requests_per_minute),
            (Limit.TOKENS, self.tokens, limits.tokens_per_minute),
        )
        return {
            limit: RemainingLimit(
                per_minute,
                self._remaining(rate, per_minute, now_s),
                rate.reset_s(per_minute, now_s),
            )
            for limit, rate, per_minute in rows
            if per_minute is not None
        }

    def demand(self, now_s: float) -> OwnerDemand:
        """The report about this owner to other gateways."""
        return OwnerDemand(
            requests_per_s=self.requests.report(self._requests_per_minute, now_s),
            tokens_per_s=self.tokens.report(self._tokens_per_minute, now_s),
            running=self.running,
            requests_spilt=self.requests.spilt,
            tokens_spilt=self.tokens.spilt,
        )

    def receive(self, elsewhere: OwnerDemand, gateways: int, now_s: float) -> None:
        """Apply the demand at other gateways; its spilt amounts are those since the last call."""
        for rate, per_minute, per_s, spilt in (
            (
                self.requests,
                self._requests_per_minute,
                elsewhere.requests_per_s,
                elsewhere.requests_spilt,
            ),
            (self.tokens, self._tokens_per_minute, elsewhere.tokens_per_s, elsewhere.tokens_spilt),
        ):
            # Fill with the old share up to now, before the new demand changes the share.
            rate.advance(per_minute, now_s)
            rate.others_per_s, rate.gateways = per_s, gateways
            rate.take_spilt(spilt, per_minute, now_s)
        self.running_elsewhere = elsewhere.running

    def hold(self, held: bool, now_s: float) -> None:
        """Freeze the shares, or let them follow the demand again."""
        self.requests.advance(self._requests_per_minute, now_s)
        self.tokens.advance(self._tokens_per_minute, now_s)
        self.requests.held = self.tokens.held = held

    @property
    def _requests_per_minute(self) -> float:
        return self.limits.requests_per_minute or _NOMINAL_PER_MINUTE

    @property
    def _tokens_per_minute(self) -> float:
        return self.limits.tokens_per_minute or _NOMINAL_PER_MINUTE

    def _no_slot(self) -> Exceeded | None:
        """Gateways share concurrency slots as they share requests; an idle gateway may take any.

        So the limit may be exceeded by 1 per gateway until their reports have arrived.
        """
        limit = self.limits.concurrent
        if limit is None:
            return None
        reserved = (1 - self.requests.slow_share) * limit
        own = math.ceil(limit - max(self.running_elsewhere, reserved) - 0.5)
        if self.running == 0 and self.running_elsewhere < limit:
            own = max(own, 1)
        if self.running < own:
            return None
        running = self.running + self.running_elsewhere
        wait_s = self._length_mean_s / max(1, self.running)
        return Exceeded(Limit.CONCURRENT, limit, max(0, limit - running), 1, wait_s)

    def _in_debt(self, now_s: float) -> Exceeded | None:
        """Refuse before the body is read, while the token bucket is empty."""
        per_minute = self.limits.tokens_per_minute
        if per_minute is None or self.tokens.advance(per_minute, now_s) > 0:
            return None
        self.tokens.note_demand(self._size_mean, per_minute, now_s)
        wait_s = self.tokens.wait_s(self._size_mean, per_minute, now_s)
        return Exceeded(Limit.TOKENS, per_minute, 0, math.ceil(self._size_mean), wait_s)

    def _no_request(self, now_s: float) -> Exceeded | None:
        per_minute = self.limits.requests_per_minute
        if per_minute is None:
            return None
        wait_s = self.requests.take(1, per_minute, now_s)
        if wait_s is None:
            return None
        return Exceeded(Limit.REQUESTS, per_minute, 0, 1, wait_s)

    def _remaining(self, rate: SharedRate, per_minute: int, now_s: float) -> int:
        level = rate.advance(per_minute, now_s)
        return min(per_minute, max(0, math.floor(level + 1e-6)))
