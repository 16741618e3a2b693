"""Which requests share an iteration when not all of them can (BROS §4.2).

An iteration has a number of places, the *slots*. It adapts: it doubles while no deadline bounds
iterations, and falls back to its base when one does, like the window of a TCP sender. And a batch
request that finds no time or slot left may have the turn of an online decode that can spare one
(Algorithm 1, lines 24 to 33). BROS takes the turn of whoever has most time left. Here its deadline
has to hold without this iteration, if the next one is no longer than most are.
"""

from dataclasses import dataclass, field
from math import inf

from services.core.planner import deadline
from services.core.planner.budget import Spent
from services.core.planner.plan import Plan
from services.core.planner.sequence import Sequence

BASE_PART = 2
"""The slots begin at the most that there may be over this."""
UNBOUNDED = 2**31
"""The slots of an iteration that may have as many sequences as run."""


@dataclass(slots=True)
class AdaptiveSlots:
    """How many sequences an iteration may have (BROS §4.2, adaptive batch sizing)."""

    most: int
    now: int = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.base

    @property
    def base(self) -> int:
        """AdaptiveSlots to begin with, and after a deadline has bound an iteration."""
        return max(1, self.most // BASE_PART)

    def observe(self, bound: bool) -> None:
        """An iteration was planned; `bound`: a deadline kept online work out of it."""
        self.now = self.base if bound else min(self.most, 2 * self.now)

    def left(self, plan: Plan) -> int:
        """How many more sequences `plan` may have; those that cannot wait may be more than that."""
        return max(0, self.now - len(plan.decodes) - len(plan.prefills))


@dataclass(slots=True)
class Replaceable:
    """Online decodes of one iteration that can do without it, the one with most time last."""

    _plan: Plan
    _found: list[tuple[float, Sequence]]

    @classmethod
    def of(cls, plan: Plan, most_s: float, iteration_s: float) -> "Replaceable":
        """Look at the decodes of `plan`, which may take `most_s` seconds in the end.

        Their deadlines hold if this iteration and one of `iteration_s` seconds, the mean, end
        before them. A sequence that is promised nothing is none of them: it would wait for ever.
        """
        needed_s = most_s + iteration_s
        found = [
            (slack_s, one)
            for one in plan.decodes
            if one.online
            and needed_s <= (slack_s := deadline.slack_s(one, plan.planned_s, iteration_s)) < inf
        ]
        found.sort(key=lambda entry: entry[0])
        return cls(plan, found)

    def take_next(self, spent: Spent) -> Sequence | None:
        """Take the one with most time out of the iteration; None if there is none left."""
        if not self._found:
            return None
        _, sequence = self._found.pop()
        self._plan.decodes.remove(sequence)
        spent.add_decodes(-1, -sequence.computed)
        return sequence

    def restore(self, sequence: Sequence, spent: Spent) -> None:
        """It runs in this iteration after all; nobody else gives a turn to this batch request."""
        self._plan.decodes.append(sequence)
        spent.add_decodes(1, sequence.computed)
        self._found.clear()
