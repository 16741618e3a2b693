"""Records, events and commands of the group protocol (`GroupState`, docs/protocol.md).

Records are stored in etcd: workers (registrations with a lease), groups and assignments. An
*attempt* is a two-phase change of groups. `mod_revision` is the etcd revision of a record's last
write. `token` is the fencing token: a number that increases with each leadership.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from services.core.groups.layer_map import Stage

Targets = tuple[tuple[Stage, ...], ...]
"""The new groups of a change; each is the tuple of its stages in pipeline order."""


class GroupPhase(StrEnum):
    """Life-cycle phase of a group."""

    STABLE = "stable"
    DEGRADED = "degraded"
    """The group of a survivor of a lost member; serves nothing until all layers are restored."""
    DISSOLVED = "dissolved"
    """The record is a tombstone, which keeps the last epoch."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A registered worker; `incarnation` identifies its process.

    `create_revision` is the etcd revision at which the record was created; it is another one after
    the worker's lease has ended. `draining`: the worker is shutting down.
    `can_drop`: it can run a subset of the layers. `model_digest` distinguishes weights with the
    same model name. `build` is the protocol version, a colon, and a digest of the code.
    `settings` lists, as text for messages, the settings in which members of a group must agree.
    """

    worker_id: str
    incarnation: str
    model: str
    num_layers: int = 0
    create_revision: int = 0
    can_drop: bool = True
    model_digest: str = ""
    build: str = ""
    settings: str = ""
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """A worker's stage in a group: layers `first_layer` to `end_layer` - 1."""

    worker_id: str
    incarnation: str
    first_layer: int = 0
    end_layer: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """A group record; a DISSOLVED group has no members.

    `attempt` is the mark: the id of the attempt that prepares to change the group, whose
    configuration stays in force meanwhile. `traceparent` identifies the trace of the change that
    created the configuration, or is "".
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
    """The group (or "") and the layers of a worker in its newest committed configuration."""

    worker_id: str
    incarnation: str
    group_id: str
    epoch: int
    first_layer: int = 0
    end_layer: int = 0


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A stored group record; the next write compares `mod_revision` (compare-and-swap)."""

    group: Group
    mod_revision: int


@dataclass(frozen=True, slots=True)
class StoredAssignment:
    """A stored assignment."""

    assignment: Assignment
    mod_revision: int


@dataclass(frozen=True, slots=True)
class ClusterListed:
    """A snapshot of all records at `revision`; outdated snapshots are ignored.

    `epoch_floor`: see `singleton_groups`.
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
    """This coordinator became the leader with this fencing token, or lost leadership (None)."""

    now_s: float
    token: int | None


@dataclass(frozen=True, slots=True)
class ChangeRefused:
    """A requested change of groups is invalid; `reason` is a sentence with cause and remedy."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Request to replace the groups of the workers in `targets` by the groups `targets`.

    `traceparent` is written into the new records.
    """

    now_s: float
    request_id: str
    targets: Targets
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ReconfigureCalledOff:
    """Cancels the request `request_id`; an in-flight commit is not stopped."""

    now_s: float
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class MemberAnswered:
    """A member finished its preparation (`ready`) or refused it for `reason`."""

    now_s: float
    attempt: str
    worker_id: str
    incarnation: str
    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TransactionFinished:
    """A transaction ended, committed at `revision`.

    None: the store rejected it, or its outcome is unknown, and it may still be applied.
    """

    now_s: float
    transaction_id: int
    revision: int | None


@dataclass(frozen=True, slots=True)
class GroupStuck:
    """A worker reports that its group cannot make progress at `epoch`, for `reason`.

    `iteration_s`: the engine's longest recent iteration, during which it does not respond.
    """

    now_s: float
    worker_id: str
    incarnation: str
    epoch: int
    reason: str
    iteration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineHung:
    """A worker reports that its engine hangs, or responds again (`hung` False)."""

    now_s: float
    worker_id: str
    incarnation: str
    hung: bool = True


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A clock tick, which lets deadlines expire."""

    now_s: float


Event = (
    ClusterListed
    | LeadershipChanged
    | Reconfigure
    | ReconfigureCalledOff
    | MemberAnswered
    | TransactionFinished
    | GroupStuck
    | EngineHung
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class Transact:
    """Write records atomically, if `token` is still the leader's and all revisions match.

    Revisions are keyed by group or worker id; 0 requires that the record is absent. Those of
    workers are creation revisions, since workers update their records. Assignments and
    singleton groups of `removed_workers` are deleted, and `epoch_floor` replaces the epoch floor,
    whose record must be at `floor_revision`.
    """

    transaction_id: int
    token: int
    groups: tuple[Group, ...]
    assignments: tuple[Assignment, ...] = ()
    group_revisions: dict[str, int] = field(default_factory=dict)
    assignment_revisions: dict[str, int] = field(default_factory=dict)
    worker_revisions: dict[str, int] = field(default_factory=dict)
    removed_workers: tuple[str, ...] = ()
    epoch_floor: int = 0
    floor_revision: int = 0

    @property
    def touched(self) -> set[str]:
        """Keys of the records that are compared or written (`group_keys`, `worker_keys`)."""
        names = {*self.worker_revisions, *self.assignment_revisions}
        floor = {FLOOR_KEY} if self.removed_workers else set()
        return group_keys(self.group_revisions) | worker_keys(names) | floor


@dataclass(frozen=True, slots=True)
class Source:
    """A group before the change, with the attempt's mark at `mod_revision`."""

    group: Group
    mod_revision: int


@dataclass(frozen=True, slots=True)
class PrepareMembers:
    """Send Prepare to every member of `sources` for its stage in `targets`.

    `holders` are workers of other groups that the members fetch layers from (see `holders_for`);
    introduce the members to them. `survivors` of the same broken group are connected already (see
    `survivors_for`).
    """

    attempt: str
    token: int
    sources: tuple[Source, ...]
    targets: tuple[Group, ...]
    timeout_s: float
    holders: tuple[Member, ...] = ()
    survivors: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class AbortMember:
    """Send Abort to a member, without retry: the group record shows the abort as well."""

    attempt: str
    token: int
    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class ReconfigurationCommitted:
    """Reply to `Reconfigure`: the change is committed at `epoch`.

    For attempts that the protocol starts itself (restore, rebuild), `request_id` is their own id.
    """

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ReconfigurationFailed:
    """Reply to `Reconfigure`: it was refused, or its attempt was aborted.

    `busy`: another write to these records was in flight, so no attempt was started; retry.
    """

    request_id: str
    reason: str
    busy: bool = False


Command = Transact | PrepareMembers | AbortMember | ReconfigurationCommitted | ReconfigurationFailed


FLOOR_KEY = "floor"
"""Key of the epoch floor in `Transact.touched`."""


def group_keys(group_ids: Iterable[str]) -> set[str]:
    """The keys of groups in `Transact.touched`."""
    return {f"g/{group_id}" for group_id in group_ids}


def worker_keys(worker_ids: Iterable[str]) -> set[str]:
    """The keys of workers in `Transact.touched`."""
    return {f"w/{worker_id}" for worker_id in worker_ids}
