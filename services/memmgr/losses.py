"""What made groups stop: members that are gone, connections that are lost. For people; pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.core.groups.records import Records
from services.core.groups.vocabulary import GroupStuck, Transact

LOSSES_MAX = 100


@dataclass(frozen=True, slots=True)
class Loss:
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

    _by_group: dict[str, Loss] = field(default_factory=dict)  # the newest is last

    def __iter__(self) -> Iterator[Loss]:
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
            self._note(Loss(group.group.group_id, event.epoch, unix_s, reason))

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
                self._note(Loss(written.group_id, before.group.epoch, unix_s, reason))

    def _note(self, loss: Loss) -> None:
        before = self._by_group.pop(loss.group_id, None)
        if before is not None and before.epoch == loss.epoch:
            loss = Loss(loss.group_id, loss.epoch, before.unix_s, loss.reason)
        self._by_group[loss.group_id] = loss
        if len(self._by_group) > LOSSES_MAX:
            del self._by_group[next(iter(self._by_group))]
