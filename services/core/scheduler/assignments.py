"""The scheduler's recent assignments, with which it answers repeated asks, and its counters."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.core.ask import NO_PREFIX, RefusalReason
from services.core.destination import Destination
from services.core.prefix.block_hash import ThinHashes
from services.core.scheduler.lengths import Keys
from services.core.scheduler.vocabulary import WaitLimit
from services.core.service import ServiceClass

REMEMBERED_S = 60.0
"""Age at which an assignment is forgotten; a later ask for its request counts as new."""
REMEMBERED_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Assigned:
    """A recent assignment of a request to a group at an epoch (version of its configuration).

    `requeues` counts earlier assignments whose worker returned the request to the queue.
    """

    group_id: str
    epoch: int
    # When the request first arrived, with `booked` at its first try; and when it was assigned.
    arrival_s: float
    assigned_s: float
    requeues: int = 0
    # What its outcome is compared with: the predicted time to the first token, 0 if unknown; and
    # what is learnt from its length.
    raw_s: float = 0.0
    service_class: ServiceClass = ServiceClass.STANDARD
    keys: Keys = ()
    prompt_tokens: int = 0
    booked: bool = False
    # The group that takes the request over, where blocks are reserved; None: it stays.
    hand_to: Destination | None = None
    # Of its prompt, for a request that is handed over.
    prefix: ThinHashes = NO_PREFIX

    @property
    def group_and_epoch(self) -> tuple[str, int]:
        """Group id and epoch."""
        return self.group_id, self.epoch


@dataclass(slots=True)
class Assignments:
    """Recent assignments by request id, oldest first; bounded in number and age."""

    _recent: OrderedDict[str, Assigned] = field(default_factory=OrderedDict)

    def __iter__(self) -> Iterator[str]:
        """Ids of the assigned requests."""
        return iter(self._recent)

    def get(self, request_id: str) -> Assigned | None:
        """The recent assignment of a request, or None."""
        return self._recent.get(request_id)

    def remember(self, request_id: str, assigned: Assigned) -> None:
        """Record an assignment; removes the oldest if there are `REMEMBERED_MAX` already."""
        if len(self._recent) >= REMEMBERED_MAX:
            self._recent.popitem(last=False)
        self._recent[request_id] = assigned

    def replace(self, request_id: str, assigned: Assigned) -> None:
        """Replace the assignment of a request, which keeps its age."""
        self._recent[request_id] = assigned

    def forget(self, request_id: str) -> Assigned | None:
        """Remove the assignment of a request and return it; None if there is none."""
        return self._recent.pop(request_id, None)

    def expired(self, now_s: float) -> list[str]:
        """List the ids of requests assigned at least `REMEMBERED_S` ago; removes none."""
        expired = []
        for request_id, assigned in self._recent.items():
            if assigned.assigned_s > now_s - REMEMBERED_S:
                break
            expired.append(request_id)
        return expired

    def check_invariants(self) -> None:
        """Raise AssertionError if the bound is exceeded."""
        assert len(self._recent) <= REMEMBERED_MAX


@dataclass(slots=True)
class Totals:
    """Counters since the start of the scheduler."""

    assigned: int = 0
    # Prompt tokens of all assignments, and the predicted prefix cache hits among them.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    # Requests that their client or gateway cancelled while they waited.
    withdrawn: int = 0
    # Requests that a worker returned to the queue before they started.
    returned: int = 0
    refused: dict[RefusalReason, int] = field(
        default_factory=lambda: dict.fromkeys(RefusalReason, 0)
    )
    refused_of_class: dict[ServiceClass, int] = field(
        default_factory=lambda: dict.fromkeys(ServiceClass, 0)
    )
    # Requests refused as late, by model, class and limit; and retries at their booked time that
    # were refused as late again.
    refused_late: Counter[tuple[str, ServiceClass, WaitLimit]] = field(default_factory=Counter)
    retries_broken: int = 0
