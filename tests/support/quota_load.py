"""Requests of one owner at a gateway in simulated time, and their tokens in any minute."""

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from services.core.quota.limits import QuotaLimits
from services.gateway.keys.principal import Principal
from services.gateway.keys.quotas import QuotaLease, QuotaMetrics, Quotas
from services.gateway.vocabulary.errors import OverQuota
from tests.support.clock import Clock

TICK_S = 0.5
MINUTE_S = 60.0
PIECES_MAX = 50
"""Most pieces of a request in a tick, to keep tests fast."""


@dataclass(frozen=True)
class Ask:
    """A request whose `choices` generate `length` of `length_max` tokens each, `piece` at once."""

    prompt_tokens: int = 1
    choices: int = 1
    length_max: int = 1
    length: int = 1
    tokens_per_s: float = 100.0
    piece: int = 40


@dataclass(eq=False)
class RunningAsk:
    """An admitted request and its output so far."""

    ask: Ask
    lease: QuotaLease
    lifetime: contextlib.ExitStack
    # Whether it was admitted with a full bucket and no other running request.
    began_full: bool
    began_s: float
    output_tokens: int = 0
    # The error with which the quota ended it.
    error: OverQuota | None = None

    def generate(self, now_s: float) -> int:
        """Receive the output until now; returns the new tokens."""
        ask, before = self.ask, self.output_tokens
        length = min(ask.length, int((now_s - self.began_s) * ask.tokens_per_s))
        new = length * ask.choices - before
        piece = max(ask.piece, new // PIECES_MAX)
        while new > 0 and self.lease.count_output(min(piece, new)):
            self.output_tokens += min(piece, new)
            new -= piece
        return self.output_tokens - before

    @property
    def over(self) -> bool:
        """Whether it has finished or was ended by the quota."""
        return self.error is not None or self.output_tokens == self.ask.length * self.ask.choices

    def end(self, error: OverQuota) -> None:
        """End it early."""
        self.error = error


@dataclass
class QuotaLoad:
    """One owner with `tokens_per_minute`. `used`: time, request and tokens, in order of time."""

    tokens_per_minute: int
    clock: Clock = field(default_factory=Clock)
    running: list[RunningAsk] = field(default_factory=list)
    used: list[tuple[float, RunningAsk, int]] = field(default_factory=list)
    ended_early: list[RunningAsk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.quotas = Quotas(QuotaMetrics(CollectorRegistry()), self.clock)
        limits = QuotaLimits(tokens_per_minute=self.tokens_per_minute)
        self.alice = Principal("alice", limits=limits)

    @property
    def full(self) -> bool:
        """Whether the bucket is full."""
        return dict(self.quotas.headers(self.alice))["x-ratelimit-reset-tokens"] == "0s"

    def send(self, ask: Ask) -> bool:
        """Send a request; returns whether it was admitted."""
        full = self.full and not self.running
        with contextlib.ExitStack() as stack:
            try:
                lease = stack.enter_context(self.quotas.entered(self.alice))
                assert lease is not None
                now_s = self.clock.now_s
                request = RunningAsk(ask, lease, contextlib.ExitStack(), full, now_s)
                lengths = [ask.length_max] * ask.choices
                lease.reserve(ask.prompt_tokens, lengths, request.end)
            except OverQuota:
                return False
            request.lifetime = stack.pop_all()
            self.running.append(request)
            self.used.append((now_s, request, ask.prompt_tokens))
        return True

    def flood(self, ask: Ask, most: int) -> int:
        """Send a request again and again until one is refused; returns how many were admitted."""
        return next((count for count in range(most) if not self.send(ask)), most)

    def wait(self, seconds: float) -> None:
        """Advance the clock; running requests generate and end, gateways report each second."""
        end_s = self.clock.now_s + seconds
        while (left_s := end_s - self.clock.now_s) > 0:
            self.clock.now_s += min(TICK_S, left_s)
            for request in list(self.running):
                if new := request.generate(self.clock.now_s):
                    self.used.append((self.clock.now_s, request, new))
                if request.over:
                    request.lifetime.close()
                    self.running.remove(request)
                    self.ended_early += [request] if request.error else []
            self.quotas.state.report(self.clock.now_s)

    def finish(self) -> None:
        """Wait until no request runs."""
        while self.running:
            self.wait(10.0)

    def excess(self) -> float:
        """Largest excess of a minute, as a fraction of the limit.

        The largest request that began in it at a full bucket does not count.
        """
        excess = total = first = 0
        full = Counter[RunningAsk]()
        for time_s, request, tokens in self.used:
            total += tokens
            full[request] += tokens if request.began_full else 0
            while self.used[first][0] <= time_s - MINUTE_S:
                _, old, gone = self.used[first]
                total -= gone
                full[old] -= gone if old.began_full else 0
                first += 1
            excess = max(excess, total - max(full.values()))
            # Drop the requests that have left the minute.
            full = +full
        return excess / self.tokens_per_minute


def run(tokens_per_minute: int, steps: Iterable[tuple[float, int, Ask]]) -> QuotaLoad:
    """Run steps, each a pause and then equal requests up to a number."""
    load = QuotaLoad(tokens_per_minute)
    for pause_s, count, ask in steps:
        load.wait(pause_s)
        load.flood(ask, count)
    load.finish()
    return load
