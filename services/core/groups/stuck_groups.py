"""Tracks groups that members report as stuck, although all members hold their etcd leases.

A group is *stuck* if it cannot make progress, because a connection between members is cut or a
process hangs. The group protocol then *rebuilds* it: a change with the same members and layers,
which reconnect. An *incarnation* identifies a process of a worker.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.groups.attempt import Attempt
from services.core.groups.records import Records
from services.core.groups.vocabulary import EngineHung, Group, GroupPhase, GroupStuck

REBUILDS_MAX = 2
"""Consecutive rebuilds of a group: over a broken network path members may connect, but frames are
lost, so further rebuilds would not help."""
REBUILD_WINDOW_S = 120.0
"""A group that serves this long after a rebuild has recovered. Longer than the 20 s that a leader
waits for an overdue microbatch the third time in a row: else this failure would count as the
first."""


@dataclass(frozen=True, slots=True)
class _Rebuild:
    """The last rebuild of a group."""

    epoch: int  # of its commit
    count: int  # consecutive rebuilds
    at_s: float  # time of the commit

    def covers(self, epoch: int, now_s: float) -> bool:
        """Whether a failure at `epoch` now belongs to the same failure as the rebuild."""
        return epoch == self.epoch and now_s - self.at_s < REBUILD_WINDOW_S


@dataclass(slots=True)
class StuckGroups:
    """Stuck groups and their rebuilds. A report applies to a group at an epoch, not to later ones.

    Entries are removed with their group's record, which bounds their number.
    """

    _reasons: dict[str, tuple[int, str]] = field(default_factory=dict)  # epoch, reason; by group
    _iterations_s: dict[str, float] = field(default_factory=dict)  # longest reported, by group
    # Epoch at which a rebuild failed or will not help, by group.
    _unrecoverable: dict[str, int] = field(default_factory=dict)
    _rebuilds: dict[str, _Rebuild] = field(default_factory=dict)  # last committed, by group
    _rebuilding: dict[str, Group] = field(default_factory=dict)  # stuck group, by attempt
    _hung: dict[str, str] = field(default_factory=dict)  # incarnation of a hung engine, by worker
    # Members of groups whose rebuild timed out, until their next change commits: one may hang.
    _silent: set[str] = field(default_factory=set)

    def note(self, records: Records, event: GroupStuck | EngineHung) -> None:
        """Record a report; reports of another incarnation or epoch are ignored."""
        if isinstance(event, EngineHung):
            self._note_hung(records, event)
        else:
            self._note_stuck(records, event)

    def _note_stuck(self, records: Records, event: GroupStuck) -> None:
        """Record a stuck group; reports of singleton groups, which have no peers, are ignored."""
        stored = records.assignments.get(event.worker_id)
        worker = records.workers.get(event.worker_id)
        if stored is None or worker is None or worker.incarnation != event.incarnation:
            return
        group = records.groups.get(stored.assignment.group_id)
        if group is None or len(group.group.members) < 2 or group.group.epoch != event.epoch:
            return
        iteration_s = event.iteration_s
        # Keep the slowest iteration of all members: a rebuild must give each time to respond.
        if self.is_stuck(group.group):
            iteration_s = max(iteration_s, self._iterations_s[group.group.group_id])
        self._iterations_s[group.group.group_id] = iteration_s
        self._reasons[group.group.group_id] = (event.epoch, event.reason)
        before = self._rebuilds.get(group.group.group_id)
        # If the group is stuck again soon after `REBUILDS_MAX` rebuilds, another will not help.
        count = before.count if before and before.covers(event.epoch, event.now_s) else 0
        if count >= REBUILDS_MAX:
            self._unrecoverable[group.group.group_id] = event.epoch
        for entries in (self._reasons, self._iterations_s, self._unrecoverable, self._rebuilds):
            for group_id in entries.keys() - records.groups.keys():
                del entries[group_id]
        self._silent &= records.workers.keys()

    def _note_hung(self, records: Records, event: EngineHung) -> None:
        worker = records.workers.get(event.worker_id)
        if worker is not None and worker.incarnation == event.incarnation:
            self._hung.pop(event.worker_id, None)
            if event.hung:
                self._hung[event.worker_id] = event.incarnation
        for name in self._hung.keys() - records.workers.keys():
            del self._hung[name]

    def _hung_of(self, processes: Iterable[tuple[str, str]]) -> list[str]:
        """Ids of the workers among these (id, incarnation) whose engines hang."""
        return sorted(name for name, process in processes if self._hung.get(name) == process)

    @property
    def suspects(self) -> frozenset[str]:
        """Ids of the workers that may hang although they are registered."""
        return frozenset(self._hung.keys() | self._silent)

    def is_stuck(self, group: Group) -> bool:
        """Whether a member reported the group as stuck at its current epoch."""
        epoch, _ = self._reasons.get(group.group_id, (-1, ""))
        return epoch == group.epoch and group.phase is GroupPhase.STABLE

    def is_unrecoverable(self, group: Group) -> bool:
        """Whether the group is stuck, and a rebuild failed, did not help, or cannot succeed."""
        if not self.is_stuck(group):
            return False
        failed = self._unrecoverable.get(group.group_id) == group.epoch
        members = [(member.worker_id, member.incarnation) for member in group.members]
        return failed or bool(self._hung_of(members))

    def abort_reason(self, attempt: Attempt) -> str | None:
        """Why an attempt cannot succeed: a source group is stuck, or an engine hangs."""
        if self.is_rebuild(attempt):
            members = [(name, worker.incarnation) for name, worker in attempt.workers.items()]
            hung = self._hung_of(members)
            return f"the engine of {', '.join(hung)} hangs" if hung else None
        for group in attempt.sources:
            if self.is_stuck(group):
                return f"{group.group_id} is stuck: {self._reasons[group.group_id][1]}"
        return None

    def note_rebuild_started(self, group: Group, attempt: Attempt) -> None:
        """Record that the attempt rebuilds the group."""
        # Remove earlier attempts of this group: a loss of leadership ends attempts without a call.
        self._rebuilding = {
            attempt_id: stuck
            for attempt_id, stuck in self._rebuilding.items()
            if stuck.group_id != group.group_id
        }
        self._rebuilding[attempt.attempt_id] = group

    def iteration_s(self, attempt: Attempt) -> float:
        """How long an iteration may delay a member's answer in a rebuild; 0 for other attempts."""
        group = self._rebuilding.get(attempt.attempt_id)
        return 0.0 if group is None else self._iterations_s.get(group.group_id, 0.0)

    def is_rebuild(self, attempt: Attempt) -> bool:
        """Whether the attempt rebuilds a stuck group."""
        return attempt.attempt_id in self._rebuilding

    def note_committed(self, attempt: Attempt, now_s: float) -> None:
        """Count the rebuild, if the committed attempt is a rebuild."""
        self._silent -= attempt.workers.keys()
        group = self._rebuilding.pop(attempt.attempt_id, None)
        if group is None:
            return
        before = self._rebuilds.get(group.group_id)
        count = before.count if before and before.covers(group.epoch, now_s) else 0
        self._rebuilds[group.group_id] = _Rebuild(attempt.epoch, count + 1, now_s)

    def note_rebuild_failed(self, attempt: Attempt, now_s: float) -> bool:
        """Mark the group of an aborted rebuild as unrecoverable; False if it was no rebuild."""
        group = self._rebuilding.pop(attempt.attempt_id, None)
        if group is None:
            return False
        self._unrecoverable[group.group_id] = group.epoch
        if 0 < attempt.deadline_s <= now_s:
            self._silent |= attempt.workers.keys()
        return True
