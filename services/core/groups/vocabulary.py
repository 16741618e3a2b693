"""Vocabulary of the group protocol: records, events, commands."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from services.core.groups.layer_map import Stage

Targets = tuple[tuple[Stage, ...], ...]
"""The targets of a change-over, each as its stages in order."""


class GroupPhase(StrEnum):
    """How far a group is in its life."""

    STABLE = "stable"
    DEGRADED = "degraded"
    """Its members serve nothing and keep the layers that they hold, until they have all."""
    DISSOLVED = "dissolved"


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that is registered now; `incarnation` belongs to its process.

    `can_drop`: whether it can run part of the layers. `model_digest` tells models of one name
    apart, `build` what workers run: its protocol version, a colon, and a digest of its code.
    `settings`: the settings in which the members of a group must agree, as text for people.
    """

    worker_id: str
    incarnation: str
    model: str
    num_layers: int = 0
    mod_revision: int = 0
    can_drop: bool = True
    model_digest: str = ""
    build: str = ""
    settings: str = ""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker's place in a group: it runs layers `first_layer` to `end_layer` - 1."""

    worker_id: str
    incarnation: str
    first_layer: int = 0
    end_layer: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """The record of a group. A tombstone has no members.

    `attempt` is the preparation that runs on it, if any; the configuration stays in force
    meanwhile. `traceparent` names the trace of the change that made it, "" if that has none.
    """

    group_id: str
    epoch: int
    phase: GroupPhase
    members: tuple[Member, ...]
    model: str
    attempt: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The place of a worker by its newest committed configuration; `group_id` "": in no group."""

    worker_id: str
    incarnation: str
    group_id: str
    epoch: int
    first_layer: int = 0
    end_layer: int = 0


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group record as the store has it; `mod_revision` fences the next write."""

    group: Group
    mod_revision: int


@dataclass(frozen=True, slots=True)
class StoredAssignment:
    """An assignment as the store has it."""

    assignment: Assignment
    mod_revision: int


@dataclass(frozen=True, slots=True)
class ClusterListed:
    """All records as they stood at `revision`, as the store has answered.

    A listing that is older than the known one has no effect. `epoch_floor`: see `departed`.
    """

    now_s: float
    revision: int
    workers: tuple[Worker, ...]
    groups: tuple[StoredGroup, ...]
    assignments: tuple[StoredAssignment, ...] = ()
    epoch_floor: int = 0
    floor_revision: int = 0


@dataclass(frozen=True, slots=True)
class LeadershipChanged:
    """This coordinator leads from now on under `token`, or (None) no longer does."""

    now_s: float
    token: int | None


@dataclass(frozen=True, slots=True)
class ChangeRefused:
    """Why groups cannot be changed like that, as one sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """A request to change the groups of the workers in `targets` to `targets`.

    `traceparent` goes into their records.
    """

    now_s: float
    request_id: str
    targets: Targets
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class CalledOff:
    """Nobody wants the change `request_id` any more; a commit under way is not stopped."""

    now_s: float
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class MemberAnswered:
    """A member has prepared itself (`ready`), or will not: `reason`."""

    now_s: float
    attempt: str
    worker_id: str
    incarnation: str
    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TransactionFinished:
    """A transaction has ended, at `revision` if it was committed.

    Without a revision it was refused, or nobody knows: it may be applied even later.
    """

    now_s: float
    transaction_id: int
    revision: int | None


@dataclass(frozen=True, slots=True)
class GroupStuck:
    """A worker reports that its group, at `epoch`, cannot go on as it is: `reason`, for people.

    Its engine answers nothing for `iteration_s` at most, while an iteration runs.
    """

    now_s: float
    worker_id: str
    incarnation: str
    epoch: int
    reason: str
    iteration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineHung:
    """A worker reports that its engine stands still, or does so no longer (`hung`)."""

    now_s: float
    worker_id: str
    incarnation: str
    hung: bool = True


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing else happened; deadlines may have passed."""

    now_s: float


Event = (
    ClusterListed
    | LeadershipChanged
    | Reconfigure
    | CalledOff
    | MemberAnswered
    | TransactionFinished
    | GroupStuck
    | EngineHung
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class Transact:
    """Write all of it at once, if the leader is still `token` and no revision has changed.

    Revisions are by group or worker id; 0 means that the record is absent. Of the workers in
    `forgotten` the assignments and the groups of their own are removed, and `epoch_floor` is
    written, if the one before it is at `floor_revision`.
    """

    transaction_id: int
    token: int
    groups: tuple[Group, ...]
    assignments: tuple[Assignment, ...] = ()
    group_revisions: dict[str, int] = field(default_factory=dict)
    assignment_revisions: dict[str, int] = field(default_factory=dict)
    worker_revisions: dict[str, int] = field(default_factory=dict)
    forgotten: tuple[str, ...] = ()
    epoch_floor: int = 0
    floor_revision: int = 0

    @property
    def touched(self) -> set[str]:
        """Keys that it compares or writes: two transactions that share one cannot both succeed."""
        names = {*self.worker_revisions, *self.assignment_revisions}
        floor = {FLOOR_KEY} if self.forgotten else set()
        return group_keys(self.group_revisions) | worker_keys(names) | floor


@dataclass(frozen=True, slots=True)
class Source:
    """A group before the change, as its record stands at `mod_revision` with the attempt in it."""

    group: Group
    mod_revision: int


@dataclass(frozen=True, slots=True)
class PrepareMembers:
    """Ask every member of `sources` to get ready for its place in `targets`."""

    attempt: str
    token: int
    sources: tuple[Source, ...]
    targets: tuple[Group, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class AbortMember:
    """Tell a member that the attempt will never be committed. Its record says so, too."""

    attempt: str
    token: int
    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class ReconfigurationCommitted:
    """The answer to `Reconfigure`: the groups are changed, at `epoch`.

    Attempts that nobody asked for are answered under their own id.
    """

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ReconfigurationFailed:
    """The answer to `Reconfigure`: it was refused, or its attempt was aborted.

    `busy`: nothing was tried, since another write was under way; ask again.
    """

    request_id: str
    reason: str
    busy: bool = False


Command = Transact | PrepareMembers | AbortMember | ReconfigurationCommitted | ReconfigurationFailed


FLOOR_KEY = "floor"
"""Key of the epoch floor, beside those of groups and workers."""


def group_keys(group_ids: Iterable[str]) -> set[str]:
    """Keys of groups, beside those of workers."""
    return {f"g/{group_id}" for group_id in group_ids}


def worker_keys(worker_ids: Iterable[str]) -> set[str]:
    """Keys of workers, beside those of groups."""
    return {f"w/{worker_id}" for worker_id in worker_ids}
