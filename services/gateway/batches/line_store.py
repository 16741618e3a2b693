"""The lines of batches: written and read by the leader, which its token fences."""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update

from services.core.audit.facts import LineEnded, LinesClaimed
from services.core.batches.vocabulary import BatchState, LineState
from services.gateway.batches.database import Database
from services.gateway.batches.leadership import check_token, renew
from services.gateway.batches.rows import (
    ClaimedLine,
    LineProgress,
    LineResult,
    NewLine,
    OutputLine,
    ReturnedLine,
)
from services.gateway.batches.schema import batches, database_now, lines

Fact = LinesClaimed | LineEnded
ADD_MAX = 1000
"""Maximum lines per call of `add`."""
PAGE_LINES = 256
PAGE_BYTES = 4 * 2**20
"""Lines and bytes of a page of `ended`, which has at least one line."""


class LineStore:
    """Calls of the leader; each raises BatchStoreDown, and Fenced if another gateway leads."""

    def __init__(self, database: Database, record: Callable[[Fact], None]) -> None:
        """`record` writes facts into the event log."""
        self._database = database
        self._record = record

    async def add(self, token: int, batch_id: str, added: Sequence[NewLine]) -> bool:
        """Store validated lines of a batch; they run once `BatchStore.begin` returns.

        False, without effect: the batch is not in VALIDATING any more.
        """

        def run(connection: Connection) -> bool:
            check_token(connection, token)
            if validating := _is_validating(connection, batch_id):
                connection.execute(insert(lines), [_row(batch_id, line) for line in added])
            return validating

        assert len(added) <= ADD_MAX
        return await self._database.write("add", run)

    async def clear(self, token: int, batch_id: str) -> bool:
        """Delete the lines that an interrupted validation stored; False: as in `add`."""

        def run(connection: Connection) -> bool:
            check_token(connection, token)
            if validating := _is_validating(connection, batch_id):
                connection.execute(delete(lines).where(lines.c.batch == batch_id))
            return validating

        return await self._database.write("clear", run)

    async def claim(self, token: int, batch_id: str, count: int) -> list[ClaimedLine]:
        """Take at most `count` lines to run, in their order; none if the batch is not in progress.

        A claimed line is this leader's until `finish` or `give_back`, or until another one leads.
        """

        def run(connection: Connection) -> list[ClaimedLine]:
            check_token(connection, token)
            rows = connection.execute(
                select(
                    *(lines.c.line, lines.c.custom_id, lines.c.offset, lines.c.length),
                    *(lines.c.attempts, lines.c.output_ids),
                )
                .select_from(lines.join(batches, batches.c.id == lines.c.batch))
                .where(
                    lines.c.batch == batch_id,
                    lines.c.state == LineState.PENDING,
                    lines.c.not_before_s <= database_now(),
                    batches.c.state == BatchState.IN_PROGRESS,
                    batches.c.expires_s > database_now(),
                )
                .order_by(lines.c.sort_key, lines.c.line)
                .limit(count)
            ).all()
            if rows:
                claimed = lines.c.line.in_([row.line for row in rows])
                connection.execute(
                    update(lines)
                    .where(lines.c.batch == batch_id, claimed)
                    .values(state=LineState.RUNNING, token=token)
                )
            return [
                ClaimedLine(
                    *(batch_id, row.line, row.custom_id, row.offset, row.length, row.attempts),
                    _unpacked(row.output_ids),
                )
                for row in rows
            ]

        claimed = await self._database.write("claim", run)
        if claimed:
            numbers = tuple(line.line for line in claimed)
            self._record(LinesClaimed(token, batch_id, numbers))
        return claimed

    async def release_others(self, token: int, held: Collection[tuple[str, int]]) -> None:
        """Make the lines pending that run under `token` but are not `held`, by batch and line.

        A claim that failed may have been committed. Call it while no other claim runs.
        """

        def run(connection: Connection) -> None:
            # Its lock waits for a transaction of a lost connection.
            renew(connection, token)
            open_batches = select(batches.c.id).where(batches.c.state == BatchState.IN_PROGRESS)
            running = select(lines.c.batch, lines.c.line).where(
                lines.c.batch.in_(open_batches),
                lines.c.state == LineState.RUNNING,
                lines.c.token == token,
            )
            others = [row for row in connection.execute(running) if tuple(row) not in held]
            if others:
                statement = _held(token).values(state=LineState.PENDING)
                connection.execute(statement, [{"b": row.batch, "n": row.line} for row in others])

        await self._database.write("release_others", run)

    async def finish(self, token: int, result: LineResult) -> bool:
        """End a line with its result; returns once it is committed.

        False: the line is not running under this token, and keeps the result that it has.
        """
        ended: bool = await self._database.write_grouped("finish", _finish, token, (token, result))
        if ended:
            self._record(LineEnded(token, result.batch_id, result.line, result.status))
        return ended

    async def progress(self, token: int, running: Sequence[LineProgress]) -> None:
        """Store the tokens of running lines, so that the next leader continues after them."""

        def run(connection: Connection) -> None:
            check_token(connection, token)
            if running:
                statement = _held(token).values(output_ids=bindparam("ids"))
                connection.execute(
                    statement,
                    [
                        {"b": line.batch_id, "n": line.line, "ids": _packed(line.output_ids)}
                        for line in running
                    ],
                )

        await self._database.write("progress", run)

    async def give_back(self, token: int, returned: Sequence[ReturnedLine]) -> None:
        """Make running lines pending again."""
        await self._database.write_grouped("give_back", _give_back, token, (token, returned))

    async def ended(self, batch_id: str, after_line: int) -> list[OutputLine]:
        """The next ended lines after a line, in input order: a page of bounded size."""

        def run(connection: Connection) -> list[OutputLine]:
            ended = (
                lines.c.batch == batch_id,
                lines.c.line > after_line,
                lines.c.state.not_in([LineState.PENDING, LineState.RUNNING]),
            )
            sizes = select(lines.c.line, func.coalesce(func.length(lines.c.result), 0))
            numbers = _page(
                connection.execute(sizes.where(*ended).order_by(lines.c.line).limit(PAGE_LINES))
            )
            rows = connection.execute(
                select(
                    *(lines.c.line, lines.c.custom_id, lines.c.state),
                    *(lines.c.status, lines.c.request_id, lines.c.result),
                )
                .where(lines.c.batch == batch_id, lines.c.line.in_(numbers))
                .order_by(lines.c.line)
            )
            return [
                OutputLine(
                    row.line,
                    row.custom_id,
                    LineState(row.state),
                    row.status,
                    row.request_id,
                    row.result or b"",
                )
                for row in rows
            ]

        return await self._database.read("ended", run)


def _is_validating(connection: Connection, batch_id: str) -> bool:
    """Whether the batch is in VALIDATING; it cannot be cancelled before the transaction ends."""
    state = select(batches.c.state).where(batches.c.id == batch_id).with_for_update(read=True)
    return connection.scalar(state) == BatchState.VALIDATING


def _page(sizes: Iterable[Row[int, int]]) -> list[int]:
    """The first lines, given line and size, that fit into a page."""
    numbers: list[int] = []
    total = 0
    for number, size in sizes:
        total += size
        if numbers and total > PAGE_BYTES:
            break
        numbers.append(number)
    return numbers


def _row(batch_id: str, line: NewLine) -> dict[str, Any]:
    return {
        "batch": batch_id,
        "line": line.line,
        "custom_id": line.custom_id,
        "offset": line.offset,
        "length": line.length,
        "sort_key": line.sort_key,
        "state": LineState.PENDING,
        "token": 0,
        "attempts": 0,
        "not_before_s": 0.0,
        "status": 0,
        "request_id": "",
    }


def _held(token: Any) -> Any:
    """An update of line `n` of batch `b` if it runs under the token."""
    return update(lines).where(
        lines.c.batch == bindparam("b"),
        lines.c.line == bindparam("n"),
        lines.c.state == LineState.RUNNING,
        lines.c.token == token,
    )


_ENDED = _held(bindparam("t")).values(
    state=bindparam("to"),
    status=bindparam("code"),
    request_id=bindparam("request"),
    result=bindparam("body"),
    output_ids=None,
)


def _finish(connection: Connection, calls: Sequence[tuple[int, LineResult]]) -> list[bool]:
    """End lines of one leader; whether each was running under its token."""
    token = calls[0][0]
    check_token(connection, token)
    running = _running(connection, token, calls)
    outcomes = []
    ends = []
    counts: dict[str, Counter[str]] = {}
    for _, result in calls:
        key = result.batch_id, result.line
        outcomes.append(key in running)
        if key not in running:
            continue
        running.discard(key)
        ends.append(
            {
                "b": result.batch_id,
                "n": result.line,
                "to": LineState.FAILED if result.error else LineState.DONE,
                "code": result.status,
                "request": result.request_id,
                "body": result.body,
            }
        )
        counts.setdefault(result.batch_id, Counter()).update(
            completed=int(not result.error),
            failed=int(result.error),
            prompt_tokens=result.prompt_tokens,
            output_tokens=result.output_tokens,
            cached_tokens=result.cached_tokens,
        )
    if ends:
        connection.execute(_ENDED, [end | {"t": token} for end in ends])
    for batch_id, added in counts.items():
        connection.execute(
            update(batches)
            .where(batches.c.id == batch_id)
            .values({batches.c[name]: batches.c[name] + count for name, count in added.items()})
        )
    return outcomes


def _running(
    connection: Connection, token: int, calls: Sequence[tuple[int, LineResult]]
) -> set[tuple[str, int]]:
    """Those lines of the calls that run under the token.

    Only the leader changes lines, and no other can lead before the end of this transaction.
    """
    numbers: dict[str, list[int]] = {}
    for _, result in calls:
        numbers.setdefault(result.batch_id, []).append(result.line)
    running: set[tuple[str, int]] = set()
    for batch_id, batch_lines in numbers.items():
        held = select(lines.c.line).where(
            lines.c.batch == batch_id,
            lines.c.line.in_(batch_lines),
            lines.c.state == LineState.RUNNING,
            lines.c.token == token,
        )
        running |= {(batch_id, line) for line in connection.scalars(held)}
    return running


def _give_back(
    connection: Connection, calls: Sequence[tuple[int, Sequence[ReturnedLine]]]
) -> list[None]:
    """Make lines of one leader pending again."""
    token = calls[0][0]
    check_token(connection, token)
    for line in (line for _, returned in calls for line in returned):
        values: dict[str, Any] = {
            "state": LineState.PENDING,
            "not_before_s": database_now() + line.delay_s,
            "attempts": lines.c.attempts + int(line.failure),
        }
        if line.output_ids is not None:
            values["output_ids"] = _packed(line.output_ids)
        connection.execute(_held(token).values(values), {"b": line.batch_id, "n": line.line})
    return [None] * len(calls)


def _packed(token_ids: Iterable[int]) -> bytes:
    return array("i", token_ids).tobytes()


def _unpacked(data: bytes | None) -> tuple[int, ...]:
    return tuple(array("i", data or b""))
