"""The files of owners; their contents are objects of `ObjectFiles`."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    Row,
    Select,
    Table,
    and_,
    delete,
    insert,
    not_,
    or_,
    select,
    update,
)

from services.core.batches.vocabulary import ENDED
from services.gateway.batches.database import Database
from services.gateway.batches.errors import EntryInUse, no_such_file
from services.gateway.batches.records import file_row, file_values
from services.gateway.batches.rows import BatchRow, FileRow, NewFile
from services.gateway.batches.schema import batches, database_now, files

PAGE_MAX = 10_000
"""Maximum files per page, as in the OpenAI API."""


class FileStore:
    """Calls about files; each raises BatchStoreDown. A deleted or expired file does not exist."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, file: NewFile) -> FileRow:
        """Record a file whose object is complete."""
        return await self._database.write("add_file", lambda c: insert_file(c, file))

    async def get(self, owner: str, file_id: str) -> FileRow:
        """A file of the owner. Raises NoSuchEntry."""

        def run(connection: Connection) -> FileRow:
            return find_file(connection, owner, file_id)

        return await self._database.read("get_file", run)

    async def input_of(self, batch: BatchRow) -> FileRow:
        """The input of a batch that has not ended, even if its time has expired."""

        def run(connection: Connection) -> FileRow:
            statement = select(files).where(files.c.id == batch.input_file)
            return file_row(connection.execute(statement).one())

        return await self._database.read("input_of", run)

    async def page(
        self,
        owner: str,
        after: str | None = None,
        limit: int = PAGE_MAX,
        purpose: str | None = None,
        ascending: bool = False,
    ) -> tuple[list[FileRow], bool]:
        """At most `limit` files after the file `after`, and whether there are more; newest first.

        Raises:
            NoSuchEntry: if the owner has no file `after`.
        """

        def run(connection: Connection) -> tuple[list[FileRow], bool]:
            statement = _visible(owner)
            if purpose is not None:
                statement = statement.where(files.c.purpose == purpose)
            last = None if after is None else find_file(connection, owner, after)
            position = None if last is None else (last.created_s, last.file_id)
            rows, more = page_of(connection, statement, files, position, limit, ascending)
            return [file_row(row) for row in rows], more

        return await self._database.read("page_files", run)

    async def delete(self, owner: str, file_id: str) -> None:
        """Delete a file; its object becomes dead.

        Raises:
            NoSuchEntry: if the owner has no such file.
            EntryInUse: if a batch that has not ended reads it.
        """

        def run(connection: Connection) -> None:
            # Lock it first: a batch that is being created holds the lock until it is visible.
            find_file(connection, owner, file_id, lock=True)
            used = select(batches.c.id).where(
                batches.c.input_file == file_id, batches.c.state.not_in(list(ENDED))
            )
            if connection.execute(used.limit(1)).first() is not None:
                raise EntryInUse(
                    f"a batch reads the file {file_id[:128]!a}; cancel the batch, or wait for its"
                    " end",
                    param="file_id",
                )
            deleted = update(files).where(files.c.id == file_id)
            connection.execute(deleted.values(deleted_s=database_now()))

        await self._database.write("delete_file", run)

    async def dead_objects(self, names: Sequence[str]) -> list[str]:
        """Those of the named objects that belong to no file, or to a deleted or expired file."""

        def run(connection: Connection) -> list[str]:
            read = select(batches.c.input_file).where(batches.c.state.not_in(list(ENDED)))
            kept = select(files.c.object_name).where(
                files.c.object_name.in_(names), or_(and_(*_exists()), files.c.id.in_(read))
            )
            living = set(connection.scalars(kept))
            return [name for name in names if name not in living]

        return await self._database.read("dead_objects", run)


def insert_file(connection: Connection, file: NewFile) -> FileRow:
    """Insert a file."""
    values = file_values(file)
    connection.execute(insert(files).values(values))
    row = connection.execute(select(files).where(files.c.id == values["id"])).one()
    return file_row(row)


def delete_dead(connection: Connection) -> None:
    """Delete the rows of deleted and expired files that no batch refers to."""
    references = (batches.c.input_file, batches.c.output_file, batches.c.error_file)
    used = [files.c.id.in_(select(column).where(column.is_not(None))) for column in references]
    connection.execute(delete(files).where(not_(and_(*_exists())), not_(or_(*used))))


def find_file(connection: Connection, owner: str, file_id: str, *, lock: bool = False) -> FileRow:
    """A file of the owner; `lock`: it cannot be deleted, or put to use, until the end of the
    transaction. Raises NoSuchEntry."""
    statement = _visible(owner).where(files.c.id == file_id)
    if lock:
        statement = statement.with_for_update()
    row = connection.execute(statement).one_or_none()
    if row is None:
        raise no_such_file(file_id)
    return file_row(row)


def page_of(
    connection: Connection,
    statement: Select[Any],
    table: Table,
    position: tuple[float, str] | None,
    limit: int,
    ascending: bool,
) -> tuple[Sequence[Row[Any]], bool]:
    """At most `limit` rows by time and id, and whether there are more.

    `position`: time and id of the row before the first; `statement` selects from `table`.
    """
    created_s, row_id = table.c.created_s, table.c.id
    if position is not None:
        at_s, last = position
        follows = created_s > at_s if ascending else created_s < at_s
        tied = row_id > last if ascending else row_id < last
        statement = statement.where(or_(follows, and_(created_s == at_s, tied)))
    order = [created_s, row_id] if ascending else [created_s.desc(), row_id.desc()]
    rows = connection.execute(statement.order_by(*order).limit(limit + 1)).all()
    return rows[:limit], len(rows) > limit


def _visible(owner: str) -> Select[Any]:
    return select(files).where(files.c.owner == owner, *_exists())


def _exists() -> tuple[Any, ...]:
    unexpired = or_(files.c.expires_s.is_(None), files.c.expires_s > database_now())
    return files.c.deleted_s.is_(None), unexpired
