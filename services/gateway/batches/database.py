"""Runs transactions of the batch store in two threads: one writes, one reads.

The writer commits calls in the order in which they were made. Calls of `write_grouped` share a
transaction, which spreads the cost of its sync over many lines.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from services.common.clock import monotonic_s
from services.common.timeouts import timeout
from services.gateway.batches.errors import BatchStoreDown
from services.gateway.batches.schema import create_tables, open_engine

log = logging.getLogger(__name__)

CALLS_MAX = 1024
"""Maximum calls that wait for a thread."""
GROUP_MAX = 64
"""Maximum calls that share a transaction."""
GROUP_WAIT_S = 0.05
"""Time that the first call of a group waits for others."""
CALL_TIMEOUT_S = 30.0
"""Maximum time of a call with its wait; a transaction that has begun may still take effect."""

T = TypeVar("T")


class Observer(Protocol):
    """Receives the duration of each transaction, for metrics; called by the threads."""

    def __call__(self, name: str, seconds: float, failed: bool) -> None:
        """`name` of the call; `seconds` of its transaction."""


Group = Callable[[Connection, Sequence[Any]], Sequence[Any]]
"""Runs several calls in a transaction, given an argument of each; returns a result of each."""


@dataclass(slots=True)
class _StoreCall:
    name: str
    run: Callable[[Connection], Any] | None = None
    # A call of a group: calls with an equal `key` share a transaction.
    group: Group | None = None
    key: object = None
    argument: Any = None
    future: Future[Any] = field(default_factory=Future)


class Database:
    """The threads and connections of a database."""

    def __init__(self, url: str, observe: Observer) -> None:
        """`url` as in `open_engine`. Raises ConfigError."""
        self._engine = open_engine(url)
        self._observe = observe
        self._writes: queue.Queue[_StoreCall | None] = queue.Queue(CALLS_MAX)
        self._reads: queue.Queue[_StoreCall | None] = queue.Queue(CALLS_MAX)
        self._has_tables = False
        self._down = False
        self._closed = False
        self._threads = [
            threading.Thread(target=self._write_all, name="batch writer", daemon=True),
            threading.Thread(target=self._read_all, name="batch reader", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    async def close(self) -> None:
        """Run the calls that wait, then end the threads; gives up after `CALL_TIMEOUT_S`."""
        self._closed = True
        for waiting, thread in zip((self._writes, self._reads), self._threads, strict=True):
            with contextlib.suppress(queue.Full):
                await asyncio.to_thread(waiting.put, None, timeout=CALL_TIMEOUT_S)
                await asyncio.to_thread(thread.join, CALL_TIMEOUT_S)
        self._engine.dispose()

    async def write(self, name: str, run: Callable[[Connection], T]) -> T:
        """Run a transaction after all earlier writes; `run` may be called in another thread.

        Raises:
            BatchStoreDown: if the transaction failed, or did not end within `CALL_TIMEOUT_S`.
        """
        result: T = await self._call(self._writes, _StoreCall(name, run))
        return result

    async def write_grouped(self, name: str, group: Group, key: object, argument: Any) -> Any:
        """As `write`, in a transaction with other calls of an equal `name` and `key`."""
        call = _StoreCall(name, group=group, key=key, argument=argument)
        return await self._call(self._writes, call)

    async def read(self, name: str, run: Callable[[Connection], T]) -> T:
        """Run a transaction that only reads; it sees all writes that have returned. As `write`."""
        result: T = await self._call(self._reads, _StoreCall(name, run))
        return result

    async def _call(self, waiting: "queue.Queue[_StoreCall | None]", call: _StoreCall) -> Any:
        if self._closed:
            raise BatchStoreDown("the batch store is closed; retry at another gateway")
        try:
            waiting.put_nowait(call)
        except queue.Full:
            raise BatchStoreDown(
                f"{CALLS_MAX} calls wait for the batch store, whose database is slow; retry"
            ) from None
        try:
            async with timeout(CALL_TIMEOUT_S):
                return await asyncio.wrap_future(call.future)
        except TimeoutError:
            raise BatchStoreDown(
                f"the database of the batch store did not answer within {CALL_TIMEOUT_S:g} s; retry"
            ) from None

    def _read_all(self) -> None:
        reading = self._engine.execution_options(reads=True)
        while (call := self._reads.get()) is not None:
            assert call.run is not None
            if call.future.set_running_or_notify_cancel():
                self._run([call], reading, call.run)

    def _write_all(self) -> None:
        call = self._writes.get()
        while call is not None:
            following: _StoreCall | None = None
            calls = [call]
            if call.group is not None:
                calls, following, ended = self._gather(call)
            else:
                ended = False
            self._write_together(calls)
            if ended:
                return
            call = following if following is not None else self._writes.get()

    def _gather(self, first: _StoreCall) -> tuple[list[_StoreCall], _StoreCall | None, bool]:
        """Gather the calls that join `first`; returns also the call after them, and whether that
        is the end."""
        calls = [first]
        until_s = monotonic_s() + GROUP_WAIT_S
        while len(calls) < GROUP_MAX:
            try:
                call = self._writes.get(timeout=max(0.0, until_s - monotonic_s()))
            except queue.Empty:
                break
            if call is None:
                return calls, None, True
            if call.name != first.name or call.key != first.key or call.group is None:
                return calls, call, False
            calls.append(call)
        return calls, None, False

    def _write_together(self, waiting: Sequence[_StoreCall]) -> None:
        # The caller may have given up; then the call has no effect.
        calls = [call for call in waiting if call.future.set_running_or_notify_cancel()]
        if not calls:
            return
        first = calls[0]

        def run(connection: Connection) -> Any:
            if not self._has_tables:
                create_tables(connection)
            if first.group is not None:
                return first.group(connection, [call.argument for call in calls])
            assert first.run is not None
            return first.run(connection)

        self._has_tables |= self._run(calls, self._engine, run)

    def _note(self, name: str, seconds: float, cause: str) -> None:
        """Report a transaction; log when the database begins to fail, and when it works again."""
        failed = bool(cause)
        self._observe(name, seconds, failed)
        if failed != self._down:
            self._down = failed
            if failed:
                log.warning("the batch store fails, so batches pause: %s", cause)
            else:
                log.info("the batch store works again")

    def _run(
        self, calls: Sequence[_StoreCall], engine: Engine, run: Callable[[Connection], Any]
    ) -> bool:
        """Run a transaction for `calls`; whether it was committed."""
        began_s = monotonic_s()
        failure: Exception | None = None
        cause = ""
        try:
            with engine.begin() as connection:
                result = run(connection)
        except SQLAlchemyError as error:
            # Its text may name hosts and tables: it is for the log, not for clients.
            cause = _cause(error)
            failure = BatchStoreDown("the database of the batch store failed; retry")
        except Exception as error:
            # The caller's own error, such as a file that does not exist.
            failure = error
        self._note(calls[0].name, monotonic_s() - began_s, cause)
        grouped = calls[0].group is not None
        for index, call in enumerate(calls):
            if failure is not None:
                call.future.set_exception(failure)
            else:
                call.future.set_result(result[index] if grouped else result)
        return failure is None


def _cause(error: SQLAlchemyError) -> str:
    """The driver's error without the statement."""
    return " ".join(str(getattr(error, "orig", None) or error).split())[:200]
