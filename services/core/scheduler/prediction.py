"""Predicts how long requests wait in the scheduler's queue, from measured and expected rates.

A request waits until the requests ahead have started, at the rate at which requests left the queue
while it was not empty (`StartRate`), and then for the prefill in its group. The ratios of measured
to predicted times to the first token (`Ratios`) correct the predictions.
"""

import math
from bisect import bisect, bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.core.ask import Ask
from services.core.cost.model import CostModel
from services.core.scheduler.calendar import Calendar
from services.core.scheduler.group_load import GroupLoad
from services.core.scheduler.lengths import Lengths, keys_of
from services.core.service import ServiceClass

WINDOW_S = 10.0
"""Window of the measured rate."""
PRIOR_S = 2.0
"""The expected rate counts as much as a measurement of this duration, less the time measured."""
STARTS_MIN, STARTS_MAX = 5, 4096
"""Number of starts from which a rate counts as measured, and maximum number that is kept."""
COMPUTED_S = 1.0
"""Period in which the expected rate is computed, which takes some microseconds per group."""
LEFT_SHARE = 0.1
"""Share of the rate that is left to requests that others pass, at least."""
CAPACITY_CHANGE = 0.1
"""Relative change of the KV capacity that restarts the measurement."""


@dataclass(slots=True)
class StartRate:
    """Start tokens per second that leave the queue of a model while requests wait in it.

    Starts before the queue was last empty do not count: arrivals limited them. The last rate is
    remembered, per block of KV capacity, as the expected rate of the next measurement.
    """

    # When the measurement began, and the time and tokens of the starts since then.
    _since_s: float = math.inf
    _starts: deque[tuple[float, int]] = field(default_factory=deque)
    _tokens: int = 0
    # KV blocks of the groups that serve, and tokens per second and block as last measured.
    _capacity_blocks: int = 0
    _remembered: float | None = None
    # Tokens per second that the cost model predicts; None without one.
    computed: float | None = None
    # Whether enough starts have ever been measured; before, the rate is only expected.
    measured: bool = False

    def begin(self, now_s: float) -> None:
        """Restart the measurement: a request joins the empty queue."""
        self._restart(self._starts[-1][0] if self._starts else now_s, now_s)

    def note(self, now_s: float, tokens: int) -> None:
        """Count a start from the queue."""
        self._since_s = min(self._since_s, now_s)
        while self._starts and (
            len(self._starts) == STARTS_MAX or self._starts[0][0] < now_s - WINDOW_S
        ):
            # Older starts are forgotten: the measurement begins with the first that is known.
            self._since_s = max(self._since_s, self._starts[0][0])
            self._tokens -= self._starts.popleft()[1]
        self._starts.append((now_s, tokens))
        self._tokens += tokens
        self.measured = self.measured or len(self._starts) >= STARTS_MIN

    def note_capacity(self, blocks: int, now_s: float) -> None:
        """Note the KV blocks of the groups that serve.

        Until a rate is measured again, it is assumed to change in proportion.
        """
        change = abs(blocks - self._capacity_blocks)
        if change > CAPACITY_CHANGE * self._capacity_blocks:
            if blocks and self._capacity_blocks:
                self._restart(now_s, now_s)
            self._capacity_blocks = blocks

    def per_s(self, now_s: float) -> float | None:
        """Tokens per second; None if nothing is known."""
        if not self._capacity_blocks:
            return None
        self._since_s = since_s = max(self._since_s, now_s - WINDOW_S)
        while self._starts and self._starts[0][0] < since_s:
            self._tokens -= self._starts.popleft()[1]
        tokens = self._tokens
        expected = self.computed
        if self._remembered is not None:
            expected = self._remembered * self._capacity_blocks
        period_s = max(0.0, now_s - since_s)
        measured = len(self._starts) >= STARTS_MIN
        if expected is None:
            return tokens / period_s if measured and period_s else None
        # The expected rate may be far off, as the cost model ignores much: it only bridges the
        # time until enough is measured.
        prior_s = max(0.0, PRIOR_S - period_s) if measured else PRIOR_S
        return (expected * prior_s + tokens) / (prior_s + period_s)

    def _restart(self, end_s: float, now_s: float) -> None:
        """Remember the rate until `end_s`, and begin a measurement now."""
        if end_s - self._since_s >= PRIOR_S and len(self._starts) >= STARTS_MIN:
            rate = self.per_s(end_s)
            if rate is not None and self._capacity_blocks:
                self._remembered = rate / self._capacity_blocks
        self._since_s, self._tokens = now_s, 0
        self._starts.clear()


RANGES_S = (1.0, 10.0)
"""Predictions below, between and above these times are corrected separately."""
SAMPLES_MAX, SAMPLES_MIN = 256, 20
"""Ratios kept per range, and the number from which they replace `UNKNOWN`."""
FORGOTTEN_S = 60.0
"""Age at which a ratio is forgotten. Only admitted requests are measured, so a wrong ratio that
refuses all requests of its range would stay for ever."""
BUCKETS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
"""Upper bounds of the histogram of ratios."""
UNKNOWN = (0.5, 1.0, 2.0)
QUANTILES = (0.2, 0.5, 0.98)
UNKNOWN_OUTPUT = 0.5
"""Expected output of a request over its token limit, before any has ended."""
OFFSET_S = 0.5
"""Added to both times of a ratio: the ratios of short times are dominated by message delays and the
iteration in progress."""


@dataclass(frozen=True, slots=True)
class WaitPrediction:
    """Seconds until the first token: exceeded with a probability of 80 %, 50 % and 2 %.

    `raw_s` is the prediction before its correction. `ahead_tokens` start before the request, at
    `rate` per second. `by_compute_s`: what the wait would be if KV memory were unlimited.
    """

    optimistic_s: float
    likely_s: float
    safe_s: float
    raw_s: float
    ahead_tokens: int
    rate: float
    by_compute_s: float


@dataclass(slots=True)
class Ratios:
    """Measured times to the first token over predicted ones, of the last requests."""

    # By range: times and ratios in order of time, and the ratios sorted.
    _recent: list[deque[tuple[float, float]]] = field(
        default_factory=lambda: [deque() for _ in range(len(RANGES_S) + 1)]
    )
    _sorted: list[list[float]] = field(
        default_factory=lambda: [[] for _ in range(len(RANGES_S) + 1)]
    )
    # Histogram since the start, by `BUCKETS`, the last for all above; and the sum of the ratios.
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def note(self, raw_s: float, actual_s: float, now_s: float) -> None:
        """Compare a prediction with the time that was measured."""
        index, ratio = bisect(RANGES_S, raw_s), (actual_s + OFFSET_S) / (raw_s + OFFSET_S)
        if len(self._recent[index]) == SAMPLES_MAX:
            self._forget_oldest(index)
        self._recent[index].append((now_s, ratio))
        insort(self._sorted[index], ratio)
        self.counts[bisect_left(BUCKETS, ratio)] += 1
        self.total += ratio

    def corrected(self, raw_s: float, now_s: float) -> tuple[float, ...]:
        """The times that a prediction of `raw_s` means, at `QUANTILES`."""
        ratios, offset_s = self._correction(bisect(RANGES_S, raw_s), now_s)
        return tuple(max(0.0, ratio * (raw_s + offset_s) - offset_s) for ratio in ratios)

    def likely(self, now_s: float) -> list[tuple[float, float]]:
        """By range: ratio and offset with which `corrected` computes the likely time.

        For callers that correct many predictions at once.
        """
        corrections = [self._correction(index, now_s) for index in range(len(self._recent))]
        return [(ratios[1], offset_s) for ratios, offset_s in corrections]

    def check_invariants(self) -> None:
        """Raise AssertionError if the sorted ratios differ from the recent ones."""
        for recent, ordered in zip(self._recent, self._sorted, strict=True):
            assert len(recent) <= SAMPLES_MAX and sorted(r for _, r in recent) == ordered

    def _correction(self, index: int, now_s: float) -> tuple[Sequence[float], float]:
        """Ratios at `QUANTILES` and the offset of both times, in a range."""
        recent, ordered = self._recent[index], self._sorted[index]
        while recent and recent[0][0] < now_s - FORGOTTEN_S:
            self._forget_oldest(index)
        if len(ordered) < SAMPLES_MIN:
            return UNKNOWN, 0.0
        return [ordered[int(quantile * len(ordered))] for quantile in QUANTILES], OFFSET_S

    def _forget_oldest(self, index: int) -> None:
        ordered = self._sorted[index]
        del ordered[bisect_left(ordered, self._recent[index].popleft()[1])]


@dataclass(slots=True)
class RequestMeans:
    """Mean lengths of a model's requests, weighted towards recent ones."""

    WEIGHT = 1 / 64

    prompt_tokens: float = 0.0
    output_tokens: float = 0.0

    def note(self, prompt_tokens: int, output_tokens: float) -> None:
        """Count a request."""
        if not self.prompt_tokens:
            self.prompt_tokens, self.output_tokens = float(prompt_tokens), output_tokens
            return
        self.prompt_tokens += self.WEIGHT * (prompt_tokens - self.prompt_tokens)
        self.output_tokens += self.WEIGHT * (output_tokens - self.output_tokens)


RESIDENCE_WEIGHT = 1 / 16
"""Weight of the latest request in the mean residence time."""
RUNNING_MAX = 10_000
"""Maximum number of requests that are counted."""
STALE, STALE_S = 8.0, 60.0
"""Multiple of the residence time, and least time, after which a request without an outcome counts
as ended."""


@dataclass(slots=True)
class InteractiveUse:
    """Running interactive requests, and how many run at once at their present rate."""

    # Start times by request id, oldest first, and mean seconds and KV tokens of ended requests.
    _running: OrderedDict[str, float] = field(default_factory=OrderedDict)
    _residence_s: float = 0.0
    _tokens: float = 0.0

    def start(self, request_id: str, now_s: float) -> None:
        """Count an assigned request."""
        self._running[request_id] = now_s
        if len(self._running) > RUNNING_MAX:
            self._running.popitem(last=False)

    def end(self, request_id: str, tokens: float, now_s: float) -> None:
        """Count the end of a request that held `tokens` of KV; no effect if it is unknown."""
        started_s = self._running.pop(request_id, None)
        if started_s is None:
            return
        weight = RESIDENCE_WEIGHT if self._residence_s else 1.0
        self._residence_s += weight * (now_s - started_s - self._residence_s)
        self._tokens += weight * (tokens - self._tokens)

    def kept_tokens(self, per_s: float, now_s: float) -> float:
        """KV tokens to keep for requests that arrive at `per_s`; 0 before the first has ended.

        So many run at once (Little's law), and by chance more; those that run have theirs.
        """
        oldest_s = now_s - max(STALE_S, STALE * self._residence_s)
        while self._running and next(iter(self._running.values())) < oldest_s:
            self._running.popitem(last=False)
        expected = per_s * self._residence_s
        return max(0.0, expected + math.sqrt(expected) - len(self._running)) * self._tokens


def backlog_s(cost: CostModel, load: GroupLoad, new_tokens: int) -> float:
    """Seconds by which the requests of a group delay the prefill of `new_tokens`.

    Its backlog is prefilled before, and its running requests decode in each iteration.
    """
    group, tokens = load.group, load.tokens_ahead
    budget = group.max_batch_tokens
    token_s = (cost.beyond_knee.chunk_s(0, budget) - cost.lam) / budget
    # Decodes beside a prefill share λ with it, but extend the iteration otherwise.
    running = load.running
    decodes_s = max(0.0, cost.decodes_alone_s(running, load.used_tokens) - running * cost.lam)
    iterations = -(-(tokens + new_tokens) // budget)
    return tokens * token_s / group.members + iterations * decodes_s


def computed_rate(
    loads: Iterable[GroupLoad], means: RequestMeans, costs: CostModel
) -> tuple[float, float]:
    """Requests per second that the groups can start: in all, and if KV memory were unlimited.

    A group runs as many requests of mean length as fit into its KV, for as long as their decodes
    take (Little's law). `costs` applies to groups without a cost model.
    """
    in_all, by_compute = 0.0, 0.0
    prompt, output = max(1, round(means.prompt_tokens)), max(1.0, means.output_tokens)
    for load in loads:
        group, cost = load.group, load.group.cost_model or costs
        blocks = max(1.0, (prompt + output / 2) / group.block_size)
        running = max(1, int(load.capacity_blocks / blocks))
        prefill_s = max(1e-6, cost.beyond_knee.chunk_s(0, prompt) - cost.lam)
        held = round(running * (prompt + output / 2))
        iteration_s = cost.decodes_s(running, held)
        residence_s = prefill_s + output * iteration_s / group.members
        in_all += 1 / (prefill_s / group.members + residence_s / running)
        by_compute += group.members / prefill_s
    return in_all, by_compute


@dataclass(slots=True)
class WaitPredictor:
    """Predicts the waits of a model's requests."""

    rate: StartRate = field(default_factory=StartRate)
    ratios: dict[ServiceClass, Ratios] = field(
        default_factory=lambda: {cls: Ratios() for cls in ServiceClass}
    )
    lengths: Lengths = field(default_factory=Lengths)
    interactive: InteractiveUse = field(default_factory=InteractiveUse)
    calendars: dict[ServiceClass, Calendar] = field(
        default_factory=lambda: {cls: Calendar() for cls in ServiceClass}
    )
    means: RequestMeans = field(default_factory=RequestMeans)
    # Prompt tokens per second if KV memory were unlimited; None if no cost model is known. When
    # this and the expected rate are due to be computed again.
    _compute_rate: float | None = None
    _computed_due_s: float = -math.inf

    def note_ask(self, ask: Ask) -> None:
        """Count the lengths of a new request."""
        self.means.note(ask.prompt_tokens, self.expected_output(ask))

    def expected_output(self, ask: Ask) -> float:
        """Expected output tokens of a request."""
        length = self.lengths.expect(keys_of(ask), ask.max_tokens, ask.expected_tokens)
        return length.mean if length is not None else ask.max_tokens * UNKNOWN_OUTPUT

    def refresh(self, loads: list[GroupLoad], costs: CostModel | None, now_s: float) -> None:
        """Note the groups that serve; call it every few 100 ms. O(groups)."""
        self.rate.note_capacity(sum(load.capacity_blocks for load in loads), now_s)
        if now_s < self._computed_due_s or not self.means.prompt_tokens:
            return
        self._computed_due_s = now_s + COMPUTED_S
        known = [load for load in loads if costs is not None or load.group.cost_model is not None]
        self._compute_rate = self.rate.computed = None
        if not known:
            return
        fallback = costs or next(load.group.cost_model for load in known)
        assert fallback is not None
        in_all, by_compute = computed_rate(loads, self.means, fallback)
        self.rate.computed = in_all * self.means.prompt_tokens
        self._compute_rate = by_compute * self.means.prompt_tokens

    def rate_beside(self, passing: float, now_s: float) -> float | None:
        """Tokens per second that start beside `passing` tokens per second of other requests."""
        rate = self.rate.per_s(now_s)
        return None if rate is None else max(rate - passing, LEFT_SHARE * rate)

    def predict(
        self,
        ahead_tokens: int,
        start_tokens: int,
        group_s: float,
        rate: float | None,
        service_class: ServiceClass,
        now_s: float,
    ) -> WaitPrediction | None:
        """The time to the first token of a request with `ahead_tokens` before it; None if unknown.

        It needs `start_tokens` to start, 0 if it need not wait for that. In its group, its prefill
        ends after `group_s`. `rate`: tokens per second that start before it.
        """
        if not rate:
            return None
        raw_s = group_s + (ahead_tokens + start_tokens) / rate
        by_compute_s = group_s
        if self._compute_rate:
            by_compute_s += ahead_tokens / self._compute_rate
        low_s, middle_s, high_s = self.ratios[service_class].corrected(raw_s, now_s)
        return WaitPrediction(
            *(low_s, middle_s, high_s, raw_s),
            *(ahead_tokens, rate, min(by_compute_s, raw_s)),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts contradict themselves."""
        for ratios in self.ratios.values():
            ratios.check_invariants()
        for calendar in self.calendars.values():
            calendar.check_invariants()
        self.lengths.check_invariants()
