"""What made groups stop: members that are gone, connections that are lost. For people; pure."""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from services.core.groups.records import Records
from services.core.groups.vocabulary import GroupStuck, PrepareMembers, Transact

log = logging.getLogger(__name__)


class LossLog:
    """Warns of trouble in a group once at an epoch; all else about it is for information."""

    def __init__(self) -> None:
        self._members: dict[str, int] = {}  # epochs at which workers were in trouble last
        self._groups: dict[str, int] = {}  # epochs at which groups were warned of last
        self._attempts: dict[str, tuple[str, int]] = {}  # newest of each group, and its epoch

    def keep_only(self, worker_ids: Collection[str], group_ids: Collection[str]) -> None:
        """Forget all others, which are gone."""
        for known, kept in (
            (self._members, worker_ids),
            (self._groups, group_ids),
            (self._attempts, group_ids),
        ):
            for name in known.keys() - set(kept):
                del known[name]

    def note_trouble(self, worker_id: str, group_id: str, epoch: int, trouble: str) -> None:
        """A member tells of trouble at its group's epoch, and repeats it with every report."""
        if self._members.get(worker_id) == epoch:
            return
        self._members[worker_id] = epoch
        level = self._level({group_id: epoch})
        log.log(level, "%s at epoch %d: %s", worker_id, epoch, trouble)

    def note_attempt(self, command: PrepareMembers) -> None:
        """The members of some groups are asked to prepare."""
        for source in command.sources:
            self._attempts[source.group.group_id] = (command.attempt, source.group.epoch)

    def note_failed(self, attempt: str, message: str) -> None:
        """An attempt that nobody asked for has failed, as all do while a member is lost."""
        epochs = {
            group_id: epoch
            for group_id, (newest, epoch) in self._attempts.items()
            if newest == attempt
        }
        log.log(self._level(epochs), "attempt %s failed: %s", attempt, message)

    def _level(self, epochs: dict[str, int]) -> int:
        """A warning, unless all these groups were warned of at these epochs."""
        if epochs and all(self._groups.get(group_id) == at for group_id, at in epochs.items()):
            return logging.INFO
        self._groups |= epochs
        return logging.WARNING


LOSSES_MAX = 100


@dataclass(frozen=True, slots=True)
class GroupLoss:
    """A group could not go on as it was at `epoch`, since `unix_s` (seconds since 1970)."""

    group_id: str
    epoch: int
    unix_s: int
    reason: str


@dataclass(slots=True)
class Losses:
    """The last loss of each group, since this instance leads. The oldest ones go if there are many.

    What is told of one epoch is one loss: it has the first time, and the last reason, since members
    notice a broken connection before the lease of a dead worker ends.
    """

    _by_group: dict[str, GroupLoss] = field(default_factory=dict)  # the newest is last

    def __iter__(self) -> Iterator[GroupLoss]:
        return iter(self._by_group.values())

    def note_trouble(self, records: Records, event: GroupStuck, unix_s: int) -> None:
        """A member has reported that its group cannot go on; of a lone worker it is no loss."""
        worker = records.workers.get(event.worker_id)
        stored = records.assignments.get(event.worker_id)
        if stored is None or worker is None or worker.incarnation != event.incarnation:
            return
        group = records.groups.get(stored.assignment.group_id)
        if group is not None and len(group.group.members) > 1 and group.group.epoch == event.epoch:
            reason = f"{event.worker_id} reports: {event.reason}"
            self._note(GroupLoss(group.group.group_id, event.epoch, unix_s, reason))

    def note_transaction(self, records: Records, command: Transact, unix_s: int) -> None:
        """Groups are about to be written, some of them because members are gone."""
        for written in command.groups:
            before = records.groups.get(written.group_id)
            if before is None or not records.is_live(written.group_id):
                continue
            registered = {(one.worker_id, one.incarnation) for one in records.workers.values()}
            gone = [
                one.worker_id
                for one in before.group.members
                if (one.worker_id, one.incarnation) not in registered
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
