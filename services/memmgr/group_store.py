"""Group records in etcd."""

from services.common.errors import StoreError
from services.common.etcd import Store
from services.common.membership import GROUPS, encode_record
from services.core.memory.group import GroupsListed, WriteGroup
from services.memmgr.translate import to_record, to_stored_groups


class GroupStore:
    """Reads and writes group records; writes are compare-and-swap."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def write(self, command: WriteGroup) -> bool:
        """Carry out a write; False if the record has changed meanwhile or no answer came.

        Without an answer it may have been applied: list before the next decision.
        """
        value = encode_record(to_record(command.group))
        try:
            return await self._store.put_if(
                f"{GROUPS}{command.group.group_id}", value, command.mod_revision
            )
        except StoreError:
            return False

    async def list(self) -> GroupsListed:
        """All group records.

        Raises:
            StoreError: if etcd does not answer.
        """
        return GroupsListed(to_stored_groups(await self._store.list_prefix(GROUPS)))
