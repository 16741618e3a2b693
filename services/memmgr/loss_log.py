"""What the log says of lost members: one warning, however many members and attempts tell of it."""

import logging
from collections.abc import Collection

from services.core.groups.vocabulary import PrepareMembers

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
