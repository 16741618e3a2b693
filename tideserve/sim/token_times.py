"""Times of tokens: gaps between tokens by class, and groups of tokens with a deadline."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase
from services.core.request import Request
from services.core.service import ServiceClass


class TargetsMet(NamedTuple):
    """Whether a request met its TTFT target, and its TPOT target on average.

    `token_group` is the share of its token groups that met their deadline. None: no such target.
    """

    ttft: bool | None
    tpot: bool | None
    token_group: float | None

    @property
    def both(self) -> bool:
        """Whether the request missed neither its TTFT nor its TPOT target."""
        return self.ttft is not False and self.tpot is not False


NO_TARGETS_MET = TargetsMet(False, False, 0.0)
"""For a request without any token."""


@dataclass(slots=True)
class TokenGroups:
    """Groups of `size` tokens of a request; `from_s` is the time of the token before the group.

    A group is due `size` times `tpot_s` after the end of the previous group (BROS §4.2); the first
    group follows the first token. Tokens after the last whole group have no deadline.
    """

    size: int
    tpot_s: float
    from_s: float
    tokens: int = 0
    ended: int = 0
    in_time: int = 0

    def note(self, now_s: float) -> None:
        """Record the next token."""
        self.tokens += 1
        if self.tokens % self.size:
            return
        self.ended += 1
        self.in_time += now_s <= self.due_s
        self.from_s = now_s

    def give_up(self, now_s: float) -> None:
        """End at `now_s` without a further token: an unfinished group past its deadline is late."""
        self.ended += now_s > self.due_s

    @property
    def due_s(self) -> float:
        """Deadline of the current group."""
        return self.from_s + self.size * self.tpot_s

    @property
    def share(self) -> float:
        """Share of the groups that met their deadline; 1 without groups."""
        return self.in_time / self.ended if self.ended else 1.0


def attainment(kept: Sequence[TargetsMet]) -> dict[str, float | None]:
    """Return the mean over requests of each target's attainment; None if no request has the target.

    For token groups, this is the mean of the requests' shares, as in BROS §7.1.
    """
    return {
        "ttft": _mean(request.ttft for request in kept),
        "tpot": _mean(request.tpot for request in kept),
        "token_group": _mean(request.token_group for request in kept),
    }


def goodput(kept: Sequence[TargetsMet], seconds: float) -> dict[str, Any]:
    """Return the rate of requests that met their TTFT and TPOT targets."""
    good = sum(request.both for request in kept)
    return {"goodput_requests_per_s": good / seconds if seconds else None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


Gaps = Counter[float]
"""Number of occurrences of each gap, in seconds."""


class TokenTimes:
    """Records the `gaps` between tokens by class, and the token `groups` by request id.

    Online requests count if they were sent within `window_s`. Only requests with a TPOT target have
    groups. `second_gaps`: the gaps before the second token of online requests, in which a request
    that is handed over changes its worker.
    """

    def __init__(self, window_s: tuple[float, float]) -> None:
        self._window_s = window_s
        self.gaps: defaultdict[ServiceClass, Gaps] = defaultdict(Counter)
        self.groups: dict[str, TokenGroups] = {}
        self.second_gaps: Gaps = Counter()
        self._begun: set[str] = set()  # online requests with a single token
        self._last_s: dict[str, float] = {}

    def note(self, plan: Plan, now_s: float) -> None:
        """Record the results of a microbatch; call this before its tokens are appended."""
        last_s = self._last_s
        sampled = plan.decodes + [prefill.sequence for prefill in plan.prefills if prefill.samples]
        for sequence in sampled:
            # A sequence may end while its microbatch runs; its token is discarded.
            if sequence.phase is Phase.ENDED:
                continue
            request_id = sequence.request.request_id
            if (before_s := last_s.get(request_id)) is not None:
                self.gaps[sequence.request.service.service_class][now_s - before_s] += 1
                if request_id in self._begun:
                    self._begun.discard(request_id)
                    self.second_gaps[now_s - before_s] += 1
                if (groups := self.groups.get(request_id)) is not None:
                    groups.note(now_s)
            elif not self._counts(sequence.request):
                continue
            else:
                self._begin(sequence.request, now_s)
            last_s[request_id] = now_s

    def _begin(self, request: Request, now_s: float) -> None:
        """Record the first token of a request."""
        service = request.service
        if service.online:
            self._begun.add(request.request_id)
        if service.tpot_s is not None:
            groups = TokenGroups(service.token_group, service.tpot_s, now_s)
            self.groups[request.request_id] = groups

    def _counts(self, request: Request) -> bool:
        begin_s, end_s = self._window_s
        return (
            not request.service.online or begin_s <= request.arrival_s - request.waited_s <= end_s
        )


def percentiles_of(gaps: Gaps, shares: Mapping[str, float]) -> dict[str, float | None]:
    """Return the percentile at the nearest rank for each share; None without gaps."""
    ordered, total = sorted(gaps.items()), gaps.total()
    return {name: _at(ordered, share * (total - 1)) for name, share in shares.items()}


def merge_gaps(parts: Iterable[Gaps]) -> Gaps:
    """Merge the gaps of several classes or rounds."""
    merged = Gaps()
    for part in parts:
        merged.update(part)
    return merged


def _at(ordered: Sequence[tuple[float, int]], rank: float) -> float | None:
    seen = 0
    for value, count in ordered:
        seen += count
        if seen > rank:
            return value
    return None
