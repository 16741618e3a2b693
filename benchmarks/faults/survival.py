"""Effects of a worker's death and of an etcd outage on clients. Pure."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.faults.judge import STABLE_WITHIN_S, first_of
from benchmarks.faults.outcomes import (
    COMPLETED,
    KINDS,
    StreamOutcome,
    Tally,
    Undisturbed,
    ending_of,
    ending_problem,
)

THROUGHPUT_MIN = 0.9
"""Minimum throughput after the death, relative to that before times the share of survivors."""
WINDOW_MIN_S = 2.0
"""Minimum duration of a throughput measurement."""
SETTLED_WITHIN_S = 15.0
"""Limit from the return of etcd."""
Layout = tuple[tuple[str, int, tuple[str, ...]], ...]
"""Id, epoch and members of each group."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The death of a worker under load. Times are on the monotonic clock.

    at_once    concurrency of the requests in `outcomes`; `wanted` are their undisturbed answers
    hit_s      when the worker was killed
    alone_s    since when the survivors served without it; None if they did not in the end
    whole_s    since when all workers served, including its replacement; None if they did not
    """

    workers: int
    at_once: int
    hit_s: float
    alone_s: float | None
    whole_s: float | None
    outcomes: Sequence[StreamOutcome]
    wanted: Sequence[Undisturbed]

    @property
    def share_alive(self) -> float:
        """Share of the workers that survive."""
        return (self.workers - 1) / self.workers

    @property
    def before(self) -> tuple[float, float]:
        """From the first end of a request, at full concurrency, to the death."""
        return min(outcome.ended_s for outcome in self.outcomes), self.hit_s

    @property
    def after(self) -> tuple[float, float]:
        """The period in which fewer workers serve the same concurrency.

        It ends when the worker returns or the last request was sent; it is empty if the survivors
        do not serve.
        """
        if self.alone_s is None:
            return self.hit_s, self.hit_s
        ends_s = sorted(outcome.ended_s for outcome in self.outcomes)
        last_sent_s = ends_s[max(0, len(ends_s) - self.at_once - 1)]
        until_s = last_sent_s if self.whole_s is None else min(last_sent_s, self.whole_s)
        return self.alone_s, max(self.alone_s, until_s)

    def tokens_per_s(self, window: tuple[float, float]) -> float | None:
        """Tokens per second over all clients; None if the window is too short."""
        since_s, until_s = window
        if until_s - since_s < WINDOW_MIN_S:
            return None
        counts = (
            bisect_left(outcome.times_s, until_s) - bisect_left(outcome.times_s, since_s)
            for outcome in self.outcomes
        )
        return sum(counts) / (until_s - since_s)

    @property
    def throughput_ratio(self) -> float | None:
        """Throughput after the death over the survivors' share of that before; None if unknown."""
        before, after = self.tokens_per_s(self.before), self.tokens_per_s(self.after)
        return None if not before or after is None else after / (before * self.share_alive)

    def figures(self) -> dict[str, Any]:
        """The figures as JSON."""
        counts = Counter(kind for kind, _ in self._endings)
        windows = {"before": self.before, "after": self.after}
        return {
            "workers": self.workers,
            "at_once": self.at_once,
            "requests": {"sent": len(self.outcomes)} | {kind: counts[kind] for kind in KINDS},
            "alone_after_s": _after(self.hit_s, self.alone_s),
            "whole_after_s": _after(self.hit_s, self.whole_s),
            "longest_silence_s": max(outcome.silence_s(self.hit_s) for outcome in self.outcomes),
            "window_s": {name: until - since for name, (since, until) in windows.items()},
            "tokens_per_s": {name: self.tokens_per_s(window) for name, window in windows.items()},
            "share_alive": self.share_alive,
            "throughput_ratio": self.throughput_ratio,
        }

    def problems(self) -> list[str]:
        """A sentence per violated requirement of a worker's death."""
        problems = self._end_problems()
        windows = {"before": self.before, "after": self.after}
        short = [name for name, window in windows.items() if self.tokens_per_s(window) is None]
        ratio = self.throughput_ratio
        if short:
            problems.append(f"too little time {short[0]} the death for measuring throughput")
        elif ratio is None:
            problems.append("no token was received before the death")
        elif ratio < THROUGHPUT_MIN:
            problems.append(
                f"throughput was {ratio:.0%} of the survivors' share of that before the death"
            )
        return problems

    @property
    def _endings(self) -> list[tuple[str, str]]:
        pairs = zip(self.outcomes, self.wanted, strict=True)
        return [ending_of(outcome, wanted) for outcome, wanted in pairs]

    def _end_problems(self) -> list[str]:
        rows = enumerate(zip(self.outcomes, self.wanted, self._endings, strict=True))
        problems = first_of(
            [
                ending_problem(f"request {number}", ending, outcome, len(wanted.token_ids))
                for number, (outcome, wanted, ending) in rows
                if ending[0] != COMPLETED
            ]
        )
        alone_s = _after(self.hit_s, self.alone_s)
        if alone_s is None:
            problems.append("the survivors do not serve without the killed worker")
        elif alone_s > STABLE_WITHIN_S:
            problems.append(f"the survivors served without the killed worker after {alone_s:.0f} s")
        if self.whole_s is None:
            problems.append("not all workers serve again")
        return problems


@dataclass(frozen=True, slots=True)
class Crowd(Loss):
    """A worker's death under a load that exceeds the survivors' KV capacity.

    `demand_tokens` is the KV of all requests at their ends, `survivors_tokens` the summed capacity
    of the survivors as separate groups. `prompts`: prompt lengths in tokens.
    """

    prompts: Sequence[int]
    demand_tokens: int
    survivors_tokens: int

    @property
    def ideal_wait_s(self) -> float:
        """Lower bound of the longest wait, given when the other requests ended.

        At the death the requests hold more KV than the survivors have. The excess waits until
        requests with as much KV have ended, even if everything else took no time.
        """
        held = 0
        ends = []
        for prompt, outcome in zip(self.prompts, self.outcomes, strict=True):
            if outcome.times_s and outcome.times_s[0] <= self.hit_s < outcome.ended_s:
                # KV at the death: the prompt and the tokens generated until then.
                held += prompt + bisect_left(outcome.times_s, self.hit_s)
                ends.append((outcome.ended_s, prompt + len(outcome.token_ids)))
        wait_s, left = 0.0, held - self.survivors_tokens
        # Requests free their KV in the order of their ends.
        for ended_s, tokens in sorted(ends):
            if left <= 0:
                break
            left -= tokens
            wait_s = ended_s - self.hit_s
        return wait_s

    def figures(self) -> dict[str, Any]:
        """The figures as JSON."""
        return {
            **Loss.figures(self),
            "demand_tokens": self.demand_tokens,
            "survivors_tokens": self.survivors_tokens,
            "ideal_wait_s": self.ideal_wait_s,
        }

    def problems(self) -> list[str]:
        """A sentence per violated requirement; the longest wait has no bound."""
        problems = self._end_problems()
        if self.demand_tokens < self.survivors_tokens:
            problems.append("the survivors have enough KV for all requests")
        return problems


@dataclass(slots=True)
class Outage:
    """A suspension of etcd under load for `stopped_s` seconds.

    `layouts`: the observed groups, one entry per observed change. `settled_s`: seconds from the
    return of etcd until all workers serve for good; None if that never happened.
    """

    stopped_s: float
    layouts: list[Layout] = field(default_factory=list)
    settled_s: float | None = None
    tally: Tally = field(default_factory=Tally)

    def note(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Record the groups if they have changed.

        A memory manager without etcd may report no groups, which is ignored: groups that really
        vanished would return at other epochs.
        """
        layout = tuple(
            sorted((group["id"], group["epoch"], tuple(group["members"])) for group in groups)
        )
        if layout and layout not in self.layouts[-1:]:
            self.layouts.append(layout)

    @property
    def changes(self) -> int:
        """Number of changes of the groups."""
        return max(0, len(self.layouts) - 1)

    def figures(self) -> dict[str, Any]:
        """The figures as JSON."""
        return {
            "stopped_s": self.stopped_s,
            "changes_of_groups": self.changes,
            "settled_after_s": self.settled_s,
            "requests": self.tally.counts(),
        }

    def problems(self) -> list[str]:
        """A sentence per violated requirement of an outage."""
        problems = self.tally.problems(refusals=True)
        if self.changes:
            problems.append(f"the groups changed {self.changes} times")
        if not self.layouts:
            problems.append("the groups were never seen")
        if self.settled_s is None:
            problems.append("the cluster did not settle after the outage")
        elif self.settled_s > SETTLED_WITHIN_S:
            problems.append(f"the cluster settled {self.settled_s:.0f} s after the return of etcd")
        return problems


def _after(since_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else max(0.0, at_s - since_s)
