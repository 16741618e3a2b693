"""Logs and keeps the reasons why groups were interrupted, for operators.

A group is interrupted if it loses a member, or if a member reports that the group cannot make
progress (`trouble`, `GroupStuck`). An *epoch* is the number of a group's configuration.
"""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from services.core.groups.records import Records
from services.core.groups.vocabulary import GroupStuck, PrepareMembers, Transact

log = logging.getLogger(__name__)


class LossLog:
    """Logs failures of groups: the first of a group and epoch as a warning, others at INFO."""

    def __init__(self) -> None:
        self._members: dict[str, int] = {}  # epoch of the last failure, by worker
        self._groups: dict[str, int] = {}  # epoch of the last warning, by group
        self._attempts: dict[str, tuple[str, int]] = {}  # newest attempt and its epoch, by group

    def keep_only(self, worker_ids: Collection[str], group_ids: Collection[str]) -> None:
        """Remove all other workers and groups, which no longer exist."""
        for known, kept in (
            (self._members, worker_ids),
            (self._groups, group_ids),
            (self._attempts, group_ids),
        ):
            for name in known.keys() - set(kept):
                del known[name]

    def note_trouble(self, worker_id: str, group_id: str, epoch: int, trouble: str) -> None:
        """Log the failure that a member reports; repeated reports of an epoch are ignored."""
        if self._members.get(worker_id) == epoch:
            return
        self._members[worker_id] = epoch
        level = self._level({group_id: epoch})
        log.log(level, "%s at epoch %d: %s", worker_id, epoch, trouble)

    def note_attempt(self, command: PrepareMembers) -> None:
        """Record the newest attempt of the source groups."""
        for source in command.sources:
            self._attempts[source.group.group_id] = (command.attempt, source.group.epoch)

    def note_failed(self, attempt: str, message: str) -> None:
        """Log a failed attempt without a request, such as a restore; it may fail repeatedly."""
        epochs = {
            group_id: epoch
            for group_id, (newest, epoch) in self._attempts.items()
            if newest == attempt
        }
        log.log(self._level(epochs), "attempt %s failed: %s", attempt, message)

    def _level(self, epochs: dict[str, int]) -> int:
        """WARNING, unless all these groups had a warning at these epochs."""
        if epochs and all(self._groups.get(group_id) == at for group_id, at in epochs.items()):
            return logging.INFO
        self._groups |= epochs
        return logging.WARNING


LOSSES_MAX = 100  # groups


@dataclass(frozen=True, slots=True)
class GroupLoss:
    """A failure that interrupted a group at `epoch`; `unix_s`: seconds since 1970."""

    group_id: str
    epoch: int
    unix_s: int
    reason: str


@dataclass(slots=True)
class Losses:
    """The last loss of each group since this process started; the oldest is evicted.

    Losses at the same epoch are merged, with the first time and the last reason: members report a
    broken connection before the lease of a dead worker ends.
    """

    _by_group: dict[str, GroupLoss] = field(default_factory=dict)  # the newest is last

    def __iter__(self) -> Iterator[GroupLoss]:
        return iter(self._by_group.values())

    def note_trouble(self, records: Records, event: GroupStuck, unix_s: int) -> None:
        """Record that a member reports its group as stuck; outdated reports are ignored."""
        worker = records.workers.get(event.worker_id)
        stored = records.assignments.get(event.worker_id)
        if stored is None or worker is None or worker.incarnation != event.incarnation:
            return
        group = records.groups.get(stored.assignment.group_id)
        if group is not None and len(group.group.members) > 1 and group.group.epoch == event.epoch:
            reason = f"{event.worker_id} reports: {event.reason}"
            self._note(GroupLoss(group.group.group_id, event.epoch, unix_s, reason))

    def note_transaction(self, records: Records, command: Transact, unix_s: int) -> None:
        """Record losses of members: groups that the transaction changes with members gone."""
        for written in command.groups:
            before = records.groups.get(written.group_id)
            if before is None or not records.is_live(written.group_id):
                continue
            registered = {(w.worker_id, w.incarnation) for w in records.workers.values()}
            gone = [
                member.worker_id
                for member in before.group.members
                if (member.worker_id, member.incarnation) not in registered
            ]
            if gone:
                reason = f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} gone"
                self._note(GroupLoss(written.group_id, before.group.epoch, unix_s, reason))

    def _note(self, loss: GroupLoss) -> None:
        before = self._by_group.pop(loss.group_id, None)
        if before is not None and before.epoch == loss.epoch:
            loss = GroupLoss(loss.group_id, loss.epoch, before.unix_s, loss.reason)
        self._by_group[loss.group_id] = loss
        if len(self._by_group) > LOSSES_MAX:
            del self._by_group[next(iter(self._by_group))]
