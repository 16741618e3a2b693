"""An attempt: a two-phase change of groups as the leading coordinator tracks it (`GroupState`).

It marks the records of the *source* groups with its id, has their members prepare, and commits the
records of the *target* groups in a single etcd transaction. A *tombstone* is the record of a
dissolved group; a *fencing token* is a number that increases with each leadership.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from services.core.groups.records import Records, assignment_of
from services.core.groups.vocabulary import (
    Group,
    GroupPhase,
    Member,
    MemberAnswered,
    PrepareMembers,
    Source,
    Transact,
    Worker,
)


class AttemptPhase(StrEnum):
    """Step of the two-phase change that is in progress."""

    MARKING = "marking"
    """The attempt's id is written into the source records, which locks out other changes."""
    PREPARING = "preparing"
    """Members prepare; serving continues."""
    COMMITTING = "committing"
    """All members are ready, and the commit transaction is in flight."""
    COMMITTED = "committed"
    ABORTED = "aborted"


TRANSITIONS = {
    (AttemptPhase.MARKING, AttemptPhase.PREPARING),
    (AttemptPhase.PREPARING, AttemptPhase.COMMITTING),
    (AttemptPhase.COMMITTING, AttemptPhase.COMMITTED),
    (AttemptPhase.MARKING, AttemptPhase.ABORTED),
    (AttemptPhase.PREPARING, AttemptPhase.ABORTED),
    (AttemptPhase.COMMITTING, AttemptPhase.ABORTED),
}
"""All allowed transitions. A coordinator that loses leadership aborts its attempts, COMMITTING ones
included: if etcd applies the commit after all, the next leader reads it from the records."""


@dataclass(slots=True)
class Attempt:
    """A two-phase change: the records that its commit compares, and the members that are ready."""

    attempt_id: str
    token: int  # fencing token of the leadership that started it
    request_id: str  # of the `Reconfigure`; `attempt_id` if the protocol started the attempt
    sources: tuple[Group, ...]  # groups before the change, with the mark (`Group.attempt`)
    targets: tuple[Group, ...]  # groups that the commit writes, tombstones included
    workers: dict[str, Worker]  # members as registered at the start, by id
    target_revisions: dict[str, int]  # etcd revisions that the commit compares, by group
    assignment_revisions: dict[str, int]  # etcd revisions that the commit compares, by worker
    phase: AttemptPhase = AttemptPhase.MARKING
    marked_revision: int = 0  # etcd revision of the source records with the mark
    deadline_s: float = 0.0  # of the preparation
    ready: set[str] = field(default_factory=set)  # workers that finished the preparation
    holders: tuple[Member, ...] = ()  # workers of other groups that send layers to the members
    survivors: tuple[Member, ...] = ()  # connected members of a broken group that send layers, too

    @property
    def source_ids(self) -> tuple[str, ...]:
        """Ids of the groups that the attempt changes."""
        return tuple(group.group_id for group in self.sources)

    @property
    def epoch(self) -> int:
        """The epoch that the commit writes."""
        return self.targets[0].epoch

    @property
    def is_restore(self) -> bool:
        """Whether the attempt restores the layers of survivors of a lost member."""
        return all(group.phase is GroupPhase.DEGRADED for group in self.sources)

    def enter(self, phase: AttemptPhase) -> None:
        """Enter `phase`."""
        assert (self.phase, phase) in TRANSITIONS, f"an attempt went from {self.phase} to {phase}"
        self.phase = phase

    def mark(self, transaction_id: int, revisions: dict[str, int]) -> Transact:
        """The transaction that marks the source records, which are at `revisions`."""
        return Transact(transaction_id, self.token, self.sources, group_revisions=revisions)

    def prepare(self, timeout_s: float) -> PrepareMembers:
        """The command that asks the members to prepare, once the sources are marked."""
        sources = tuple(Source(group, self.marked_revision) for group in self.sources)
        targets = tuple(group for group in self.targets if group.members)
        return PrepareMembers(
            self.attempt_id,
            self.token,
            sources,
            targets,
            timeout_s,
            self.holders,
            self.survivors,
        )

    def is_from_member(self, answer: MemberAnswered) -> bool:
        """Whether the answer comes from the process that received the Prepare."""
        worker = self.workers.get(answer.worker_id)
        return worker is not None and worker.incarnation == answer.incarnation

    def commit(self, transaction_id: int) -> Transact:
        """The commit transaction: all targets and assignments, if no record has changed."""
        assert self.ready == self.workers.keys(), "committed without all members' consent"
        # A source record may appear among the targets too; its marked revision takes precedence.
        marked = {group_id: self.marked_revision for group_id in self.source_ids}
        return Transact(
            transaction_id,
            self.token,
            self.targets,
            tuple(assignment_of(group, m) for group in self.targets for m in group.members),
            group_revisions=self.target_revisions | marked,
            assignment_revisions=self.assignment_revisions,
            worker_revisions={w.worker_id: w.create_revision for w in self.workers.values()},
        )

    def conflict_in(self, records: Records) -> str | None:
        """Why the commit would fail, as a sentence; None if no record has changed."""
        for worker in self.workers.values():
            if records.workers.get(worker.worker_id) != worker:
                return f"{worker.worker_id} has left, restarted or begun to drain"
        if self.phase is AttemptPhase.PREPARING:
            for group_id in self.source_ids:
                if records.group_revision(group_id) != self.marked_revision:
                    return f"the record of {group_id} was changed by another writer"
        return None

    def check_invariants(self) -> None:
        """Raise AssertionError if the attempt contradicts itself."""
        assert self.ready <= self.workers.keys()
        assert all(group.attempt == self.attempt_id for group in self.sources)
        assert all(group.epoch == self.epoch for group in self.targets)
        assert self.epoch > max(group.epoch for group in self.sources)
        placed = [member.worker_id for group in self.targets for member in group.members]
        assert sorted(placed) == sorted(self.workers)
        for group in self.targets:
            assert (group.phase is GroupPhase.DISSOLVED) == (not group.members)
