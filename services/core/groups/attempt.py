"""One attempt to change groups: mark the sources, prepare the members, commit."""

from dataclasses import dataclass, field
from enum import StrEnum

from services.core.groups.records import Records, assignment_of
from services.core.groups.vocabulary import (
    Group,
    GroupPhase,
    MemberAnswered,
    PrepareMembers,
    Source,
    Transact,
    Worker,
)


class AttemptPhase(StrEnum):
    """What the attempt waits for."""

    MARKING = "marking"
    """The sources' records get the attempt's id, so that nobody else changes them."""
    PREPARING = "preparing"
    """The members get ready."""
    COMMITTING = "committing"
    """All members are ready, and the commit is written."""
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
"""No other step can happen. A coordinator that loses its leadership aborts its attempts: if
a commit is applied all the same, the next coordinator finds it in the records."""


@dataclass(slots=True)
class Attempt:
    """What must stay as it is until the commit, and the members that are ready for it."""

    attempt_id: str
    token: int
    request_id: str
    sources: tuple[Group, ...]
    targets: tuple[Group, ...]
    workers: dict[str, Worker]
    target_revisions: dict[str, int]
    assignment_revisions: dict[str, int]
    phase: AttemptPhase = AttemptPhase.MARKING
    marked_revision: int = 0
    deadline_s: float = 0.0
    ready: set[str] = field(default_factory=set)

    @property
    def source_ids(self) -> tuple[str, ...]:
        """The groups that change."""
        return tuple(group.group_id for group in self.sources)

    @property
    def epoch(self) -> int:
        """The epoch that a commit gives."""
        return self.targets[0].epoch

    @property
    def restores(self) -> bool:
        """Whether it gives survivors of a lost member their layers back."""
        return all(group.phase is GroupPhase.DEGRADED for group in self.sources)

    def move(self, phase: AttemptPhase) -> None:
        """Go to `phase`."""
        assert (self.phase, phase) in TRANSITIONS, f"an attempt went from {self.phase} to {phase}"
        self.phase = phase

    def mark(self, transaction_id: int, revisions: dict[str, int]) -> Transact:
        """Write the attempt's id into the sources' records, which are at `revisions`."""
        return Transact(transaction_id, self.token, self.sources, group_revisions=revisions)

    def prepare(self, timeout_s: float) -> PrepareMembers:
        """Ask the members, once the sources are marked."""
        sources = tuple(Source(group, self.marked_revision) for group in self.sources)
        targets = tuple(group for group in self.targets if group.members)
        return PrepareMembers(self.attempt_id, self.token, sources, targets, timeout_s)

    def awaits(self, answer: MemberAnswered) -> bool:
        """Whether the answer comes from the very process that was asked."""
        worker = self.workers.get(answer.worker_id)
        return worker is not None and worker.incarnation == answer.incarnation

    def commit(self, transaction_id: int) -> Transact:
        """Write all targets and assignments, if nothing has changed since the attempt began."""
        assert self.ready == self.workers.keys(), "committed without all members' consent"
        marked = {group_id: self.marked_revision for group_id in self.source_ids}
        return Transact(
            transaction_id,
            self.token,
            self.targets,
            tuple(assignment_of(group, one) for group in self.targets for one in group.members),
            group_revisions=self.target_revisions | marked,
            assignment_revisions=self.assignment_revisions,
            worker_revisions={one.worker_id: one.mod_revision for one in self.workers.values()},
        )

    def change_in(self, records: Records) -> str | None:
        """Why the attempt cannot be committed any more: what has changed; None if nothing has."""
        for worker in self.workers.values():
            if records.workers.get(worker.worker_id) != worker:
                return f"{worker.worker_id} has left or was started anew"
        if self.phase is AttemptPhase.PREPARING:
            for group_id in self.source_ids:
                if records.group_revision(group_id) != self.marked_revision:
                    return f"the record of {group_id} was changed by somebody else"
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
