"""The batch store: files, batches and their lines in a database that gateways share.

Each line ends exactly once. The leader's token fences it: `lead` increases the token in the
database, and every write of a leader compares its token with the database's. A gateway that was
suspended while another one took over thus changes nothing, and learns it by `Fenced`.

Every method raises `BatchStoreDown` (503) if the database does not answer. Methods that take a
`token` are the leader's, and raise `Fenced` if another gateway leads.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, Select, and_, delete, func, insert, select, update

from services.core.batches.vocabulary import (
    ENDED,
    BatchState,
    LineState,
    check_batch_transition,
    check_line_transition,
    final_state,
)
from services.gateway.batches.database import Database, Observer
from services.gateway.batches.errors import EntryInUse, no_such_batch
from services.gateway.batches.file_store import (
    FileStore,
    delete_dead,
    find_file,
    insert_file,
    page_of,
)
from services.gateway.batches.leadership import check_token, lead, renew
from services.gateway.batches.line_store import Fact, LineStore
from services.gateway.batches.owner_limits import check_count, check_tokens
from services.gateway.batches.records import batch_row, batch_values, errors_text
from services.gateway.batches.rows import BatchRow, LineError, NewBatch, NewFile, OpenBatch
from services.gateway.batches.schema import ENTERED, OPEN, batches, database_now, lines
from services.gateway.vocabulary.errors import IdempotencyKeyReused

PAGE_MAX = 100
"""Maximum batches per page, as in the OpenAI API."""
CLEARED_LINES = 2000
"""Lines of ended batches that a call of `advance` deletes."""


class BatchStore:
    """Batches, and through `files` and `lines` the calls about these."""

    def __init__(
        self,
        url: str,
        observe: Observer = lambda name, seconds, failed: None,
        record: Callable[[Fact], None] = lambda fact: None,
    ) -> None:
        """`url` as in `open_engine`; `observe` is called by threads; `record` writes facts into the
        event log. Raises ConfigError."""
        self._database = Database(url, observe)
        self.files = FileStore(self._database)
        self.lines = LineStore(self._database, record)

    async def close(self) -> None:
        """Commit the calls that wait, and close the database."""
        await self._database.close()

    async def create(
        self, batch: NewBatch, tokens_max: int | None = None, open_max: int | None = None
    ) -> tuple[BatchRow, bool]:
        """Create a batch in VALIDATING, and return whether it is new.

        If the owner has used the idempotency key before, returns the batch of that time.
        `tokens_max`: limit of the estimated tokens of all batches of the owner that have not ended;
        `open_max`: limit of their number.

        Raises:
            NoSuchEntry: if the owner has no such input file.
            IdempotencyKeyReused: if the key belongs to a batch of other fields.
            OverQuota: if the owner's batches would exceed `tokens_max` or `open_max`.
        """

        def run(connection: Connection) -> tuple[BatchRow, bool]:
            if (earlier := _by_key(connection, batch)) is not None:
                return earlier, False
            find_file(connection, batch.owner, batch.input_file, lock=True)
            # A repeated request may have waited for the lock of the first.
            if (earlier := _by_key(connection, batch)) is not None:
                return earlier, False
            if tokens_max is not None:
                check_tokens(connection, batch.owner, batch.tokens, tokens_max)
            if open_max is not None:
                check_count(connection, batch.owner, open_max)
            values = batch_values(batch)
            connection.execute(insert(batches).values(values))
            return _get(connection, values["id"]), True

        return await self._database.write("create", run)

    async def get(self, owner: str, batch_id: str) -> BatchRow:
        """A batch of the owner. Raises NoSuchEntry."""
        return await self._database.read("get", lambda c: _find(c, owner, batch_id))

    async def page(
        self, owner: str, after: str | None = None, limit: int = PAGE_MAX
    ) -> tuple[list[BatchRow], bool]:
        """At most `limit` batches after the batch `after`, newest first, and whether there are
        more. Raises NoSuchEntry if the owner has no batch `after`."""

        def run(connection: Connection) -> tuple[list[BatchRow], bool]:
            last = None if after is None else _find(connection, owner, after)
            position = None if last is None else (last.created_s, last.batch_id)
            statement = select(batches).where(batches.c.owner == owner)
            rows, more = page_of(connection, statement, batches, position, limit, False)
            return [batch_row(row) for row in rows], more

        return await self._database.read("page", run)

    async def open(self) -> list[BatchRow]:
        """The batches of all owners that have not ended, oldest first."""

        def run(connection: Connection) -> list[BatchRow]:
            return [batch_row(row) for row in connection.execute(_opened(select(batches)))]

        return await self._database.read("open", run)

    async def cancel(self, owner: str, batch_id: str) -> BatchRow:
        """Cancel a batch; the leader then interrupts its lines. Repeated calls have no effect.

        Raises:
            NoSuchEntry: if the owner has no such batch.
            EntryInUse: if the batch has ended otherwise, or writes its files.
        """

        def run(connection: Connection) -> BatchRow:
            batch = _find(connection, owner, batch_id, lock=True)
            if batch.state in (BatchState.VALIDATING, BatchState.IN_PROGRESS):
                _enter(connection, batch, BatchState.CANCELLING)
            elif batch.state not in (BatchState.CANCELLING, BatchState.CANCELLED):
                raise EntryInUse(
                    f"the batch is {batch.state} and can no longer be cancelled; retrieve its"
                    " files",
                    param="batch_id",
                )
            return _get(connection, batch_id)

        return await self._database.write("cancel", run)

    async def lead(self, election: int) -> int:
        """Become the leader with the token of an election, and return the store's token.

        The lines of the former leader are pending again, with their tokens so far.

        Raises:
            Fenced: if the winner of a later election leads; campaign again.
        """
        return await self._database.write("lead", lambda c: lead(c, election))

    async def advance(self, token: int) -> list[OpenBatch]:
        """End what is due, and return the batches that have not ended, oldest first.

        To be called about once a second, also as a sign of life. Pending lines of a batch that is
        cancelled, or past its window, end; a batch without open lines becomes FINALIZING; a batch
        that is still validated at the end of its window fails. The caller then validates those in
        VALIDATING (`LineStore.add`, then `begin` or `fail`), interrupts the lines of those that are
        `stopping`, and writes the files of those that are `writable` (`conclude`).
        """

        def run(connection: Connection) -> list[OpenBatch]:
            renew(connection, token)
            late = (batches.c.expires_s <= database_now()).label("late")
            rows = connection.execute(_opened(select(batches, late))).all()
            advanced = [_advance(connection, batch_row(row), bool(row.late)) for row in rows]
            _clear_lines(connection)
            return [batch for batch in advanced if batch.batch.state not in ENDED]

        return await self._database.write("advance", run)

    async def begin(
        self, token: int, batch_id: str, total: int, tokens: int, tokens_max: int | None = None
    ) -> bool:
        """Let the `total` lines of a validated batch run; `tokens` is their estimate.

        Returns False if the batch was cancelled meanwhile.

        Raises:
            OverQuota: if the owner's batches would exceed `tokens_max`, as in `create`.
        """
        values = {"total": total, "tokens": tokens}
        return await self._validated(token, batch_id, BatchState.IN_PROGRESS, values, tokens_max)

    async def fail(self, token: int, batch_id: str, errors: Sequence[LineError]) -> bool:
        """End a batch whose input is invalid; False if it was cancelled meanwhile."""
        values = {"errors": errors_text(tuple(errors))}
        return await self._validated(token, batch_id, BatchState.FAILED, values)

    async def conclude(
        self, token: int, batch_id: str, output: NewFile | None, errors: NewFile | None
    ) -> bool:
        """End a batch whose files are written, and record the files; the rows are the commit.

        Returns False, and records nothing, if the batch is not `writable`.
        """

        def run(connection: Connection) -> bool:
            check_token(connection, token)
            batch = _get(connection, batch_id, lock=True)
            if not _is_writable(batch):
                return False
            written = (("output_file", output), ("error_file", errors))
            values = {
                column: insert_file(connection, file).file_id
                for column, file in written
                if file is not None
            }
            _enter(connection, batch, final_state(batch.state), values)
            return True

        return await self._database.write("conclude", run)

    async def forget(self, token: int, keep_s: float) -> None:
        """Delete batches that ended more than `keep_s` ago, and files that nothing refers to."""

        def run(connection: Connection) -> None:
            check_token(connection, token)
            times = [batches.c[ENTERED[state]] for state in ENDED]
            ended_s = func.coalesce(*times)
            old = and_(batches.c.cleared == 1, ended_s < database_now() - keep_s)
            connection.execute(delete(batches).where(old))
            delete_dead(connection)

        await self._database.write("forget", run)

    async def _validated(
        self,
        token: int,
        batch_id: str,
        state: BatchState,
        values: dict[str, Any],
        tokens_max: int | None = None,
    ) -> bool:
        def run(connection: Connection) -> bool:
            check_token(connection, token)
            batch = _get(connection, batch_id, lock=True)
            if batch.state is not BatchState.VALIDATING:
                return False
            if tokens_max is not None:
                check_tokens(connection, batch.owner, values["tokens"], tokens_max, but=batch_id)
            _enter(connection, batch, state, values)
            return True

        return await self._database.write("validated", run)


def _opened(statement: Select[Any]) -> Select[Any]:
    """The batches that have not ended, oldest first."""
    return statement.where(batches.c.state.in_(OPEN)).order_by(batches.c.created_s, batches.c.id)


def _get(connection: Connection, batch_id: str, *, lock: bool = False) -> BatchRow:
    statement = select(batches).where(batches.c.id == batch_id)
    if lock:
        statement = statement.with_for_update()
    row = connection.execute(statement).one_or_none()
    if row is None:
        raise no_such_batch(batch_id)
    return batch_row(row)


def _find(connection: Connection, owner: str, batch_id: str, *, lock: bool = False) -> BatchRow:
    batch = _get(connection, batch_id, lock=lock)
    if batch.owner != owner:
        raise no_such_batch(batch_id)
    return batch


def _by_key(connection: Connection, batch: NewBatch) -> BatchRow | None:
    """The batch that the owner created with the same idempotency key."""
    if batch.idempotency_key is None:
        return None
    row = connection.execute(
        select(batches).where(
            batches.c.owner == batch.owner, batches.c.idempotency_key == batch.idempotency_key
        )
    ).one_or_none()
    if row is None:
        return None
    earlier = batch_row(row)
    fields = ("endpoint", "input_file", "window_s", "metadata", "output_keep_s")
    if any(getattr(earlier, name) != getattr(batch, name) for name in fields):
        raise IdempotencyKeyReused(
            "this Idempotency-Key was used for another batch; repeat the fields of that batch, or"
            " choose a new key"
        )
    return earlier


def _enter(
    connection: Connection,
    batch: BatchRow,
    state: BatchState,
    values: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Move a batch, whose row is locked, to a state."""
    check_batch_transition(batch.state, state)
    moved = update(batches).where(batches.c.id == batch.batch_id, batches.c.state == batch.state)
    result = connection.execute(
        moved.values({"state": state, ENTERED[state]: database_now(), **values})
    )
    assert result.rowcount == 1, f"another transaction moved batch {batch.batch_id}"


def _advance(connection: Connection, batch: BatchRow, late: bool) -> OpenBatch:
    """End what is due in a batch past its window (`late`), or not."""
    if batch.state is BatchState.VALIDATING and late:
        batch = _fail_late(connection, batch)
    began = BatchState.IN_PROGRESS in batch.entered_s
    stopping = batch.state is BatchState.CANCELLING or (
        batch.state is BatchState.IN_PROGRESS and late
    )
    if began and stopping and batch.open:
        cancelled = batch.state is BatchState.CANCELLING
        _drop_lines(connection, batch, LineState.CANCELLED if cancelled else LineState.EXPIRED)
        batch = _get(connection, batch.batch_id)
    if batch.state is BatchState.IN_PROGRESS and not batch.open and not batch.dropped:
        batch = _get(connection, batch.batch_id, lock=True)
        # It may have been cancelled since it was read.
        if batch.state is BatchState.IN_PROGRESS:
            _enter(connection, batch, BatchState.FINALIZING)
            batch = _get(connection, batch.batch_id)
    return OpenBatch(batch, stopping, _is_writable(batch))


def _fail_late(connection: Connection, batch: BatchRow) -> BatchRow:
    """End a batch whose window ended before its validation."""
    batch = _get(connection, batch.batch_id, lock=True)
    # It may have been cancelled since it was read.
    if batch.state is not BatchState.VALIDATING:
        return batch
    error = LineError(
        "batch_expired",
        "the completion window ended before the file was validated; create the batch again with a"
        " longer window",
    )
    _enter(connection, batch, BatchState.FAILED, {"errors": errors_text((error,))})
    return _get(connection, batch.batch_id)


def _drop_lines(connection: Connection, batch: BatchRow, state: LineState) -> None:
    """End the pending lines of a batch without a result."""
    check_line_transition(LineState.PENDING, state)
    pending = update(lines).where(
        lines.c.batch == batch.batch_id, lines.c.state == LineState.PENDING
    )
    dropped = connection.execute(pending.values(state=state)).rowcount
    counted = update(batches).where(batches.c.id == batch.batch_id)
    connection.execute(counted.values(dropped=batches.c.dropped + dropped))


def _is_writable(batch: BatchRow) -> bool:
    """Whether all lines have ended, so that the files can be written."""
    match batch.state:
        case BatchState.FINALIZING:
            return True
        case BatchState.CANCELLING:
            return not batch.open
        case BatchState.IN_PROGRESS:
            return not batch.open and batch.dropped > 0
    return False


def _clear_lines(connection: Connection) -> None:
    """Delete lines of a batch that has ended: the results are in its files."""
    ended = select(batches.c.id).where(batches.c.state.in_(list(ENDED)), batches.c.cleared == 0)
    batch_id = connection.scalar(ended.limit(1))
    if batch_id is None:
        return
    some = select(lines.c.line).where(lines.c.batch == batch_id).limit(CLEARED_LINES)
    deleted = connection.execute(
        delete(lines).where(lines.c.batch == batch_id, lines.c.line.in_(some))
    )
    if deleted.rowcount < CLEARED_LINES:
        connection.execute(update(batches).where(batches.c.id == batch_id).values(cleared=1))
