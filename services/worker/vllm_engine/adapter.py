"""Adapts vLLM's `AsyncLLM` to the frames between a worker's servicer and its engine process.

vLLM schedules, runs and preempts requests. The adapter submits requests, and sends the tokens of a
step in a single frame. It refuses group changes that merge it with other workers, so a vLLM worker
always forms a group of its own. A resumed request has run on another worker, and its output so far
is known. An upstream server (`services.worker.openai_engine`) has the same interface as `AsyncLLM`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from services.common.clock import monotonic_s
from services.core.adapter import Adapter
from services.core.planner.config import IterationConfig
from services.core.planner.drain import DrainPace
from services.core.planner.events import EmitToken, RefuseRequest
from services.core.planner.refusal import (
    duplicate_id,
    queue_full,
    returned,
    returned_by_drain,
    returned_by_outage,
)
from services.core.report import EngineReport, Load, OtherRoom
from services.core.request import Request
from services.worker.ipc import (
    AbortAttempt,
    AbortRequest,
    ApplyConfiguration,
    EngineReady,
    FromEngine,
    Introduce,
    Prepare,
    Prepared,
    Progress,
    RequestTimes,
    ReturnRequests,
    StartRequest,
    ToEngine,
    encode,
    to_engine_decoder,
)
from services.worker.vllm_engine.adapter_slots import (
    AdapterSlots,
    CannotLoad,
    LoadFailed,
    SlotClaim,
)
from services.worker.vllm_engine.arguments import priority_of
from services.worker.vllm_engine.outputs import OutputReader, RequestFailed, VllmOutput, times_of
from services.worker.vllm_engine.parameters import CannotResume, CannotServe, parameters_of
from services.worker.vllm_engine.running import (
    EngineState,
    StepStats,
    VllmRequest,
    VllmRequests,
)

log = logging.getLogger(__name__)

LIVENESS_POLL_S = 0.5
"""Interval of liveness checks of vLLM, and of heartbeats to the servicer."""
SILENT_AFTER_S = 3.0
"""Time without a reply of vLLM after which no frames are sent, so that the servicer detects it."""
CANNOT_MERGE = "the worker runs {name}, which cannot run a subset of the layers; leave it out"


class AsyncEngine(Protocol):
    """The used part of vLLM's `AsyncLLM`; `is_paused` is answered by the engine core, so its reply
    proves that the core is alive."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int
    ) -> AsyncGenerator[VllmOutput, None]: ...

    async def is_paused(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """A loaded vLLM engine, with its statistics and exception types."""

    engine: AsyncEngine
    facts: EngineReady
    stats: StepStats  # updated after each step
    to_params: Callable[[Mapping[str, Any]], Any]  # makes vLLM's sampling parameters
    invalid: tuple[type[Exception], ...]  # errors of requests that cannot be served
    transient: tuple[type[Exception], ...]  # errors of requests that may be retried
    dead: tuple[type[Exception], ...]  # errors after which vLLM is dead
    by_priority: bool = False  # vLLM's scheduling policy is `priority`
    name: str = "vLLM"  # in messages
    adapters: AdapterSlots | None = None  # None: it loads no adapters
    state: EngineState = field(default_factory=EngineState)  # updated by `watch`
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None  # runs while the adapter runs


class Socket(Protocol):
    """The engine's end of the socket to its servicer."""

    def recv(self) -> Awaitable[Any]: ...

    def send(self, data: bytes, /) -> Awaitable[Any]: ...


class VllmAdapter:
    """Handles the frames of the servicer until it is cancelled or vLLM fails."""

    def __init__(
        self,
        worker_id: str,
        planner: IterationConfig,
        opened: OpenedEngine,
        socket: Socket,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._worker_id = worker_id
        self._max_waiting = planner.max_waiting
        self._drain = DrainPace(planner.max_batch_tokens)
        self._engine = opened.engine
        self._facts = facts = opened.facts
        self._to_params = opened.to_params
        self._adapters = opened.adapters
        self._invalid: tuple[type[Exception], ...] = (CannotServe, CannotLoad, *opened.invalid)
        failures: tuple[type[Exception], ...] = (RequestFailed, CannotResume, LoadFailed)
        self._transient = failures + opened.transient
        self._dead = opened.dead
        self._name = opened.name
        self._state = opened.state
        self._watch = opened.watch
        self._socket = socket
        self._now_s = now_s
        self._requests = VllmRequests(
            facts.kv_blocks_total, facts.block_size, opened.stats, opened.by_priority
        )
        self._epoch = 0
        self._answered_s = now_s()
        self._changed = asyncio.Event()
        self._prepared: list[Prepared] = []
        self._received: list[str] = []
        self._tokens: list[EmitToken] = []
        self._refusals: list[RefuseRequest] = []
        self._times: dict[str, RequestTimes] = {}

    async def run(self) -> None:
        """Serve until cancelled; raises an exception group with a `dead` error if vLLM dies."""
        async with asyncio.TaskGroup() as tasks:
            if self._watch is not None:
                tasks.create_task(self._watch())
            tasks.create_task(self._receive(tasks))
            tasks.create_task(self._poll_liveness())
            tasks.create_task(self._send_progress())

    async def _receive(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._handle(to_engine_decoder.decode(await self._socket.recv()), tasks)
            self._changed.set()

    def _handle(self, frame: ToEngine, tasks: asyncio.TaskGroup) -> None:
        match frame:
            case StartRequest(request=request):
                self._start(request, tasks)
            case AbortRequest(request_id=request_id):
                self._abort(self._requests.get(request_id))
            case ReturnRequests(room=room):
                self._return(room)
            case ApplyConfiguration(groups=groups):
                own = [
                    group.epoch
                    for group in groups
                    if any(member.worker_id == self._worker_id for member in group.members)
                ]
                self._epoch = max(self._epoch, *own, 0)
            case Prepare(attempt=attempt):
                self._prepared.append(Prepared(attempt, CANNOT_MERGE.format(name=self._name)))
            case AbortAttempt() | Introduce():
                pass

    def _start(self, request: Request, tasks: asyncio.TaskGroup) -> None:
        self._received.append(request.request_id)
        if request.request_id in self._requests:
            self._refusals.append(duplicate_id(request.request_id))
        elif len(self._requests.waiting()) >= self._max_waiting:
            self._refusals.append(queue_full(request.request_id))
        elif request.adapter is None:
            entry = self._requests.add(request, self._now_s())
            entry.task = tasks.create_task(self._serve(entry))
        else:
            self._start_with(request.adapter, request, tasks)

    def _start_with(self, adapter: Adapter, request: Request, tasks: asyncio.TaskGroup) -> None:
        """Start a request of an adapter if a slot has the adapter or is free."""
        claim = self._adapters.claim(adapter) if self._adapters is not None else None
        if claim is None:
            # The scheduler's report was out of date; it knows other workers, or waits for a slot.
            self._refusals.append(returned(request.request_id))
            return
        entry = self._requests.add(request, self._now_s())
        entry.claim = claim
        entry.task = tasks.create_task(self._serve(entry))
        # A task that is cancelled before it runs executes nothing, not even `finally`.
        entry.task.add_done_callback(lambda _: self._release(claim))

    def _release(self, claim: SlotClaim) -> None:
        claim.release()
        self._changed.set()

    def _abort(self, entry: VllmRequest | None) -> None:
        """Abort a request by cancelling the task that reads its output from vLLM."""
        if entry is None or not self._requests.remove(entry):
            return
        # A later start may have the same id, so discard the unsent tokens of this start.
        request_id = entry.request.request_id
        self._tokens = [token for token in self._tokens if token.request_id != request_id]
        if entry.task is not None:
            entry.task.cancel()

    def _return(self, room: OtherRoom) -> None:
        """Return requests because this worker shuts down, or its upstream server is gone."""
        candidates, refusal = self._requests.candidates(), returned_by_drain
        if not self._state.resumes:
            candidates = [candidate for candidate in candidates if not candidate.has_output]
        if self._state.outage:
            # Without a group that can start them now, requests wait for the server here.
            if not room.group_tokens:
                return
            candidates = [replace(candidate, holds_kv=False) for candidate in candidates]
            refusal = returned_by_outage
        for candidate in self._drain.choose(candidates, room, self._now_s()):
            if (entry := self._requests.get(candidate.seq_id)) is not None:
                self._give_back(entry, refusal(candidate.seq_id))

    def _give_back(self, entry: VllmRequest, refusal: RefuseRequest) -> None:
        self._abort(entry)
        self._refusals.append(replace(refusal, server_losses=entry.losses.count))

    async def _serve(self, entry: VllmRequest) -> None:
        """Run a request in vLLM; an error ends only this request, unless vLLM is dead."""
        request = entry.request
        # The output of a resumed request becomes part of the prompt (vLLM's `TokensInput`).
        token_ids = [*request.prompt_ids, *request.output_ids]
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": token_ids}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        if self._state.upstream:
            prompt["server_losses"] = entry.losses
        reader = OutputReader(request)
        try:
            if request.output_ids and not self._state.resumes:
                raise CannotResume(f"{self._name} cannot continue the output of another worker")
            params = self._to_params(parameters_of(request, self._name))
            # Closing the generator early makes vLLM abort the request.
            async with aclosing(self._outputs(entry, prompt, params)) as outputs:
                async for output in outputs:
                    self._note(entry, reader.read(output), output)
        except self._dead:
            raise
        except self._invalid as error:
            self._refuse(entry, RefuseRequest(request.request_id, str(error)))
        except self._transient as error:
            log.warning(
                *("request %s failed in %s: %s", request.request_id, self._name),
                error.__cause__ or error,
            )
            self._refuse(entry, self._failed(request, str(error)))
        except Exception:
            log.exception(
                "request %s failed in %s with an unexpected error", request.request_id, self._name
            )
            self._refuse(entry, self._failed(request))

    def _outputs(
        self, entry: VllmRequest, prompt: Any, params: Any
    ) -> AsyncGenerator[VllmOutput, None]:
        request, claim = entry.request, entry.claim
        generate = self._engine.generate if claim is None else claim.generate
        return generate(prompt, params, request.request_id, priority=priority_of(request.service))

    def _note(self, entry: VllmRequest, tokens: list[EmitToken], output: VllmOutput) -> None:
        self._answered_s = self._now_s()
        times = times_of(output.metrics) if output.finished else None
        self._requests.emit(entry, len(tokens), output.num_cached_tokens or 0)
        if output.finished:
            self._requests.remove(entry)
            if times is not None:
                self._times[entry.request.request_id] = times
        self._tokens += tokens
        self._changed.set()

    def _refuse(self, entry: VllmRequest, refusal: RefuseRequest) -> None:
        if self._requests.remove(entry):
            self._refusals.append(replace(refusal, server_losses=entry.losses.count))
            self._changed.set()

    async def _poll_liveness(self) -> None:
        """Check that vLLM responds, and return requests that wait too long to the scheduler."""
        while True:
            await self._engine.is_paused()
            self._answered_s = self._now_s()
            for entry in self._requests.overdue(self._answered_s):
                self._give_back(entry, returned(entry.request.request_id))
            self._changed.set()
            await asyncio.sleep(LIVENESS_POLL_S)

    async def _send_progress(self) -> None:
        while True:
            await self._changed.wait()
            # The tasks of a step's other requests have run by now, so their tokens share the frame.
            self._changed.clear()
            if self._now_s() - self._answered_s > SILENT_AFTER_S:
                continue
            prepared, self._prepared = self._prepared, []
            for answer in prepared:
                await self._send(answer)
            await self._send(self._progress())

    async def _send(self, frame: FromEngine) -> None:
        await self._socket.send(encode(frame))

    def _progress(self) -> Progress:
        """The frame with all events since the last frame."""
        load = self._load()
        report = EngineReport(
            load,
            self._epoch,
            parameter_bytes=self._facts.parameter_bytes,
            upstream=self._state.upstream,
            outage=self._state.outage,
        )
        progress = Progress(self._received, self._tokens, self._refusals, report, times=self._times)
        self._received, self._tokens, self._refusals, self._times = [], [], [], {}
        return progress

    def _load(self) -> Load:
        self._requests.blocks = self._state.kv_blocks or self._requests.blocks
        load = replace(self._requests.load(), sequences_max=self._state.sequences_max)
        if self._adapters is not None:
            load = replace(load, adapter_use=self._adapters.use())
        # Without free blocks, the scheduler assigns no requests.
        return load if self._state.has_room else replace(load, kv_blocks_free=0)

    def _failed(self, request: Request, why: str = "") -> RefuseRequest:
        reason = f" ({why})" if why else ""
        message = f"the request failed in {self._name}{reason}; retry"
        return RefuseRequest(request.request_id, message, retryable=True)
