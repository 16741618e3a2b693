"""What the death of one worker, and an outage of etcd, cost those who are served: pure."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.faults.judge import (
    COMPLETED,
    KINDS,
    PROBLEMS_MAX,
    STABLE_WITHIN_S,
    ending_of,
)
from benchmarks.faults.streams import StreamOutcome
from benchmarks.steady_load import Tally
from benchmarks.undisturbed import Undisturbed

THROUGHPUT_MIN = 0.9
"""After the death, of what was before it times the part of the workers that lives."""
WINDOW_MIN_S = 2.0
"""Throughput of a shorter time says nothing."""
SETTLED_WITHIN_S = 15.0
"""After etcd is back."""
Layout = tuple[tuple[str, int, tuple[str, ...]], ...]
"""Id, epoch and members of each group."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker died under load. Times are those of the monotonic clock.

    at_once    so many requests of `outcomes` ran at a time; `wanted` are their undisturbed answers
    hit_s      when it was killed
    alone_s    since when the survivors served without it; None if they did not in the end
    whole_s    since when all workers served, with the one that was started in its place; or None
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
        """The part of the workers that survives."""
        return (self.workers - 1) / self.workers

    @property
    def before(self) -> tuple[float, float]:
        """From the first end of a request, when as many run as ever will, to the death."""
        return min(one.ended_s for one in self.outcomes), self.hit_s

    @property
    def after(self) -> tuple[float, float]:
        """While fewer workers serve as many requests at once as before.

        It ends with the return of the worker, or when the last request was sent; it is empty if
        the survivors do not serve.
        """
        if self.alone_s is None:
            return self.hit_s, self.hit_s
        ends_s = sorted(one.ended_s for one in self.outcomes)
        last_sent_s = ends_s[max(0, len(ends_s) - self.at_once - 1)]
        until_s = last_sent_s if self.whole_s is None else min(last_sent_s, self.whole_s)
        return self.alone_s, max(self.alone_s, until_s)

    def tokens_per_s(self, window: tuple[float, float]) -> float | None:
        """Tokens a second that all clients got; None if the window is too short to say."""
        since_s, until_s = window
        if until_s - since_s < WINDOW_MIN_S:
            return None
        counts = (
            bisect_left(one.times_s, until_s) - bisect_left(one.times_s, since_s)
            for one in self.outcomes
        )
        return sum(counts) / (until_s - since_s)

    @property
    def throughput_ratio(self) -> float | None:
        """Throughput after the death to the share that lives of that before; None if unknown."""
        before, after = self.tokens_per_s(self.before), self.tokens_per_s(self.after)
        return None if not before or after is None else after / (before * self.share_alive)


@dataclass(frozen=True, slots=True)
class Crowd:
    """A loss under more requests than the survivors have KV for.

    `demand_tokens` is the KV of all requests at their ends, `survivors_tokens` what the survivors
    hold together, each by itself. `prompts`: the lengths of the prompts.
    """

    loss: Loss
    prompts: Sequence[int]
    demand_tokens: int
    survivors_tokens: int

    @property
    def ideal_wait_s(self) -> float:
        """How long some request waits in any case, given when the others ended.

        At the death they hold more KV than the survivors have. The rest of it waits until requests
        that had as much have ended, even if all else took no time.
        """
        loss, held = self.loss, 0
        ends = []
        for prompt, one in zip(self.prompts, loss.outcomes, strict=True):
            if one.times_s and one.times_s[0] <= loss.hit_s < one.ended_s:
                held += prompt + bisect_left(one.times_s, loss.hit_s)
                ends.append((one.ended_s, prompt + len(one.token_ids)))
        wait_s, left = 0.0, held - self.survivors_tokens
        for ended_s, tokens in sorted(ends):
            if left <= 0:
                break
            left -= tokens
            wait_s = ended_s - loss.hit_s
        return wait_s


@dataclass(slots=True)
class Outage:
    """etcd stood still under load for `stopped_s` seconds.

    `layouts`: the groups, each time that they were seen to be others than before. `settled_s`:
    seconds from its return until all was well for good; None if that never came.
    """

    stopped_s: float
    layouts: list[Layout] = field(default_factory=list)
    settled_s: float | None = None
    tally: Tally = field(default_factory=Tally)

    def note(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Remember the groups if they have changed.

        A memory manager without etcd may know of none; if they were gone, they come back at other
        epochs.
        """
        layout = tuple(sorted((one["id"], one["epoch"], tuple(one["members"])) for one in groups))
        if layout and layout not in self.layouts[-1:]:
            self.layouts.append(layout)

    @property
    def changes(self) -> int:
        """How often the groups changed."""
        return max(0, len(self.layouts) - 1)


def loss_figures(loss: Loss) -> dict[str, Any]:
    """The figures of a death, for a file."""
    counts = Counter(kind for kind, _ in _endings(loss))
    windows = {"before": loss.before, "after": loss.after}
    return {
        "workers": loss.workers,
        "at_once": loss.at_once,
        "requests": {"sent": len(loss.outcomes)} | {kind: counts[kind] for kind in KINDS},
        "alone_after_s": _after(loss.hit_s, loss.alone_s),
        "whole_after_s": _after(loss.hit_s, loss.whole_s),
        "longest_silence_s": max(one.silence_s(loss.hit_s) for one in loss.outcomes),
        "window_s": {name: until - since for name, (since, until) in windows.items()},
        "tokens_per_s": {name: loss.tokens_per_s(window) for name, window in windows.items()},
        "share_alive": loss.share_alive,
        "throughput_ratio": loss.throughput_ratio,
    }


def crowd_figures(crowd: Crowd) -> dict[str, Any]:
    """The figures of a death under too many requests, for a file."""
    return loss_figures(crowd.loss) | {
        "demand_tokens": crowd.demand_tokens,
        "survivors_tokens": crowd.survivors_tokens,
        "ideal_wait_s": crowd.ideal_wait_s,
    }


def crowd_problems(crowd: Crowd) -> list[str]:
    """A sentence for all that it must not do; how long some wait is told and has no bound."""
    problems = _end_problems(crowd.loss)
    if crowd.demand_tokens < crowd.survivors_tokens:
        problems.append("the survivors have KV for all requests")
    return problems


def loss_problems(loss: Loss) -> list[str]:
    """A sentence for all that a death must not do."""
    return _end_problems(loss) + _throughput_problems(loss)


def _end_problems(loss: Loss) -> list[str]:
    problems = [
        f"request {number} is {kind} after {len(one.token_ids)} tokens: {why}"
        for number, (one, (kind, why)) in enumerate(zip(loss.outcomes, _endings(loss), strict=True))
        if kind != COMPLETED
    ]
    if more := len(problems) - PROBLEMS_MAX:
        problems[PROBLEMS_MAX:] = [f"and {more} more requests"] if more > 0 else []
    alone_s = _after(loss.hit_s, loss.alone_s)
    if alone_s is None:
        problems.append("the survivors do not serve without the worker that was killed")
    elif alone_s > STABLE_WITHIN_S:
        problems.append(f"the survivors served without the killed worker after {alone_s:.0f} s")
    if loss.whole_s is None:
        problems.append("not all workers serve again")
    return problems


def outage_figures(outage: Outage) -> dict[str, Any]:
    """The figures of an outage, for a file."""
    return {
        "stopped_s": outage.stopped_s,
        "changes_of_groups": outage.changes,
        "settled_after_s": outage.settled_s,
        "requests": outage.tally.counts(),
    }


def outage_problems(outage: Outage) -> list[str]:
    """A sentence for all that an outage must not do."""
    problems = outage.tally.problems(refusals=True)
    if outage.changes:
        problems.append(f"the groups changed {outage.changes} times")
    if not outage.layouts:
        problems.append("the groups were never seen")
    if outage.settled_s is None:
        problems.append("not all is well after the outage")
    elif outage.settled_s > SETTLED_WITHIN_S:
        problems.append(f"all was well {outage.settled_s:.0f} s after the return of etcd")
    return problems


def _endings(loss: Loss) -> list[tuple[str, str]]:
    return [ending_of(one, wanted) for one, wanted in zip(loss.outcomes, loss.wanted, strict=True)]


def _after(since_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else max(0.0, at_s - since_s)


def _throughput_problems(loss: Loss) -> list[str]:
    for name, window in (("before", loss.before), ("after", loss.after)):
        if loss.tokens_per_s(window) is None:
            return [f"too little time {name} the death to measure throughput"]
    ratio = loss.throughput_ratio
    if ratio is None:
        return ["no token came before the death"]
    if ratio < THROUGHPUT_MIN:
        return [f"throughput was {ratio:.0%} of the share that lives of that before the death"]
    return []
