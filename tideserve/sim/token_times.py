"""When tokens of requests come: gaps by class, which sequences of an iteration often share, and
groups of tokens with a deadline.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase
from services.core.request import Request
from services.core.service import ServiceClass
from tideserve.sim.promises import TokenGroups

Gaps = Counter[float]
"""How often a gap, in seconds, was seen."""


class TokenTimes:
    """When each request had its last token, and the `gaps` between tokens by class.

    Of online requests those count that were sent between the times of `window_s`; those that have a
    target between tokens have their `groups`, by name.
    """

    def __init__(self, window_s: tuple[float, float]) -> None:
        self._window_s = window_s
        self.gaps: defaultdict[ServiceClass, Gaps] = defaultdict(Counter)
        self.groups: dict[str, TokenGroups] = {}
        self._last_s: dict[str, float] = {}

    def note(self, plan: Plan, now_s: float) -> None:
        """The results of a microbatch are here; to be called before its tokens are appended."""
        last_s = self._last_s
        sampled = plan.decodes + [one.sequence for one in plan.prefills if one.samples]
        for sequence in sampled:
            if sequence.phase is Phase.ENDED:
                continue
            request_id = sequence.request.request_id
            if (before_s := last_s.get(request_id)) is not None:
                self.gaps[sequence.request.service.service_class][now_s - before_s] += 1
                if (groups := self.groups.get(request_id)) is not None:
                    groups.note(now_s)
            elif not self._counts(sequence.request):
                continue
            else:
                self._begin(sequence.request, now_s)
            last_s[request_id] = now_s

    def _begin(self, request: Request, now_s: float) -> None:
        """Its first token is here."""
        service = request.service
        if service.tpot_s is not None:
            groups = TokenGroups(service.token_group, service.tpot_s, now_s)
            self.groups[request.request_id] = groups

    def _counts(self, request: Request) -> bool:
        begin_s, end_s = self._window_s
        return (
            not request.service.online or begin_s <= request.arrival_s - request.waited_s <= end_s
        )


def percentiles_of(gaps: Gaps, shares: Mapping[str, float]) -> dict[str, float | None]:
    """The nearest rank of each share; None of nothing."""
    ordered, total = sorted(gaps.items()), gaps.total()
    return {name: _at(ordered, share * (total - 1)) for name, share in shares.items()}


def together(parts: Iterable[Gaps]) -> Gaps:
    """All gaps of several classes or rounds."""
    found = Gaps()
    for part in parts:
        found.update(part)
    return found


def _at(ordered: Sequence[tuple[float, int]], rank: float) -> float | None:
    seen = 0
    for value, count in ordered:
        seen += count
        if seen > rank:
            return value
    return None
