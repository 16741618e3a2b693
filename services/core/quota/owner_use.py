"""The quota use of an API-key owner at a gateway: decides whether its requests fit its limits."""

import math
from dataclasses import dataclass, field

from services.core.quota.demand import OwnerDemand
from services.core.quota.limits import Exceeded, Limit, QuotaLimits, RemainingLimit
from services.core.quota.minute_use import MINUTE_MAX, MinuteUse
from services.core.quota.shared_rate import SharedRate

REQUESTS_BURST_MIN = 5
TOKENS_BURST_MIN = 2048
"""Least sizes of all gateways' buckets of requests and of tokens together."""
OUTPUT_GUESS = 256
"""Assumed output length in tokens before the owner's first output."""
OUTPUT_GUESS_MIN = 64
"""Least assumed output length, so that few long outputs start after many short ones."""
GRANT_MAX = 32
"""Most output tokens of a running request between two checks of its owner's minute."""
# Used for a limit that is not set: its bucket measures demand, from which shares follow.
_NOMINAL_PER_MINUTE = 60.0
# Weight of the latest value in an exponential mean.
_LATEST_WEIGHT = 0.1
# Assumed duration of a request before the first has ended.
_DURATION_GUESS_S = 1.0


@dataclass(slots=True)
class Reservation:
    """Tokens of a running request, with `outputs` outputs; admitted at `began_s`.

    `charged`: tokens taken from the bucket, at first for the prompt and an estimate of the outputs.
    `counted`: output tokens counted so far. `granted`: further ones that it may generate without
    another check; `alone`: it started alone on a full bucket, and never ends early.
    """

    prompt_tokens: int = 0
    outputs: int = 0
    charged: int = 0
    counted: int = 0
    granted: int = 0
    alone: bool = False
    ended_early: bool = False
    began_s: float = 0.0


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
    # Tokens used in the last minute, tokens taken from the bucket in it, tokens granted.
    used: MinuteUse = field(default_factory=MinuteUse)
    charged: MinuteUse = field(default_factory=MinuteUse)
    granted: int = 0
    # Running outputs.
    outputs: int = 0
    # Time of the latest request.
    asked_s: float = 0.0
    # Exponential means: output length and total size in tokens, duration of a request.
    _output_mean: float = OUTPUT_GUESS
    _size_mean: float = OUTPUT_GUESS
    _length_mean_s: float = _DURATION_GUESS_S
    # Most tokens of a minute here until the next exchange; None: this gateway's share.
    _minute_max: float | None = None
    # Tokens of the minute that no gateway had used at the last exchange.
    _free: float = 0.0

    @staticmethod
    def begin(limits: QuotaLimits, gateways: int, now_s: float) -> "OwnerUse":
        """Create the use of a new owner, whose limits `gateways` gateways share."""
        requests = SharedRate(REQUESTS_BURST_MIN, 1, gateways=gateways)
        tokens = SharedRate(TOKENS_BURST_MIN, 1, gateways=gateways)
        return OwnerUse(limits, requests, tokens, asked_s=now_s)

    def enter(self, now_s: float) -> Exceeded | None:
        """Take a concurrency slot and a request from its bucket; nothing if a limit is exceeded.

        Also refuses while the token bucket is empty.
        """
        self.asked_s = now_s
        self.requests.note_demand(1, self._requests_per_minute, now_s)
        # Take from the request bucket last, so that other refusals leave it unchanged.
        exceeded = (
            self._slot_refusal() or self._empty_bucket_refusal(now_s) or self._rate_refusal(now_s)
        )
        if exceeded is None:
            self.running += 1
        return exceeded

    def leave(self, length_s: float) -> None:
        """Release the concurrency slot of a request that took `length_s`."""
        self.running -= 1
        self._length_mean_s += _LATEST_WEIGHT * (length_s - self._length_mean_s)

    def refund(self, now_s: float) -> None:
        """Return a request to its bucket, because the cluster did not serve it."""
        self.requests.give_back(1, self._requests_per_minute, now_s)

    def reserve(
        self, prompt_tokens: int, outputs_max: tuple[int, ...], now_s: float
    ) -> Reservation | Exceeded:
        """Take tokens for a request: its prompt, and an estimate for each output.

        The estimate is the owner's recent mean output, at most the output's own maximum. Also
        refuses what would exceed the limit of a minute, unless the bucket is full and no other
        request of the owner runs here: otherwise long requests might never start.
        """
        expected = max(OUTPUT_GUESS_MIN, math.ceil(self._output_mean))
        guess = sum(min(most, expected) for most in outputs_max)
        wanted = prompt_tokens + guess
        self._size_mean += _LATEST_WEIGHT * (wanted - self._size_mean)
        reserved = Reservation(prompt_tokens, len(outputs_max), began_s=now_s)
        per_minute = self.limits.tokens_per_minute
        if per_minute is not None:
            # A prompt above the limit of a whole minute can never fit.
            if prompt_tokens > per_minute:
                return Exceeded(Limit.TOKENS, per_minute, 0, prompt_tokens, None)
            self.tokens.note_demand(wanted, per_minute, now_s)
            reserved.alone = self._is_alone(per_minute, now_s)
            at_once = prompt_tokens + min(guess, GRANT_MAX)
            exceeded = self._minute_refusal(reserved, at_once, wanted, now_s)
            if exceeded is not None:
                return exceeded
            wait_s = self.tokens.take(wanted, per_minute, now_s)
            if wait_s is not None:
                remaining = self._remaining(self.tokens, per_minute, now_s)
                return Exceeded(Limit.TOKENS, per_minute, remaining, wanted, wait_s)
            reserved.charged = wanted
            self.charged.note(wanted, now_s)
        self.outputs += reserved.outputs
        self.used.note(prompt_tokens, now_s)
        return reserved

    def grow(self, reserved: Reservation, output_tokens: int, now_s: float) -> Exceeded | None:
        """Count the output tokens of a running request so far, and charge those beyond its
        reservation, even if they overdraw the bucket.

        Counts nothing and returns the reason if the request must end, because the owner would
        exceed the limit of a minute.
        """
        grant = GRANT_MAX
        per_minute = self.limits.tokens_per_minute
        if per_minute is not None and not reserved.alone:
            room = self._minute_room(per_minute, now_s) + reserved.granted
            room -= output_tokens - reserved.counted
            if room < 0:
                asked = output_tokens - reserved.counted
                wait_s = self.used.wait_s(-room, now_s)
                reserved.ended_early = True
                return Exceeded(Limit.TOKENS, per_minute, 0, asked, wait_s, running=True)
            # Smaller grants as the room shrinks: those of others must not end this request.
            grant = min(GRANT_MAX, int(room / (2 * max(1, self.outputs))))
        self._count(reserved, output_tokens, now_s)
        reserved.granted = grant
        self.granted += grant
        return None

    def settle(self, reserved: Reservation, output_tokens: int, served: bool, now_s: float) -> None:
        """Correct a reservation by the actual use, which is 0 if the request was not `served`."""
        self._count(reserved, output_tokens, now_s)
        self.outputs -= reserved.outputs
        used = 0
        if served:
            used = reserved.prompt_tokens + output_tokens
            if reserved.outputs:
                # An output that ended early would have been longer.
                mean = output_tokens / reserved.outputs * (2 if reserved.ended_early else 1)
                self._output_mean += _LATEST_WEIGHT * (mean - self._output_mean)
        else:
            self.used.take_back(reserved.prompt_tokens, reserved.began_s)
        if (per_minute := self.limits.tokens_per_minute) is not None:
            self.tokens.give_back(reserved.charged - used, per_minute, now_s)
        self.charged.take_back(reserved.charged - used, reserved.began_s)

    def _count(self, reserved: Reservation, output_tokens: int, now_s: float) -> None:
        """Count output tokens that were granted or have room, and return the grant."""
        self.used.note(output_tokens - reserved.counted, now_s)
        self.granted -= reserved.granted
        reserved.counted, reserved.granted = output_tokens, 0
        extra = reserved.prompt_tokens + output_tokens - reserved.charged
        per_minute = self.limits.tokens_per_minute
        if per_minute is not None and extra > 0:
            self.tokens.note_demand(extra, per_minute, now_s)
            self.tokens.give_back(-extra, per_minute, now_s)
            self.charged.note(extra, now_s)
            reserved.charged += extra

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
        """This gateway's demand of the owner, for the report to other gateways."""
        return OwnerDemand(
            requests_per_s=self.requests.report(self._requests_per_minute, now_s),
            tokens_per_s=self.tokens.report(self._tokens_per_minute, now_s),
            running=self.running,
            requests_spilt=self.requests.spilt,
            tokens_spilt=self.tokens.spilt,
            minute_tokens=self._minute_tokens(now_s) if self.limits.tokens_per_minute else 0,
        )

    def receive(self, elsewhere: OwnerDemand, gateways: int, now_s: float) -> None:
        """Apply the demand at other gateways; spilt amounts count since the last call."""
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
        self._divide_minute(elsewhere.minute_tokens, now_s)

    def is_idle(self, now_s: float) -> bool:
        """Whether nothing runs and both buckets are full."""
        return (
            not self.running
            and self.requests.reset_s(self._requests_per_minute, now_s) == 0
            and self.tokens.reset_s(self._tokens_per_minute, now_s) == 0
        )

    def hold(self, held: bool, now_s: float) -> None:
        """Freeze the shares, or let them follow the demand again."""
        self.requests.advance(self._requests_per_minute, now_s)
        self.tokens.advance(self._tokens_per_minute, now_s)
        self.requests.held = self.tokens.held = held
        if held:
            # Reports of other gateways are old: keep to the frozen share.
            self._minute_max, self._free = None, 0.0

    @property
    def _requests_per_minute(self) -> float:
        return self.limits.requests_per_minute or _NOMINAL_PER_MINUTE

    @property
    def _tokens_per_minute(self) -> float:
        return self.limits.tokens_per_minute or _NOMINAL_PER_MINUTE

    def _slot_refusal(self) -> Exceeded | None:
        """Refuse if this gateway's share of the concurrency slots is in use.

        Shares follow those of the request rate, but a gateway without running requests may take
        any free slot. Until reports arrive, each gateway may exceed the limit by 1 in this way.
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

    def _empty_bucket_refusal(self, now_s: float) -> Exceeded | None:
        """Refuse while the token bucket is empty; called before the request body is read."""
        per_minute = self.limits.tokens_per_minute
        if per_minute is None or self.tokens.advance(per_minute, now_s) > 0:
            return None
        self.tokens.note_demand(self._size_mean, per_minute, now_s)
        wait_s = self.tokens.wait_s(self._size_mean, per_minute, now_s)
        return Exceeded(Limit.TOKENS, per_minute, 0, math.ceil(self._size_mean), wait_s)

    def _is_alone(self, per_minute: int, now_s: float) -> bool:
        """Whether the bucket is full and the owner has no other request here."""
        return (
            self.outputs == 0
            and self.tokens.reset_s(per_minute, now_s) == 0
            and self.used.total(now_s) <= per_minute
        )

    def _minute_refusal(
        self, reserved: Reservation, at_once: int, wanted: int, now_s: float
    ) -> Exceeded | None:
        """Refuse a request that would exceed the limit of a minute, unless it is alone.

        Its prompt and first output tokens (`at_once`) must fit into the tokens used, and all that
        it may need (`wanted`) into those charged.
        """
        per_minute = self.limits.tokens_per_minute
        if per_minute is None or reserved.alone:
            return None
        room = self._minute_room(per_minute, now_s)
        if at_once > room:
            wait_s = self.used.wait_s(at_once - room, now_s)
            return Exceeded(Limit.TOKENS, per_minute, max(0, int(room)), at_once, wait_s)
        # At most the bucket's size: it may be overdrawn by a larger request.
        counted = min(wanted, self.tokens.size(per_minute))
        room = MINUTE_MAX * per_minute - self.charged.total(now_s)
        if counted > room:
            wait_s = self.charged.wait_s(counted - room, now_s)
            return Exceeded(Limit.TOKENS, per_minute, max(0, int(room)), wanted, wait_s)
        return None

    def _minute_tokens(self, now_s: float) -> int:
        """Tokens used here in the last minute, and those that running requests may use next."""
        return self.used.total(now_s) + self.granted

    def _minute_room(self, per_minute: int, now_s: float) -> float:
        """Tokens that may still be used here in this minute."""
        most = self._minute_max
        if most is None:
            most = self.tokens.share * MINUTE_MAX * per_minute
        return most - self._minute_tokens(now_s)

    def _divide_minute(self, elsewhere: float, now_s: float) -> None:
        """Let this gateway use its share of what no gateway has used in the last minute.

        What is used stays, so that outputs here continue when traffic moves to other gateways.
        """
        per_minute = self.limits.tokens_per_minute
        if per_minute is None:
            self._minute_max = None
            return
        share = self.tokens.share
        # Since their reports, other gateways may have used their share of what was free.
        most = MINUTE_MAX * per_minute - elsewhere - (1 - share) * self._free
        here = min(self._minute_tokens(now_s), max(0.0, most))
        self._free = max(0.0, most - here)
        self._minute_max = here + share * self._free

    def _rate_refusal(self, now_s: float) -> Exceeded | None:
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
