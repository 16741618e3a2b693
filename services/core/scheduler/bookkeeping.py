"""What the scheduler remembers of requests that no longer wait: recent assignments, and totals."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.core.ask import RefusalReason
from services.core.service import ServiceClass

REMEMBERED_S = 60.0
REMEMBERED_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Assigned:
    """A recent assignment. `returns` counts workers that have given the request back before."""

    group_id: str
    epoch: int
    arrival_s: float
    assigned_s: float
    returns: int = 0

    @property
    def place(self) -> tuple[str, int]:
        """The group and its epoch."""
        return self.group_id, self.epoch


@dataclass(slots=True)
class Assignments:
    """Recent assignments, oldest first, so that a repeated ask gets the same answer; bounded."""

    _recent: OrderedDict[str, Assigned] = field(default_factory=OrderedDict)

    def __iter__(self) -> Iterator[str]:
        """Ids of the requests."""
        return iter(self._recent)

    def get(self, request_id: str) -> Assigned | None:
        """The assignment of a request, or None."""
        return self._recent.get(request_id)

    def remember(self, request_id: str, assigned: Assigned) -> None:
        """Note an assignment; the oldest one is forgotten when there are too many."""
        if len(self._recent) >= REMEMBERED_MAX:
            self._recent.popitem(last=False)
        self._recent[request_id] = assigned

    def forget(self, request_id: str) -> Assigned | None:
        """Drop the assignment of a request and return it; None if there is none."""
        return self._recent.pop(request_id, None)

    def lapsed(self, now_s: float) -> list[str]:
        """Ids of the requests that were assigned `REMEMBERED_S` ago or earlier."""
        found = []
        for request_id, assigned in self._recent.items():
            if assigned.assigned_s > now_s - REMEMBERED_S:
                break
            found.append(request_id)
        return found

    def check_invariants(self) -> None:
        """Raise AssertionError if there are too many."""
        assert len(self._recent) <= REMEMBERED_MAX


@dataclass(slots=True)
class Totals:
    """How asks have ended since the start. `returned` counts returns to the queue, no endings.

    `prompt_tokens` are those of all assignments; of them `cached_tokens` were expected to be hits
    in the prefix cache of the group. `refused` is by reason, `refused_of_class` by class.
    """

    assigned: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    withdrawn: int = 0
    returned: int = 0
    refused: dict[RefusalReason, int] = field(
        default_factory=lambda: dict.fromkeys(RefusalReason, 0)
    )
    refused_of_class: dict[ServiceClass, int] = field(
        default_factory=lambda: dict.fromkeys(ServiceClass, 0)
    )
