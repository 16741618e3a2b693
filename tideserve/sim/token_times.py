"""When tokens of requests come: gaps by class, which sequences of an iteration often share, and
groups of tokens with a deadline.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase
from services.core.request import Request
from services.core.service import ServiceClass


class Kept(NamedTuple):
    """Whether one request got its first token in time, and its others on average.

    `token_group` is the share of its groups of tokens that ended in time. None was not promised.
    """

    ttft: bool | None
    tpot: bool | None
    token_group: float | None

    @property
    def both(self) -> bool:
        """Whether no promise of the first two was broken."""
        return self.ttft is not False and self.tpot is not False


NOTHING_KEPT = Kept(False, False, 0.0)
"""A request without a token has this, whatever the reason."""


@dataclass(slots=True)
class TokenGroups:
    """The groups of tokens of one request after its first token, which came at `from_s`.

    A group of `size` tokens is due `size` times `tpot_s` after the one before it ended (BROS §4.2).
    Tokens after the last whole group have no deadline.
    """

    size: int
    tpot_s: float
    from_s: float
    tokens: int = 0
    ended: int = 0
    in_time: int = 0

    def note(self, now_s: float) -> None:
        """The next token is here."""
        self.tokens += 1
        if self.tokens % self.size:
            return
        self.ended += 1
        self.in_time += now_s <= self.due_s
        self.from_s = now_s

    def give_up(self, now_s: float) -> None:
        """No token came from the last one to `now_s`: a group that was due before is late."""
        self.ended += now_s > self.due_s

    @property
    def due_s(self) -> float:
        """When the group that is under way must have ended."""
        return self.from_s + self.size * self.tpot_s

    @property
    def share(self) -> float:
        """Part of the groups that ended in time; 1 of none."""
        return self.in_time / self.ended if self.ended else 1.0


def attainment(kept: Sequence[Kept]) -> dict[str, float | None]:
    """The mean over requests of what was kept, by promise; None where nothing was promised.

    For groups of tokens it is that of the requests' shares, as BROS §7.1 has it.
    """
    return {
        "ttft": _mean(one.ttft for one in kept),
        "tpot": _mean(one.tpot for one in kept),
        "token_group": _mean(one.token_group for one in kept),
    }


def goodput(kept: Sequence[Kept], seconds: float) -> dict[str, Any]:
    """Requests a second of which every target was kept."""
    good = sum(one.both for one in kept)
    return {"goodput_requests_per_s": good / seconds if seconds else None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


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
