"""Adaptive batch size, and replacement of online decodes by batch requests (BROS §4.2).

The number of sequences in an iteration is limited to a number of *slots*. Like a TCP congestion
window, it doubles after each iteration, but falls to its base if deadlines exclude online work from
an iteration. A batch request that finds no time or slot may replace an online decode (Algorithm 1,
lines 24 to 33). BROS replaces the request with the most *residual time*, the time until its
deadline. This module also requires that the replaced decode can meet its deadline in the
next iteration, if that has average length.
"""

from dataclasses import dataclass, field
from math import inf

from services.core.planner import deadline
from services.core.planner.budget import Spent
from services.core.planner.plan import Plan
from services.core.planner.sequence import Sequence

BASE_PART = 2
"""The base is the maximum number of slots divided by this."""
UNBOUNDED = 2**31
"""A number of slots that never limits an iteration."""


@dataclass(slots=True)
class AdaptiveSlots:
    """Adaptive limit of the sequences per iteration (BROS §4.2, adaptive batch sizing)."""

    most: int  # upper limit
    limit: int = field(init=False)  # current limit

    def __post_init__(self) -> None:
        self.limit = self.base

    @property
    def base(self) -> int:
        """Initial number of slots, and the number after deadlines excluded online work."""
        return max(1, self.most // BASE_PART)

    def observe(self, bound: bool) -> None:
        """Adapt to a planned iteration; `bound`: deadlines exclude online work from it."""
        self.limit = self.base if bound else min(self.most, 2 * self.limit)

    def left(self, plan: Plan) -> int:
        """Free slots of `plan`; 0 if more sequences than slots are planned already."""
        return max(0, self.limit - len(plan.decodes) - len(plan.prefills))


@dataclass(slots=True)
class Replaceable:
    """Online decodes of an iteration that can be replaced, by ascending residual time."""

    _plan: Plan
    _candidates: list[tuple[float, Sequence]]  # (residual time, decode)

    @classmethod
    def of(cls, plan: Plan, most_s: float, iteration_s: float) -> "Replaceable":
        """Find the replaceable decodes of `plan`, which takes at most `most_s` seconds.

        A decode is replaceable if it meets its deadline after this iteration and another of
        `iteration_s` seconds, the mean.
        """
        needed_s = most_s + iteration_s
        # Sequences without a target are exempt: they could be replaced forever.
        candidates = [
            (residual_s, decode)
            for decode in plan.decodes
            if decode.online
            and needed_s
            <= (residual_s := deadline.residual_s(decode, plan.planned_s, iteration_s))
            < inf
        ]
        candidates.sort(key=lambda entry: entry[0])
        return cls(plan, candidates)

    def take_next(self, spent: Spent) -> Sequence | None:
        """Remove the decode with the most residual time from the plan; None if none is left."""
        if not self._candidates:
            return None
        _, sequence = self._candidates.pop()
        self._plan.decodes.remove(sequence)
        spent.add_decodes(-1, -sequence.computed)
        return sequence

    def restore(self, sequence: Sequence, spent: Spent) -> None:
        """Undo `take_next`, after which it returns None: the batch decode fits in no case."""
        self._plan.decodes.append(sequence)
        spent.add_decodes(1, sequence.computed)
        self._candidates.clear()
