"""Runs the lines of all batches, while this gateway leads them.

The store decides (`BatchStore.advance`): which batches are validated, run, stopped and written. The
leader executes: it claims lines, runs each as a request of class `batch`, and stores its result or
returns the line to the store. Every write has the leader's token, so a leader that was replaced
changes nothing; it then stops with `Fenced`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from math import inf

from services.common import failpoint
from services.common.clock import monotonic_s
from services.core.batches.line_end import NO_MODEL, RATE_LIMITED, after_response
from services.core.batches.turns import BatchTurns
from services.core.batches.vocabulary import BatchState
from services.core.batches.window import ClaimWindow
from services.gateway.batches.errors import BatchStoreDown, Fenced, ResultTooLarge
from services.gateway.batches.metrics import BatchMetrics
from services.gateway.batches.object_files import ObjectFiles
from services.gateway.batches.protocols import Door, Jobs, LineRun
from services.gateway.batches.rows import (
    BatchRow,
    ClaimedLine,
    LineProgress,
    LineResult,
    OpenBatch,
    ReturnedLine,
)
from services.gateway.batches.store import BatchStore
from services.gateway.vocabulary.errors import GatewayError, ServiceUnavailable

ADVANCE_S = 1.0
CLAIM_S = 0.05
CLAIM_MAX = 64
"""Lines per claim."""
SWEEP_S = 3600.0
PROGRESS_S = 30.0
"""A line's tokens are stored after this time, and again each time it passes."""
PROGRESS_MAX = 64
"""Lines whose tokens are stored in a transaction."""
RETRY_S = 5.0
AGAIN_S = 10.0
"""Time after which a failed task of a batch is due again."""
REFUSED = frozenset({429, 503})
"""Statuses of refusals for lack of room."""
TEXT_BYTES_MAX = 256 * 2**20
"""Maximum bytes of the texts of running lines."""
RESULT_BYTES_MAX = 64 * 2**20
"""Maximum bytes of results that wait for the database; a line beyond them runs again."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RunningLine:
    """A claimed line; its task ends it in the store."""

    line: ClaimedLine
    run: LineRun
    began_s: float
    saved_s: float
    task: "asyncio.Task[None] | None" = None
    held_bytes: int = 0
    saved: int = 0  # tokens in the store


class BatchLeader:
    """Leads the batches under `token` of the store."""

    def __init__(
        self,
        store: BatchStore,
        files: ObjectFiles,
        door: Door,
        jobs: Jobs,
        window: ClaimWindow,
        metrics: BatchMetrics,
        token: int,
    ) -> None:
        self._store = store
        self._files = files
        self._door = door
        self._jobs = jobs
        self._window = window
        self._metrics = metrics
        self._token = token
        self._turns = BatchTurns()
        self._running: dict[tuple[str, int], RunningLine] = {}
        self._open: dict[str, OpenBatch] = {}
        self._objects: dict[str, str] = {}  # names of input objects, by batch
        self._busy: set[Callable[[int, BatchRow], Awaitable[None]]] = set()
        # Times at which tasks last failed, by task and batch.
        self._failed_s: dict[tuple[Callable[[int, BatchRow], Awaitable[None]], str], float] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._text_bytes = self._result_bytes = 0
        self._queued: set[RunningLine] = set()  # running lines without a worker
        self._interrupted: list[RunningLine] = []  # lines to return
        self._idle: set[str] = set()  # batches without lines to claim now
        self._paused_s: dict[str, float] = {}  # ends of pauses of owners
        self._claim_failed = False  # perhaps after the database committed it
        self.claiming = True

    async def run(self) -> None:
        """Lead until cancelled; then return the running lines to the store.

        Raises:
            Fenced: if another gateway leads.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for loop in (self._advance, self._claim, self._save, self._sweep):
                    tasks.create_task(self._forever(loop))
        except BaseExceptionGroup as group:
            fenced, others = group.split(Fenced)
            if fenced is None or others is not None:
                raise
            raise Fenced("another gateway leads the batches") from None
        finally:
            self._metrics.set_states({}, {})
            await self._leave()

    async def _forever(self, step: Callable[[], Awaitable[float]]) -> None:
        """Repeat a step; it returns the seconds until the next. Pauses while the store is down."""
        while True:
            try:
                pause_s = await step()
            except BatchStoreDown:
                pause_s = RETRY_S
            await asyncio.sleep(pause_s)

    async def _advance(self) -> float:
        """Do what is due for each batch."""
        batches = await self._store.advance(self._token)
        self._open = {batch.batch.batch_id: batch for batch in batches}
        self._turns.keep(_running_by_owner(batches))
        self._objects = {key: name for key, name in self._objects.items() if key in self._open}
        self._idle.clear()
        now_s = monotonic_s()
        self._paused_s = {owner: end_s for owner, end_s in self._paused_s.items() if end_s > now_s}
        self._failed_s = {key: s for key, s in self._failed_s.items() if key[1] in self._open}
        for batch in batches:
            if batch.batch.state is BatchState.VALIDATING:
                self._begin(self._jobs.validate, batch.batch)
            elif batch.writable:
                self._begin(self._jobs.write_files, batch.batch)
            if batch.stopping:
                await self._interrupt(batch.batch.batch_id)
        self._report()
        return ADVANCE_S

    def _begin(self, job: Callable[[int, BatchRow], Awaitable[None]], batch: BatchRow) -> None:
        """Start a long task unless it runs for a batch; `advance` reports the others again.

        Those of other batches go first for a while after it failed.
        """
        now_s = monotonic_s()
        if job in self._busy or self._failed_s.get((job, batch.batch_id), -inf) > now_s - AGAIN_S:
            return
        assert self._tasks is not None

        async def run() -> None:
            try:
                await job(self._token, batch)
            except BatchStoreDown as error:
                log.warning("batch %s waits: %s", batch.batch_id, error.__cause__ or error)
                self._failed_s[job, batch.batch_id] = monotonic_s()
            except Fenced:
                raise
            except Exception:
                log.exception("a task for batch %s failed; it starts again", batch.batch_id)
                self._failed_s[job, batch.batch_id] = monotonic_s()
            finally:
                self._busy.discard(job)

        self._busy.add(job)
        self._tasks.create_task(run())

    async def _claim(self) -> float:
        """Claim lines and start them."""
        now_s = monotonic_s()
        self._note_placed(now_s)
        if self._claim_failed:
            held = {_key(running) for running in (*self._running.values(), *self._interrupted)}
            await self._store.lines.release_others(self._token, held)
            self._claim_failed = False
        queued = len(self._queued)
        count = self._window.room(queued, len(self._running) - queued, now_s)
        full = self._text_bytes >= TEXT_BYTES_MAX or self._result_bytes >= RESULT_BYTES_MAX
        if not self.claiming or full or count <= 0:
            return CLAIM_S
        turns = [
            batch_id
            for owner, batch_id in self._turns.order()
            if batch_id not in self._idle and self._paused_s.get(owner, now_s) <= now_s
        ]
        if not turns:
            return CLAIM_S if self._open else ADVANCE_S
        lines = await self._claimed(turns[0], min(count, CLAIM_MAX))
        if not lines:
            self._idle.add(turns[0])
            return 0.0
        failpoint.hit("gateway.batches.claimed")
        batch = self._open[turns[0]].batch
        self._turns.serve(batch.owner, turns[0], len(lines) * batch.tokens // batch.total)
        for line in lines:
            # A line that is about to be returned again is claimed after that.
            if (line.batch_id, line.line) not in self._running:
                self._start(batch, line)
        return 0.0

    async def _claimed(self, batch_id: str, count: int) -> list[ClaimedLine]:
        """Claim lines. Raises BatchStoreDown, perhaps after they were claimed."""
        try:
            return await self._store.lines.claim(self._token, batch_id, count)
        except BatchStoreDown:
            self._claim_failed = True
            raise

    def _start(self, batch: BatchRow, line: ClaimedLine) -> None:
        assert self._tasks is not None
        now_s = monotonic_s()
        running = RunningLine(line, self._door.open(batch, line), now_s, now_s)
        self._running[line.batch_id, line.line] = running
        self._queued.add(running)
        self._text_bytes += line.length
        running.task = self._tasks.create_task(self._run(batch, running))

    async def _run(self, batch: BatchRow, running: RunningLine) -> None:
        line = running.line
        try:
            ending = await self._ending(batch, running)
            if isinstance(ending, LineResult):
                if len(ending.body) > RESULT_BYTES_MAX:
                    ending = running.run.failed(ResultTooLarge(len(ending.body)))
                running.held_bytes = len(ending.body)
                self._result_bytes += running.held_bytes
                if self._result_bytes > RESULT_BYTES_MAX:
                    ending = ReturnedLine(line.batch_id, line.line)
            await self._end(ending)
            failpoint.hit("gateway.batches.committed")
        except asyncio.CancelledError:
            self._interrupted.append(running)
            raise
        finally:
            del self._running[line.batch_id, line.line]
            self._queued.discard(running)
            self._text_bytes -= line.length
            self._result_bytes -= running.held_bytes

    async def _ending(self, batch: BatchRow, running: RunningLine) -> LineResult | ReturnedLine:
        """Run a line to its result, or to the reason why it is returned."""
        line, error = running.line, GatewayError("internal error of the gateway; retry")
        try:
            text = await self._text(batch, line)
            # The store ends the window by its own clock; this limit only bounds the wait.
            result = await running.run.run(text, batch.window_s)
            failpoint.hit("gateway.batches.result")
            return result
        except GatewayError as failure:
            # The refusal of a line that continues an earlier run is no fault of its worker.
            cause = failure.__cause__
            error = cause if isinstance(cause, GatewayError) else failure
        except Exception:
            log.exception("a line of batch %s failed unexpectedly", line.batch_id)
        again = after_response(error.status, error.code, error.retry_after_s, line.attempts)
        if again is None:
            return running.run.failed(error)
        now_s = monotonic_s()
        # The window is that of all models.
        unserved = isinstance(error, ServiceUnavailable) and error.unserved
        if unserved or error.code in (RATE_LIMITED, NO_MODEL):
            self._paused_s[batch.owner] = now_s + again.delay_s
        elif error.status in REFUSED and not again.failure:
            self._window.note_refused(now_s, again.delay_s)
        return ReturnedLine(
            line.batch_id, line.line, again.delay_s, again.failure, running.run.output_ids
        )

    async def _text(self, batch: BatchRow, line: ClaimedLine) -> bytes:
        name = self._objects.get(batch.batch_id)
        if name is None:
            name = (await self._store.files.input_of(batch)).object_name
            self._objects[batch.batch_id] = name
        return await self._files.read(name, line.offset, line.length)

    async def _end(self, ending: LineResult | ReturnedLine) -> None:
        """Store the ending of a line, once the database works."""
        while True:
            try:
                if isinstance(ending, ReturnedLine):
                    await self._store.lines.give_back(self._token, [ending])
                    self._metrics.count_line("returned")
                else:
                    await self._store.lines.finish(self._token, ending)
                    self._metrics.count_line("failed" if ending.error else "done")
                return
            except BatchStoreDown:
                await asyncio.sleep(RETRY_S)

    async def _save(self) -> float:
        """Store the tokens of lines that have run for long."""
        now_s = monotonic_s()
        due = [
            running
            for running in self._running.values()
            if now_s - running.saved_s >= PROGRESS_S
            and len(running.run.output_ids or ()) > running.saved
        ]
        for first in range(0, len(due), PROGRESS_MAX):
            part = due[first : first + PROGRESS_MAX]
            progress = [
                LineProgress(*_key(running), running.run.output_ids or ()) for running in part
            ]
            await self._store.lines.progress(self._token, progress)
            for running, saved in zip(part, progress, strict=True):
                running.saved_s, running.saved = now_s, len(saved.output_ids)
        return ADVANCE_S

    async def _sweep(self) -> float:
        await self._jobs.sweep(self._token)
        return SWEEP_S

    def _note_placed(self, now_s: float) -> None:
        for running in [running for running in self._queued if running.run.placed]:
            self._queued.discard(running)
            self._window.note_placed(now_s)

    def _report(self) -> None:
        states: dict[BatchState, int] = {}
        for batch in self._open.values():
            states[batch.batch.state] = states.get(batch.batch.state, 0) + 1
        lines = {
            "open": sum(batch.batch.open for batch in self._open.values()),
            "queued": len(self._queued),
            "placed": len(self._running) - len(self._queued),
        }
        self._metrics.set_states(states, lines)

    async def _interrupt(self, batch_id: str) -> None:
        """Interrupt the lines of a batch and return them to the store."""
        tasks = [
            running.task
            for running in self._running.values()
            if running.line.batch_id == batch_id and running.task is not None
        ]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._give_back()

    async def _leave(self) -> None:
        """Return the lines that ran; without it, the next leader takes them as they were."""
        with contextlib.suppress(BatchStoreDown, Fenced):
            await self._give_back()

    async def _give_back(self) -> None:
        while part := self._interrupted[:PROGRESS_MAX]:
            returned = [
                ReturnedLine(*_key(running), output_ids=running.run.output_ids) for running in part
            ]
            await self._store.lines.give_back(self._token, returned)
            del self._interrupted[: len(part)]


def _running_by_owner(batches: Iterable[OpenBatch]) -> dict[str, list[str]]:
    """The ids of the batches whose lines run."""
    by_owner: dict[str, list[str]] = {}
    for batch in batches:
        if batch.batch.state is BatchState.IN_PROGRESS and not batch.stopping:
            by_owner.setdefault(batch.batch.owner, []).append(batch.batch.batch_id)
    return by_owner


def _key(running: RunningLine) -> tuple[str, int]:
    return running.line.batch_id, running.line.line
