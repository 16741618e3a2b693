"""Groups that cannot go on although all their members are registered, as members report them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.groups.attempt import Attempt
from services.core.groups.records import Records
from services.core.groups.vocabulary import EngineHung, Group, GroupPhase, GroupStuck

REBUILDS_MAX = 2
"""How often in a row a group is made anew: its members may connect, and get nothing else across."""
REBUILD_WINDOW_S = 120.0
"""A group that goes on for so long has been cured. Longer than a leader waits for a microbatch that
is in its way for the `REBUILDS_MAX` + 1st time, which is 20 s."""


@dataclass(frozen=True, slots=True)
class _Rebuild:
    """A group was made anew at `at_s`, at this epoch, for the `count`th time in a row."""

    epoch: int
    count: int
    at_s: float

    def holds(self, epoch: int, now_s: float) -> bool:
        """Whether trouble of this epoch now is that of before."""
        return epoch == self.epoch and now_s - self.at_s < REBUILD_WINDOW_S


@dataclass(slots=True)
class StuckGroups:
    """StuckGroups groups by id, each at the epoch that is stuck: a later one is another matter.

    Entries go with the records of their groups, so there are no more of them than of these.
    """

    _reasons: dict[str, tuple[int, str]] = field(default_factory=dict)
    _iterations_s: dict[str, float] = field(default_factory=dict)  # the longest of a member
    # Making it anew has failed, or has not helped.
    _unrecoverable: dict[str, int] = field(default_factory=dict)
    _rebuilds: dict[str, _Rebuild] = field(default_factory=dict)
    _rebuilding: dict[str, Group] = field(
        default_factory=dict
    )  # by attempt: the group that is stuck
    # The processes, by worker, whose engines stand still.
    _hung: dict[str, str] = field(default_factory=dict)

    def note(self, records: Records, event: GroupStuck | EngineHung) -> None:
        """Take a report; one of another process or epoch has no effect."""
        if isinstance(event, EngineHung):
            self._note_hung(records, event)
        else:
            self._note_stuck(records, event)

    def _note_stuck(self, records: Records, event: GroupStuck) -> None:
        """A lone worker needs nobody else, so its report has no effect."""
        stored = records.assignments.get(event.worker_id)
        worker = records.workers.get(event.worker_id)
        if stored is None or worker is None or worker.incarnation != event.incarnation:
            return
        group = records.groups.get(stored.assignment.group_id)
        if group is None or len(group.group.members) < 2 or group.group.epoch != event.epoch:
            return
        iteration_s = event.iteration_s
        if self.is_stuck(group.group):  # another member has reported
            iteration_s = max(iteration_s, self._iterations_s[group.group.group_id])
        self._iterations_s[group.group.group_id] = iteration_s
        self._reasons[group.group.group_id] = (event.epoch, event.reason)
        before = self._rebuilds.get(group.group.group_id)
        again = before.count if before and before.holds(event.epoch, event.now_s) else 0
        if again >= REBUILDS_MAX:
            self._unrecoverable[group.group.group_id] = event.epoch
        for entries in (self._reasons, self._iterations_s, self._unrecoverable, self._rebuilds):
            for group_id in entries.keys() - records.groups.keys():
                del entries[group_id]

    def _note_hung(self, records: Records, event: EngineHung) -> None:
        worker = records.workers.get(event.worker_id)
        if worker is not None and worker.incarnation == event.incarnation:
            self._hung.pop(event.worker_id, None)
            if event.hung:
                self._hung[event.worker_id] = event.incarnation
        for name in self._hung.keys() - records.workers.keys():
            del self._hung[name]

    def _hung_of(self, processes: Iterable[tuple[str, str]]) -> list[str]:
        """The workers among these (id, incarnation) whose engines stand still."""
        return sorted(name for name, process in processes if self._hung.get(name) == process)

    def is_stuck(self, group: Group) -> bool:
        """Whether a member has said so of the group at its present epoch."""
        epoch, _ = self._reasons.get(group.group_id, (-1, ""))
        return epoch == group.epoch and group.phase is GroupPhase.STABLE

    def is_unrecoverable(self, group: Group) -> bool:
        """Whether the group is stuck, and its members did not find together again or cannot."""
        if not self.is_stuck(group):
            return False
        failed = self._unrecoverable.get(group.group_id) == group.epoch
        members = [(one.worker_id, one.incarnation) for one in group.members]
        return failed or bool(self._hung_of(members))

    def abort_reason(self, attempt: Attempt) -> str | None:
        """Why an attempt cannot succeed: a group that it changes is stuck, or beyond renewal."""
        if self.is_rebuild(attempt):
            asked = [(name, worker.incarnation) for name, worker in attempt.workers.items()]
            hung = self._hung_of(asked)
            return f"the engine of {', '.join(hung)} stands still" if hung else None
        for group in attempt.sources:
            if self.is_stuck(group):
                return f"{group.group_id} is stuck: {self._reasons[group.group_id][1]}"
        return None

    def rebuild_started(self, group: Group, attempt: Attempt) -> None:
        """An attempt has begun to make the group anew."""
        # A coordinator that lost its leadership leaves some behind.
        self._rebuilding = {
            name: one for name, one in self._rebuilding.items() if one.group_id != group.group_id
        }
        self._rebuilding[attempt.attempt_id] = group

    def iteration_s(self, attempt: Attempt) -> float:
        """How long a member of a group that is made anew may answer nothing."""
        group = self._rebuilding.get(attempt.attempt_id)
        return 0.0 if group is None else self._iterations_s.get(group.group_id, 0.0)

    def is_rebuild(self, attempt: Attempt) -> bool:
        """Whether the attempt makes a stuck group anew."""
        return attempt.attempt_id in self._rebuilding

    def committed(self, attempt: Attempt, now_s: float) -> None:
        """An attempt was committed; it may have made a group anew."""
        group = self._rebuilding.pop(attempt.attempt_id, None)
        if group is None:
            return
        before = self._rebuilds.get(group.group_id)
        again = before.count if before and before.holds(group.epoch, now_s) else 0
        self._rebuilds[group.group_id] = _Rebuild(attempt.epoch, again + 1, now_s)

    def rebuild_failed(self, attempt: Attempt) -> bool:
        """An attempt was aborted; whether it was to make a group anew, which is hopeless then."""
        group = self._rebuilding.pop(attempt.attempt_id, None)
        if group is None:
            return False
        self._unrecoverable[group.group_id] = group.epoch
        return True
