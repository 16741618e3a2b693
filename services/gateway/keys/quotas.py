"""Enforces the limits (quotas) of key owners before a request is tokenized or scheduled."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.common.clock import monotonic_s
from services.core.quota.limits import Exceeded, Limit
from services.core.quota.owner_use import OwnerUse, Reservation
from services.core.quota.state import QuotaState
from services.gateway.keys.principal import Principal
from services.gateway.vocabulary.errors import (
    ClientDeadline,
    EngineFailed,
    Expired,
    OverQuota,
    ServiceUnavailable,
)

OwnerLimit = tuple[str, Limit]
"""An owner and one of its limits."""


class QuotaMetrics:
    """Metrics of the owners that have limits; series of other owners are removed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Add the metrics to `registry`."""
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        self._limits = gauge(
            "tideserve_gateway_quota_limit",
            "Limit of a key owner: requests or tokens per minute, or concurrent requests.",
            ["owner", "limit"],
        )
        self._used = counter(
            "tideserve_gateway_quota_used",
            "Requests and tokens counted against the limits of their owner, on completion.",
            ["owner", "limit"],
        )
        self._running = gauge(
            "tideserve_gateway_quota_running",
            "Running requests at this gateway of owners with a limit of concurrent requests.",
            ["owner"],
        )
        self._refusals = counter(
            "tideserve_gateway_quota_refusals",
            "Requests refused or ended early because the key owner had exhausted a limit: requests,"
            " tokens or concurrent.",
            ["owner", "limit"],
        )
        self._limited: set[OwnerLimit] = set()

    def set_limits(self, limits: Mapping[OwnerLimit, int]) -> None:
        """Export series for exactly these owners and limits."""
        for owner_limit in self._limited - limits.keys():
            self._remove(*owner_limit)
        for (owner, limit), value in limits.items():
            self._limits.labels(owner, limit).set(value)
            self._refusals.labels(owner, limit)
            if limit is Limit.CONCURRENT:
                self._running.labels(owner)
            else:
                self._used.labels(owner, limit)
        self._limited = set(limits)

    def count_refusal(self, owner: str, limit: Limit) -> None:
        """Count a request refused by an owner's limit."""
        if (owner, limit) in self._limited:
            self._refusals.labels(owner, limit).inc()

    def count_usage(self, owner: str, limit: Limit, amount: int) -> None:
        """Count the usage of a completed request."""
        if (owner, limit) in self._limited:
            self._used.labels(owner, limit).inc(amount)

    def set_running(self, owner: str, count: int) -> None:
        """Set the number of an owner's running requests."""
        if (owner, Limit.CONCURRENT) in self._limited:
            self._running.labels(owner).set(count)

    def _remove(self, owner: str, limit: Limit) -> None:
        self._limits.remove(owner, limit)
        self._refusals.remove(owner, limit)
        if limit is Limit.CONCURRENT:
            self._running.remove(owner)
        else:
            self._used.remove(owner, limit)


Headers = tuple[tuple[str, str], ...]

# Failures of the server, for which the owner is not charged. A disconnect of the client is charged.
_SERVER_FAULTS = (ServiceUnavailable, Expired, EngineFailed)


class Quotas:
    """Enforces the quotas of all owners with limits, and exports usage and refusals."""

    def __init__(
        self,
        metrics: QuotaMetrics,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self.state = QuotaState()
        self._metrics = metrics
        self._now_s = now_s

    @contextlib.contextmanager
    def entered(self, principal: Principal) -> Iterator["QuotaLease | None"]:
        """Charge a request while the block runs; yields None if its owner has no limits.

        Raises:
            OverQuota: if the owner has exhausted a limit.
        """
        use = self._use(principal)
        if use is None:
            yield None
            return
        began_s = self._now_s()
        self._check(principal.owner, use.enter(began_s))
        self._metrics.set_running(principal.owner, use.running)
        lease = QuotaLease(self, principal.owner, use)
        try:
            yield lease
        except _SERVER_FAULTS as error:
            lease.settle(server_fault=not isinstance(error, ClientDeadline))
            raise
        finally:
            lease.settle()
            use.leave(self._now_s() - began_s)
            self._metrics.set_running(principal.owner, use.running)

    def headers(self, principal: Principal) -> Headers:
        """OpenAI's rate-limit headers for an owner; empty without limits."""
        use = self._use(principal)
        return () if use is None else tuple(_headers(use, self._now_s()))

    def _use(self, principal: Principal) -> OwnerUse | None:
        if not principal.limits:
            return None
        return self.state.use(principal.owner, principal.limits, self._now_s())

    def reserve(
        self, owner: str, use: OwnerUse, prompt_tokens: int, outputs_max: Iterable[int]
    ) -> Reservation:
        """Reserve tokens for a request. Raises OverQuota."""
        reserved = use.reserve(prompt_tokens, tuple(outputs_max), self._now_s())
        if isinstance(reserved, Exceeded):
            self._check(owner, reserved)
        assert isinstance(reserved, Reservation)
        return reserved

    def grow(self, owner: str, use: OwnerUse, reserved: Reservation, output_tokens: int) -> None:
        """Charge the output tokens of a running request so far. Raises OverQuota if it must end."""
        self._check(owner, use.grow(reserved, output_tokens, self._now_s()))

    def settle(
        self, owner: str, use: OwnerUse, reserved: Reservation, output_tokens: int, served: bool
    ) -> None:
        """Replace a reservation by the actual usage; refund a request that was not served."""
        now_s = self._now_s()
        use.settle(reserved, output_tokens, served, now_s)
        if not served:
            use.refund(now_s)
            return
        self._metrics.count_usage(owner, Limit.REQUESTS, 1)
        self._metrics.count_usage(owner, Limit.TOKENS, reserved.prompt_tokens + output_tokens)

    def _check(self, owner: str, exceeded: Exceeded | None) -> None:
        if exceeded is not None:
            self._metrics.count_refusal(owner, exceeded.limit)
            raise OverQuota(
                _explanation(owner, exceeded),
                owner=owner,
                limit=exceeded.limit,
                retry_after_s=exceeded.retry_after_s,
            )


class QuotaLease:
    """The charge of a request against its owner's quota."""

    def __init__(self, quotas: Quotas, owner: str, use: OwnerUse) -> None:
        self._quotas = quotas
        self._owner = owner
        self._use = use
        self._reserved = Reservation()
        self._settled = False
        self._weight = 1.0
        self._output_tokens = 0
        # Weighted output tokens from which the quota must be asked.
        self._granted_tokens = 0
        # Ends the request; None before it has a reservation and after it has ended.
        self._end: Callable[[OverQuota], None] | None = None

    def reserve(
        self,
        prompt_tokens: int,
        outputs_max: Iterable[int],
        end: Callable[[OverQuota], None],
        weight: float = 1.0,
    ) -> None:
        """Reserve tokens for the prompt and the outputs, given their maximum lengths.

        `weight`: tokens of the quota that a token of the model costs.
        `end` is called at most once, if the request must end because its owner would exceed the
        limit of a minute.

        Raises:
            OverQuota: if the owner has fewer tokens left.
        """
        self._end, self._weight = end, weight
        prompt_tokens, outputs_max = self._cost(prompt_tokens), map(self._cost, outputs_max)
        self._reserved = self._quotas.reserve(self._owner, self._use, prompt_tokens, outputs_max)

    def count_output(self, tokens: int) -> bool:
        """Count output tokens as they arrive; returns whether they may be sent to the client."""
        if self._end is None:
            return False
        output_tokens = self._output_tokens + tokens
        cost = self._cost(output_tokens)
        if cost > self._granted_tokens:
            try:
                self._quotas.grow(self._owner, self._use, self._reserved, cost)
            except OverQuota as error:
                end, self._end = self._end, None
                end(error)
                return False
            self._granted_tokens = cost + self._reserved.granted
        self._output_tokens = output_tokens
        return True

    def settle(self, server_fault: bool = False) -> None:
        """Charge the actual usage and return the rest of the reservation; only the first call acts.

        Charges nothing if a server fault prevented any output.
        """
        if not self._settled:
            self._settled, self._end = True, None
            served = self._output_tokens > 0 or not server_fault
            cost = self._cost(self._output_tokens)
            self._quotas.settle(self._owner, self._use, self._reserved, cost, served)

    def _cost(self, tokens: int) -> int:
        """The tokens of the quota that `tokens` of the model cost."""
        return math.ceil(tokens * self._weight)


def _explanation(owner: str, exceeded: Exceeded) -> str:
    """The cause, and the remedy up to the delay, which `OverQuota` appends."""
    maximum = exceeded.maximum
    if exceeded.retry_after_s is None:
        return (
            f"the prompt has {exceeded.asked} tokens, more than the limit of {owner} of {maximum}"
            " tokens per minute; shorten it"
        )
    if exceeded.running:
        return (
            f"{owner} has used its {maximum} tokens per minute, so this output ended early; limit"
            " the length of outputs, or"
        )
    match exceeded.limit:
        case Limit.CONCURRENT:
            return f"{owner} has reached its limit of {maximum} concurrent requests;"
        case Limit.TOKENS:
            return (
                f"{owner} may use {maximum} tokens per minute, this request may need"
                f" {exceeded.asked}, and {exceeded.remaining} are left; limit its output, or"
            )
        case Limit.REQUESTS:
            return f"{owner} has reached its limit of {maximum} requests per minute;"


def _headers(use: OwnerUse, now_s: float) -> Iterator[tuple[str, str]]:
    for limit, state in use.remaining_limits(now_s).items():
        yield f"x-ratelimit-limit-{limit}", str(state.maximum)
        yield f"x-ratelimit-remaining-{limit}", str(state.remaining)
        yield f"x-ratelimit-reset-{limit}", duration(state.reset_s)


def duration(seconds: float) -> str:
    """Format a duration like OpenAI's headers: 12ms, 1.5s, 6m0s, 1h0m0s."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if minutes:
        hours, minutes = divmod(minutes, 60)
        text = f"{minutes}m{text}"
        if hours:
            text = f"{hours}h{text}"
    return text
