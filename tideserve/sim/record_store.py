"""The store of the group protocol: records with revisions, written all together or not at all."""

from collections.abc import Iterable

from services.core.groups.records import assignment_of
from services.core.groups.vocabulary import (
    ClusterListed,
    Group,
    GroupPhase,
    Member,
    StoredAssignment,
    StoredGroup,
    Transact,
    Worker,
)
from services.core.ids import group_id_of

TOKEN = 1
"""The token of the only coordinator."""
FIRST_EPOCH = 1


class RecordStore:
    """Begins with a group of its own for every worker."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.revision = 1
        self.workers = {worker.worker_id: worker for worker in workers}
        self.groups: dict[str, StoredGroup] = {}
        self.assignments: dict[str, StoredAssignment] = {}
        for worker in self.workers.values():
            member = Member(worker.worker_id, worker.incarnation, 0, worker.num_layers)
            group_id = group_id_of(worker.worker_id)
            group = Group(group_id, FIRST_EPOCH, GroupPhase.STABLE, (member,), worker.model)
            self.groups[group_id] = StoredGroup(group, self.revision)
            assignment = assignment_of(group, member)
            self.assignments[worker.worker_id] = StoredAssignment(assignment, self.revision)

    def listing(self, now_s: float) -> ClusterListed:
        """All records."""
        return ClusterListed(
            now_s,
            self.revision,
            tuple(self.workers.values()),
            tuple(self.groups.values()),
            tuple(self.assignments.values()),
        )

    def write(self, command: Transact) -> int | None:
        """The revision at which it was committed; None if what it rests on has changed."""
        if command.token != TOKEN or not self._holds(command):
            return None
        self.revision += 1
        for group in command.groups:
            self.groups[group.group_id] = StoredGroup(group, self.revision)
        for assignment in command.assignments:
            stored = StoredAssignment(assignment, self.revision)
            self.assignments[assignment.worker_id] = stored
        return self.revision

    def _holds(self, command: Transact) -> bool:
        groups = {key: stored.mod_revision for key, stored in self.groups.items()}
        assignments = {key: stored.mod_revision for key, stored in self.assignments.items()}
        workers = {key: worker.mod_revision for key, worker in self.workers.items()}
        return all(
            found.get(key, 0) == revision
            for found, wanted in (
                (groups, command.group_revisions),
                (assignments, command.assignment_revisions),
                (workers, command.worker_revisions),
            )
            for key, revision in wanted.items()
        )
