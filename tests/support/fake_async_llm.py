"""A fake of vLLM's `AsyncLLM`: the test supplies each request's outputs."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.common.adapter_files import WEIGHTS
from services.core.planner.config import IterationConfig
from services.worker.ipc import (
    AbortRequest,
    EngineReady,
    Prepared,
    Progress,
    ToEngine,
    encode,
    from_engine_decoder,
)
from services.worker.vllm_engine.adapter import OpenedEngine, VllmAdapter
from services.worker.vllm_engine.adapter_slots import AdapterSlots
from services.worker.vllm_engine.running import StepStats
from tests.support.waiting import eventually

FACTS = EngineReady(256, 99, 16, 40, 640, 1000, 500, 0)


class Invalid(Exception):
    """As `VLLMClientError`."""


class Transient(Exception):
    """As `EngineGenerateError`."""


class Dead(Exception):
    """As `EngineDeadError`."""


@dataclass
class FakeLogprob:
    logprob: float
    rank: int | None = None


@dataclass
class FakeCompletion:
    token_ids: Sequence[int]
    finish_reason: str | None = None
    logprobs: Sequence[Mapping[int, FakeLogprob]] | None = None


@dataclass
class FakeMetrics:
    queued_ts: float = 1.0
    scheduled_ts: float = 3.0
    first_token_ts: float = 7.0
    last_token_ts: float = 15.0


@dataclass
class FakeOutput:
    outputs: Sequence[FakeCompletion]
    prompt_logprobs: Sequence[Mapping[int, FakeLogprob] | None] | None = None
    metrics: FakeMetrics | None = field(default_factory=FakeMetrics)
    num_cached_tokens: int | None = 0

    @property
    def finished(self) -> bool:
        return self.outputs[0].finish_reason is not None


def output(*token_ids: int, ended: str | None = None) -> FakeOutput:
    return FakeOutput([FakeCompletion(token_ids, ended)])


@dataclass(frozen=True)
class FakeLora:
    """As vLLM's `LoRARequest`."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class FakeAsyncLLM:
    """`given`: prompt and parameters by request; `aborted`: requests whose reader was cancelled.

    `priorities` and `loras` by request. `weights`: contents of the weights files of the
    adapters that are loaded, by id. Loads wait for `loads`, and fail with the text in `rejects`.
    """

    given: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    priorities: dict[str, int] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    dead: bool = False
    asked: int = 0
    loras: dict[str, Any] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    added: list[FakeLora] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    loads: asyncio.Event = field(default_factory=asyncio.Event)
    rejects: str = ""
    _queues: dict[str, asyncio.Queue[FakeOutput | Exception]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.answers.set()
        self.loads.set()

    def emit(self, request_id: str, *results: FakeOutput | Exception) -> None:
        for result in results:
            self._queues[request_id].put_nowait(result)

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: Any = None,
        priority: int,
    ) -> AsyncGenerator[FakeOutput, None]:
        queue: asyncio.Queue[FakeOutput | Exception] = asyncio.Queue()
        self._queues[request_id] = queue
        self.given[request_id] = prompt, sampling_params
        self.priorities[request_id] = priority
        self.loras[request_id] = lora_request
        try:
            while True:
                result = await queue.get()
                if isinstance(result, Exception):
                    raise result
                yield result
                if result.finished:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise

    async def add_lora(self, lora_request: FakeLora) -> bool:
        await self.loads.wait()
        if self.dead:
            raise Dead
        if self.rejects:
            raise ValueError(self.rejects)
        self.added.append(lora_request)
        folder = Path(lora_request.lora_path)
        self.weights[lora_request.lora_int_id] = (folder / WEIGHTS).read_text()
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        self.removed.append(lora_id)
        return self.weights.pop(lora_id, None) is not None

    async def is_paused(self) -> bool:
        self.asked += 1
        await self.answers.wait()
        if self.dead:
            raise Dead
        return False


class FakeSocket:
    """The adapter's socket; `to_engine` and `received` are the servicer's side."""

    def __init__(self) -> None:
        self.to_engine: asyncio.Queue[bytes] = asyncio.Queue()
        self.received: list[Progress | Prepared] = []

    async def recv(self) -> bytes:
        return await self.to_engine.get()

    async def send(self, frame: bytes) -> None:
        decoded = from_engine_decoder.decode(frame)
        assert isinstance(decoded, Progress | Prepared)
        self.received.append(decoded)


class AdapterOnTest:
    """A running adapter between a servicer and a vLLM that the test plays.

    `opened`: an engine to use instead of the fake vLLM.
    """

    def __init__(
        self,
        max_waiting: int = 100,
        opened: OpenedEngine | None = None,
        adapter_slots: int = 0,
        adapter_roots: Sequence[Path] = (),
    ) -> None:
        self.llm = FakeAsyncLLM()
        self.stats = StepStats()
        self.socket = FakeSocket()
        self.now_s = 0.0
        fake = OpenedEngine(self.llm, FACTS, self.stats, dict, (Invalid,), (Transient,), (Dead,))
        if adapter_slots:
            fake = replace(fake, adapters=self._slots(adapter_slots, adapter_roots))
        config = IterationConfig(max_waiting=max_waiting)
        adapter = VllmAdapter("w0", config, opened or fake, self.socket, lambda: self.now_s)
        self.running = asyncio.create_task(adapter.run())

    def _slots(self, count: int, roots: Sequence[Path]) -> AdapterSlots:
        return AdapterSlots(self.llm, count, roots, FakeLora, (Dead,), lambda: self.now_s)

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])

    def send(self, frame: ToEngine) -> None:
        self.socket.to_engine.put_nowait(encode(frame))

    @property
    def progress(self) -> list[Progress]:
        return [frame for frame in self.socket.received if isinstance(frame, Progress)]

    async def until_received(self, *request_ids: str) -> Progress:
        """Wait for the frame that acknowledges the last of these requests."""

        def answering() -> Progress | None:
            seen = {request_id for frame in self.progress for request_id in frame.received}
            return self.progress[-1] if seen >= set(request_ids) else None

        return await eventually(answering, interval_s=0.001)

    async def settled(self) -> Progress:
        """The newest frame after all pending output was published."""
        before = len(self.progress)
        # An abort of an unknown request has no effect, but makes the adapter publish.
        self.send(AbortRequest("unknown"))
        return await eventually(
            lambda: self.progress[-1] if len(self.progress) > before else None, interval_s=0.001
        )
