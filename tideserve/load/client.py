"""The load generator, a separate process: `python -m tideserve.load.client JOB RESULT`.

Reads a job (msgpack), sends its requests in an open or closed loop, prints about once a second how
many have ended, and writes the records. All waits end with the job's deadline.
"""

import argparse
import asyncio
import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from services.common.clock import monotonic_s
from services.common.timeouts import timeout
from tideserve.load.event_stream import ClassFields, OpenAIServer, StreamedAnswer, StreamFailed
from tideserve.load.record import ClientAttempt, RequestOutcome, SentRequest
from tideserve.load.workload import Backlog, PlannedRequest

LATE_S = 0.010
"""A request that is sent later than this after its due time counts as late."""
LEAD_S = 0.25
LAST_SEND_FACTOR = 1.25
"""A closed loop sends no request if the time left is below this times the longest duration so far.
"""
FAILURE_PAUSE_S = 1.0
"""Pause of a backlog's client after a failed or refused request, so that it does not flood the
server."""
REFUSALS = (429, 503)
FIRST = ClientAttempt()
UNFINISHED = "not finished within the time of the round"


class Returns(msgspec.Struct, frozen=True):
    """How the clients of an open loop return after a refusal.

    Clients wait for Retry-After, and do not return without it; every `at_once_every`-th client
    returns at once instead. A client returns at most `most` times, and not later than `until_s`
    after the start of the load.
    """

    until_s: float
    at_once_every: int
    most: int


class Job(msgspec.Struct, frozen=True):
    """Requests to send, and the servers.

    `concurrency` None is an open loop: requests are sent at their arrival times. Of the first
    `lead_in` requests, only failures are recorded. `backlog` is sent beside the requests until
    these have ended; its requests that run then are cut off and not recorded. `returns`: refused
    requests of an open loop are sent again; each attempt has a record.
    """

    urls: tuple[str, ...]
    model: str
    requests: tuple[PlannedRequest, ...]
    timeout_s: float
    concurrency: int | None = None
    lead_in: int = 0
    api_key: str | None = None
    backlog: Backlog | None = None
    class_fields: ClassFields = ClassFields.CLASSES
    returns: Returns | None = None


class LoadClient:
    """Sends a job's requests, round-robin over its servers.

    In a closed loop each client keeps its server. With round-robin by request, the successor of a
    request that ends early might go to a busy server while another server is idle.
    """

    def __init__(self, job: Job, progress: Callable[[str], None] | None = None) -> None:
        """`progress` is called about once a second with the number of ended requests."""
        self._job = job
        self._progress = progress
        self._servers = [OpenAIServer(url, job.api_key, job.class_fields) for url in job.urls]
        self._turn = itertools.cycle(range(len(self._servers)))
        self._slowest_s = 0.0
        self._of_backlog = 0
        self.records: list[SentRequest] = []

    async def run(self) -> None:
        """Send all requests; those that run at the deadline are cancelled and count as failed."""
        # Generate the first prompts of a backlog before the clock starts.
        backlog = self._job.backlog
        first = [backlog.request(number) for number in range(backlog.clients)] if backlog else []
        start_s = monotonic_s() + LEAD_S
        beside = [
            asyncio.create_task(self._report_progress(progress))
            for progress in (self._progress,)
            if progress
        ]
        if backlog is not None:
            beside.append(asyncio.create_task(self._send_backlog(backlog, first, start_s)))
        open_loop = self._job.concurrency is None
        try:
            await (self._open_loop(start_s) if open_loop else self._closed_loop())
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            for server in self._servers:
                await server.close()

    async def _open_loop(self, start_s: float) -> None:
        end_s = start_s + self._job.timeout_s
        async with asyncio.TaskGroup() as tasks:
            for number, request in enumerate(self._job.requests):
                due_s = start_s + request.arrival_s
                await asyncio.sleep(max(0.0, due_s - monotonic_s()))
                tasks.create_task(self._send_and_return(number, request, due_s, end_s))

    async def _send_and_return(
        self, number: int, request: PlannedRequest, due_s: float, end_s: float
    ) -> None:
        """Send a request of an open loop, again after refusals as `Job.returns` says."""
        target, returns = next(self._turn), self._job.returns
        if returns is None:
            await self._send(request, target, due_s, end_s)
            return
        at_once = number % returns.at_once_every == returns.at_once_every - 1
        last_s = due_s - request.arrival_s + returns.until_s
        for returned in range(returns.most + 1):
            await asyncio.sleep(max(0.0, due_s - monotonic_s()))
            attempt = ClientAttempt(returned, at_once)
            record = await self._send(request, target, due_s, end_s, attempt=attempt)
            wait_s = 0.0 if at_once else record.retry_after_s
            if record.outcome is not RequestOutcome.REJECTED or wait_s is None:
                return
            due_s = record.end_s + wait_s
            if due_s > last_s:
                return

    async def _closed_loop(self) -> None:
        end_s = monotonic_s() + self._job.timeout_s
        # Do not send requests that would be cut off if they took as long as the slowest so far: a
        # slow machine gets fewer requests instead of failures.
        waiting = itertools.takewhile(
            lambda _: end_s - monotonic_s() > LAST_SEND_FACTOR * self._slowest_s,
            enumerate(self._job.requests),
        )
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._job.concurrency or 1):
                tasks.create_task(self._send_one_by_one(waiting, next(self._turn), end_s))

    async def _send_backlog(
        self, backlog: Backlog, first: Sequence[PlannedRequest], start_s: float
    ) -> None:
        await asyncio.sleep(max(0.0, start_s - monotonic_s()))
        numbers = itertools.count(len(first))
        if backlog.in_batches:
            await self._send_batches(backlog, first, numbers)
        async with asyncio.TaskGroup() as tasks:
            for request in first:
                tasks.create_task(self._send_without_end(backlog, request, numbers))

    async def _send_without_end(
        self, backlog: Backlog, request: PlannedRequest, numbers: Iterator[int]
    ) -> None:
        target = next(self._turn)
        while True:
            if await self._send_beside(request, target) is not RequestOutcome.COMPLETED:
                await asyncio.sleep(FAILURE_PAUSE_S)
            request = backlog.request(next(numbers))

    async def _send_batches(
        self, backlog: Backlog, batch: Sequence[PlannedRequest], numbers: Iterator[int]
    ) -> None:
        while True:
            sent = [self._send_beside(request, next(self._turn)) for request in batch]
            outcomes = asyncio.gather(*sent)
            coming = []
            for number in itertools.islice(numbers, backlog.clients):
                coming.append(backlog.request(number))
                # Yield to readers of tokens, which would get late timestamps otherwise.
                await asyncio.sleep(0)
            if any(outcome is not RequestOutcome.COMPLETED for outcome in await outcomes):
                await asyncio.sleep(FAILURE_PAUSE_S)
            batch = coming

    async def _send_beside(self, request: PlannedRequest, target: int) -> RequestOutcome:
        """Send a request of the backlog."""
        # The job ends first: requests of the backlog that run then are not failures.
        end_s = monotonic_s() + 2 * self._job.timeout_s
        record = await self._send(request, target, monotonic_s(), end_s)
        self._of_backlog += 1
        return record.outcome

    async def _send_one_by_one(
        self, waiting: Iterator[tuple[int, PlannedRequest]], target: int, end_s: float
    ) -> None:
        for index, request in waiting:
            lead_in = index < self._job.lead_in
            await self._send(request, target, monotonic_s(), end_s, lead_in)

    async def _send(
        self,
        request: PlannedRequest,
        target: int,
        due_s: float,
        end_s: float,
        lead_in: bool = False,
        attempt: ClientAttempt = FIRST,
    ) -> SentRequest:
        """Send a request and record the attempt; of a lead-in, only if it does not complete."""
        answer, error = StreamedAnswer(), ""
        sent_s = due_s

        def note_sent() -> None:
            nonlocal sent_s
            sent_s = monotonic_s()

        try:
            async with timeout(end_s - monotonic_s()):
                await self._servers[target].complete(self._job.model, request, answer, note_sent)
        except TimeoutError:
            error = UNFINISHED
        except (StreamFailed, OSError) as failure:
            error = str(failure) or type(failure).__name__
        outcome, error = _outcome(answer, error)
        ended_s = monotonic_s()
        self._slowest_s = max(self._slowest_s, ended_s - due_s)
        output_tokens = answer.output_tokens or len(answer.token_times_s)
        record = SentRequest(
            due_s=due_s,
            sent_s=sent_s,
            end_s=ended_s,
            outcome=outcome,
            prompt_tokens=len(request.prompt_ids),
            output_tokens=output_tokens,
            token_times_s=tuple(answer.token_times_s),
            late=sent_s - due_s > LATE_S and self._job.concurrency is None,
            short=outcome is RequestOutcome.COMPLETED and output_tokens < request.output_tokens,
            slo_class=request.slo_class,
            target=target,
            request_id=answer.request_id,
            error=error,
            attempt=attempt,
            retry_after_s=answer.retry_after_s,
        )
        if not (lead_in and outcome is RequestOutcome.COMPLETED):
            self.records.append(record)
        return record

    async def _report_progress(self, progress: Callable[[str], None]) -> None:
        while True:
            ended = len(self.records) - self._of_backlog
            beside = f" and {self._of_backlog} batch" if self._job.backlog else ""
            progress(f"{ended}/{len(self._job.requests) - self._job.lead_in}{beside}")
            await asyncio.sleep(1.0)


def _print(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, flush=True)


def _outcome(answer: StreamedAnswer, error: str) -> tuple[RequestOutcome, str]:
    if answer.status in REFUSALS:
        return RequestOutcome.REJECTED, answer.body
    if answer.status not in (0, 200):
        return RequestOutcome.FAILED, f"HTTP {answer.status}: {answer.body}"
    error = error or answer.error
    if not error and not (answer.finished and answer.token_times_s):
        error = "the stream ended early"
    return (RequestOutcome.FAILED if error else RequestOutcome.COMPLETED), error


def main() -> None:
    """Run the job in the first file; write the records to the second."""
    parser = argparse.ArgumentParser(prog="tideserve.load.client")
    parser.add_argument("job", type=Path)
    parser.add_argument("result", type=Path)
    arguments = parser.parse_args()
    client = LoadClient(msgspec.msgpack.decode(arguments.job.read_bytes(), type=Job), _print)
    # A garbage collection during a round would delay the timestamps of tokens.
    gc.disable()
    asyncio.run(client.run())
    arguments.result.write_bytes(msgspec.msgpack.encode(client.records))


if __name__ == "__main__":
    main()
