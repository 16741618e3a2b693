"""Engine processes that merge over UCX; the test plays their servicers and clients."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from services.core.groups.layer_map import Stage
from services.core.request import FinishReason, Request, TokenLogprobs
from services.worker.config import WorkerConfig
from services.worker.engine_client import EngineClient
from services.worker.ipc import (
    ApplyConfiguration,
    EngineReady,
    GroupPlan,
    Lane,
    MemberPlan,
    Prepare,
    Progress,
)

DEADLINE_S = 120.0
NOT_YET = "try again"

Groups = Sequence[Sequence[Stage]]


@dataclass
class Stream:
    """A request and the output that its client has received.

    `tokens` and `logprobs` by output index; `adopted`: the outputs that each new owner reported.
    `stop_after`: number of output tokens after which the gateway detects a stop string.
    """

    request: Request
    owner: str
    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] | None = None
    adopted: list[list[int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    aborted: bool = False
    stop_after: int | None = None

    @property
    def over(self) -> bool:
        return self.finish_reason is not None or self.aborted

    def output(self) -> list[int]:
        """The tokens in order. Raises AssertionError on a gap, or if an owner reported others."""
        assert set(self.tokens) == set(range(len(self.tokens))), "a token is missing"
        output = [self.tokens[index] for index in range(len(self.tokens))]
        for adopted in self.adopted:
            known = min(len(adopted), len(output))
            assert adopted[:known] == output[:known], "it was adopted with other tokens"
        return output


@dataclass
class Worker:
    """An engine process."""

    client: EngineClient
    facts: EngineReady

    @property
    def idle(self) -> bool:
        """Whether no request holds a block, runs or waits."""
        load = self.client.report.load
        idle = (load.running, load.waiting) == (0, 0)
        return idle and load.kv_blocks_free == load.kv_blocks_total

    @property
    def at_rest(self) -> bool:
        """Whether it is idle, with the memory it had at the start."""
        report = self.client.report
        blocks, parameter_bytes = report.load.kv_blocks_total, report.parameter_bytes
        at_start = (self.facts.kv_blocks_total, self.facts.parameter_bytes)
        return self.idle and (blocks, parameter_bytes) == at_start


class EngineProcesses:
    """Engine processes of one model; each starts in a group of its own."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.streams: dict[str, Stream] = {}
        self.groups: list[list[Stage]] = []
        self.moved = 0  # requests that continued at another engine
        self.preemptions = 0
        self._attempts = 0
        self._epoch = 0
        self._clients: list[EngineClient] = []
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(
        self,
        config: WorkerConfig,
        names: Sequence[str],
        advertise: Mapping[str, str] | None = None,
        changes: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the processes concurrently; they differ in `worker_id` and `run_dir`.

        `advertise`: the hosts at which they reach each other's lanes; this machine by default.
        `changes`: overrides of `config`, by name.
        """
        run_dir = config.run_dir
        assert run_dir is not None
        clients = {
            name: EngineClient(
                replace(
                    config, worker_id=name, run_dir=run_dir / name, **(changes or {}).get(name, {})
                ),
                f"{name}-1",
            )
            for name in names
        }
        self._clients = list(clients.values())
        hosts = advertise or dict.fromkeys(names, "127.0.0.1")
        facts = await asyncio.gather(*(clients[name].start(hosts[name]) for name in names))
        self.workers = {
            name: Worker(clients[name], fact) for name, fact in zip(names, facts, strict=True)
        }
        for name, client in clients.items():
            self._spawn(client.run(partial(self._note, name), lambda: None))
        for name in names:
            await self._commit([[self.alone(name)]])

    async def stop(self) -> None:
        """Stop the processes in any state."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            await client.stop()

    def alone(self, name: str) -> Stage:
        """All layers on one worker."""
        shape = self.workers[name].facts.shape
        assert shape is not None
        return Stage(name, 0, shape.num_layers)

    # --- clients

    async def serve(self, request: Request, leader: str) -> None:
        """Submit a request to a leader."""
        assert request.request_id not in self.streams
        self.streams[request.request_id] = Stream(request, leader)
        await self.workers[leader].client.start_request(request)

    async def abort(self, request_id: str) -> None:
        """Abort a request, also at later owners."""
        stream = self.streams[request_id]
        stream.aborted = True
        await self.workers[stream.owner].client.abort_request(request_id)

    def stop_after(self, request_id: str, tokens: int) -> None:
        """Place a stop string at output token `tokens`, at which the gateway aborts the request."""
        self.streams[request_id].stop_after = tokens
        self._look_for_stop(self.streams[request_id])

    # --- changes

    async def reconfigure(self, groups: Groups, *, abandon: bool = False) -> bool:
        """Prepare and commit; False if a member refuses, or if `abandon` aborts the attempt."""
        names = [stage.worker_id for group in groups for stage in group]
        clients = [self.workers[name].client for name in names]
        while True:
            self._attempts += 1
            attempt = f"attempt-{self._attempts}"
            command = Prepare(attempt, self._plans(groups, self._epoch + 1))
            answers = await asyncio.gather(
                *(client.prepare(command, DEADLINE_S) for client in clients)
            )
            errors = [answer.error for answer in answers if answer.error]
            if not errors and not abandon:
                await self._commit(groups)
                return True
            for client in clients:
                await client.abort_preparation(attempt)
            if not any(NOT_YET in error for error in errors):
                return False
            await self._next_news()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, checked after each frame of an engine. Raises TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                for task in self._tasks:
                    if task.done():
                        task.result()  # an engine has exited: fail instead of waiting
                await self._next_news()

    async def _next_news(self) -> None:
        self._news.clear()
        async with asyncio.timeout(DEADLINE_S):
            await self._news.wait()

    async def _commit(self, groups: Groups) -> None:
        self._epoch += 1
        names = {stage.worker_id for group in groups for stage in group}
        kept = [stages for stages in self.groups if not any(s.worker_id in names for s in stages)]
        self.groups = [*kept, *(list(group) for group in groups)]
        command = ApplyConfiguration(self._plans(groups, self._epoch))
        for name in names:
            await self.workers[name].client.apply(command)

    def _plans(self, groups: Groups, epoch: int) -> list[GroupPlan]:
        return [
            GroupPlan(
                f"group-{group[0].worker_id}", epoch, [self._plan_of(stage) for stage in group]
            )
            for group in groups
        ]

    def _plan_of(self, stage: Stage) -> MemberPlan:
        name, facts = stage.worker_id, self.workers[stage.worker_id].facts
        return MemberPlan(
            name,
            f"{name}-1",
            stage.first_layer,
            stage.end_layer,
            Lane(facts.activation_address, f"activations of {name} in {self._attempts}"),
            Lane(facts.bulk_address, f"bulk of {name}, for attempt {self._attempts}"),
            f"address of {name}",
        )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(coroutine))

    def _note(self, name: str, progress: Progress) -> None:
        """Apply a progress frame of an engine."""
        for adopted in progress.adopted:
            stream = self.streams[adopted.request_id]
            stream.owner = name
            stream.adopted.append(adopted.emitted_ids)
            if stream.aborted:
                self._spawn(self.workers[name].client.abort_request(adopted.request_id))
        for token in progress.tokens:
            stream = self.streams[token.request_id]
            if stream.aborted:
                continue
            assert token.index not in stream.tokens, f"{token} comes twice"
            stream.tokens[token.index] = token.token_id
            if token.logprobs is not None:
                (stream.logprobs[token.index],) = token.logprobs.unpacked()
            if token.prompt_logprobs is not None:
                assert stream.prompt_logprobs is None, "the prompt's rows come twice"
                stream.prompt_logprobs = token.prompt_logprobs.unpacked()
            stream.finish_reason = token.finish_reason or stream.finish_reason
            self._look_for_stop(stream)
        assert not progress.refusals, progress.refusals
        self.moved += len(progress.moved)
        self.preemptions = max(self.preemptions, progress.report.load.preemptions_total)
        self._news.set()

    def _look_for_stop(self, stream: Stream) -> None:
        complete = stream.stop_after is not None and len(stream.tokens) >= stream.stop_after
        if complete and not stream.over:
            stream.aborted = True
            self._spawn(self.abort(stream.request.request_id))
