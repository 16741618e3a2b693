"""Our engine's frames on the one side, vLLM's `AsyncLLM` on the other.

vLLM plans, runs and preempts; here requests are handed over, and their tokens told in one frame for
all that came together. Groups of several never come about: what asks for one is refused.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.clock import monotonic_s
from services.core.planner.events import EmitToken, RefuseRequest
from services.core.planner.refusal import known_already, queue_full, returned
from services.core.report import EngineReport
from services.core.request import GrammarKind, Limits, LogprobOptions, Request, Sampling
from services.worker.ipc import (
    AbortAttempt,
    AbortRequest,
    ApplyConfiguration,
    EngineReady,
    FromEngine,
    Prepare,
    Prepared,
    Progress,
    RequestTimes,
    StartRequest,
    ToEngine,
    encode,
    to_engine_decoder,
)
from services.worker.vllm_engine.arguments import priority_of
from services.worker.vllm_engine.outputs import OutputReader, RequestFailed, VllmOutput, times_of
from services.worker.vllm_engine.running import StepStats, VllmRequest, VllmRequests

log = logging.getLogger(__name__)

SEED_BITS = 63
"""vLLM takes signed seeds."""
_GRAMMAR_KEYS = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.LARK: "grammar",
}


class CannotServe(ValueError):
    """vLLM cannot do what a request asks for; one sentence of cause and remedy."""


def parameters_of(request: Request) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams`; a grammar as those of its `StructuredOutputsParams`.

    Stop tokens are ours alone: the model's own end-of-sequence tokens are among them if they shall
    end the request. Text is the gateway's, so nothing is detokenised.

    vLLM takes the output that a request came with for a part of the prompt. So presence and
    frequency penalties do not count it, and draws begin anew.

    Raises:
        CannotServe: for sequences of forbidden tokens: vLLM takes words and tokenises them itself.
            For a grammar of a request that comes with output: vLLM cannot begin in its middle.
    """
    if request.sampling.bad_words:
        raise CannotServe(
            "bad_words does not work where vLLM runs the model; use logit_bias with -100 for tokens"
            " that must not come"
        )
    if request.output_ids and request.sampling.grammar is not None:
        raise CannotServe(
            "vLLM cannot go on with an answer in the middle of a grammar; send the request again"
        )
    return {
        **_sampling(request.sampling),
        **_limits(request.limits, len(request.output_ids)),
        **_logprobs(request.logprobs),
        "ignore_eos": True,
        "detokenize": False,
    }


def _sampling(sampling: Sampling) -> dict[str, Any]:
    found: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if sampling.temperature:
        found["seed"] = sampling.seed % (1 << SEED_BITS)
    if sampling.logit_bias:
        found["logit_bias"] = dict(sampling.logit_bias)
    if sampling.allowed_token_ids:
        found["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.grammar is not None:
        grammar = sampling.grammar
        found["structured_outputs"] = {_GRAMMAR_KEYS[grammar.kind]: grammar.text}
    return found


def _limits(limits: Limits, output: int) -> dict[str, Any]:
    """The limits of a request that has so much output."""
    return {
        "max_tokens": limits.max_tokens - output,
        "min_tokens": max(0, limits.min_tokens - output),
        "stop_token_ids": sorted(limits.stop_token_ids),
    }


def _logprobs(options: LogprobOptions) -> dict[str, Any]:
    return {"logprobs": options.output, "prompt_logprobs": options.prompt}


LIVENESS_POLL_S = 0.5
"""How often vLLM is asked for a sign of life, which is also a heartbeat for the servicer."""
SILENT_AFTER_S = 3.0
"""Once vLLM has not answered for so long, the servicer is told nothing, so that it notices."""
CANNOT_MERGE = "vLLM runs the model here, and cannot run a part of its layers; leave it out"


class AsyncEngine(Protocol):
    """What is used of vLLM's `AsyncLLM`. `is_paused` is answered by the process that computes."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int
    ) -> AsyncGenerator[VllmOutput, None]: ...

    async def is_paused(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """A loaded vLLM engine, with its statistics and exception types.

    `stats` is renewed after each of its steps. `to_params` makes its sampling parameters. An error
    of `invalid` says that a request cannot be served, one of `transient` that it failed, one of
    `dead` that vLLM is. `by_priority`: it starts requests by their priorities.
    """

    engine: AsyncEngine
    facts: EngineReady
    stats: StepStats
    to_params: Callable[[Mapping[str, Any]], Any]
    invalid: tuple[type[Exception], ...]
    transient: tuple[type[Exception], ...]
    dead: tuple[type[Exception], ...]
    by_priority: bool = False


class Socket(Protocol):
    """The engine's end of the socket to its servicer."""

    def recv(self) -> Awaitable[Any]: ...

    def send(self, data: bytes, /) -> Awaitable[Any]: ...


class VllmAdapter:
    """Serves the frames of one servicer until it is cancelled or vLLM fails."""

    def __init__(
        self,
        worker_id: str,
        max_waiting: int,
        opened: OpenedEngine,
        socket: Socket,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._worker_id = worker_id
        self._max_waiting = max_waiting
        self._engine = opened.engine
        self._facts = facts = opened.facts
        self._to_params = opened.to_params
        self._invalid: tuple[type[Exception], ...] = (CannotServe, *opened.invalid)
        self._transient: tuple[type[Exception], ...] = (RequestFailed, *opened.transient)
        self._dead = opened.dead
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
        """Serve. Raises what vLLM raises when it is dead, in an exception group."""
        async with asyncio.TaskGroup() as tasks:
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
                self._drop(self._requests.get(request_id))
            case ApplyConfiguration(groups=groups):
                own = [
                    group.epoch
                    for group in groups
                    if any(member.worker_id == self._worker_id for member in group.members)
                ]
                self._epoch = max(self._epoch, *own, 0)
            case Prepare(attempt=attempt):
                self._prepared.append(Prepared(attempt, CANNOT_MERGE))
            case AbortAttempt():
                pass

    def _start(self, request: Request, tasks: asyncio.TaskGroup) -> None:
        self._received.append(request.request_id)
        if request.request_id in self._requests:
            self._refusals.append(known_already(request.request_id))
        elif len(self._requests.waiting()) >= self._max_waiting:
            self._refusals.append(queue_full(request.request_id))
        else:
            entry = self._requests.add(request, self._now_s())
            entry.task = tasks.create_task(self._serve(entry))

    def _drop(self, entry: VllmRequest | None) -> None:
        """Have vLLM abort a request: it does so when what reads the output is cancelled."""
        if entry is None or not self._requests.remove(entry):
            return
        # The same id may come again; it shall not get these.
        request_id = entry.request.request_id
        self._tokens = [token for token in self._tokens if token.request_id != request_id]
        if entry.task is not None:
            entry.task.cancel()

    async def _serve(self, entry: VllmRequest) -> None:
        """Have vLLM run a request. Whatever goes wrong ends this one alone, unless vLLM is dead."""
        request = entry.request
        # vLLM's `TokensInput`: nothing is left to be rendered.
        # Output that another worker made is a part of the prompt here.
        token_ids = [*request.prompt_ids, *request.output_ids]
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": token_ids}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        reader = OutputReader(request)
        try:
            params = self._to_params(parameters_of(request))
            # Closed, it has vLLM abort a request that has not ended.
            priority = priority_of(request.service)
            async with aclosing(
                self._engine.generate(prompt, params, request.request_id, priority=priority)
            ) as outputs:
                async for output in outputs:
                    self._note(entry, reader.read(output), output)
        except self._dead:
            raise
        except self._invalid as error:
            self._refuse(entry, RefuseRequest(request.request_id, str(error)))
        except self._transient as error:
            log.warning(
                "request %s failed in vLLM: %s", request.request_id, error.__cause__ or error
            )
            self._refuse(entry, _failed(request, str(error)))
        except Exception:
            log.exception("request %s failed in vLLM, unexpectedly", request.request_id)
            self._refuse(entry, _failed(request))

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
            self._refusals.append(refusal)
            self._changed.set()

    async def _poll_liveness(self) -> None:
        """Ask vLLM for a sign of life, and give back what it has no room for."""
        while True:
            await self._engine.is_paused()
            self._answered_s = self._now_s()
            for entry in self._requests.overdue(self._answered_s):
                self._drop(entry)
                self._refusals.append(returned(entry.request.request_id))
            self._changed.set()
            await asyncio.sleep(LIVENESS_POLL_S)

    async def _send_progress(self) -> None:
        while True:
            await self._changed.wait()
            # Readers of the other requests of a step run before this goes on.
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
        """What has come since the last one."""
        report = EngineReport(
            self._requests.load(), self._epoch, parameter_bytes=self._facts.parameter_bytes
        )
        progress = Progress(self._received, self._tokens, self._refusals, report, times=self._times)
        self._received, self._tokens, self._refusals, self._times = [], [], [], {}
        return progress


def _failed(request: Request, why: str = "") -> RefuseRequest:
    reason = f" ({why})" if why else ""
    message = f"vLLM failed with the request{reason}; try again"
    return RefuseRequest(request.request_id, message, retryable=True)
