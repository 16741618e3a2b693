"""The servicer's client of a worker's engine process: starts, commands and supervises it."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import zmq

from services.common.child import Child
from services.common.clock import monotonic_s
from services.common.config import dump
from services.common.errors import ServiceError
from services.common.settings import PREFIX
from services.common.timeouts import timeout
from services.common.vllm_environment import vllm_environment
from services.core.cost.model import CostModel
from services.core.engine_kind import EngineKind
from services.core.report import EngineReport, Load, OtherRoom
from services.core.request import Request
from services.core.stall_limit import StallLimit
from services.worker.config import WorkerConfig
from services.worker.frame_socket import FrameSocket
from services.worker.ipc import (
    FRAMES_MAX,
    HEARTBEAT_INTERVAL_S,
    AbortAttempt,
    AbortRequest,
    ApplyConfiguration,
    CostsLearned,
    EngineReady,
    EngineUnusable,
    Introduce,
    Prepare,
    Prepared,
    Progress,
    ReturnRequests,
    Shipped,
    ShipRequests,
    StartRequest,
    ToEngine,
    encode,
    from_engine_decoder,
    heartbeat_address,
)

VLLM_ENGINE = Path(__file__).resolve().parent / "vllm_engine" / "__main__.py"

VISIBLE_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Setting of torch's GPU allocator against fragmentation by activations of varying size."""


def engine_command(config: WorkerConfig) -> list[str]:
    """The command line of the configured engine, without the arguments common to all engines."""
    if config.engine == EngineKind.VLLM:
        # -P: keep the script's folder off sys.path, so that its files shadow no modules.
        return [str(config.engine_python), "-P", str(VLLM_ENGINE)]
    if config.engine == EngineKind.OPENAI:
        return [sys.executable, "-m", "services.worker.openai_engine"]
    return [sys.executable, "-m", "services.worker.engine"]


def engine_environment(
    config: WorkerConfig, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment variables of the engine process, based on the inherited variables."""
    # Remove tideserve's variables: the engine reads its configuration, without secrets, from stdin.
    kept = {key: value for key, value in inherited.items() if not key.startswith(PREFIX)}
    if config.engine == EngineKind.OPENAI:
        return kept
    if config.engine == EngineKind.VLLM:
        assert config.engine_python is not None
        on_cpu = config.device == "cpu"
        visible = kept | _own_gpus(config.device, config.engine_devices, kept)
        return vllm_environment(visible, config.engine_python, config.threads, on_cpu)
    allocator = {} if config.device == "cpu" else ALLOCATOR
    return allocator | kept | {"OMP_NUM_THREADS": str(config.threads)}


def _own_gpus(device: str, count: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """`CUDA_VISIBLE_DEVICES` with `cuda:N` and the GPUs after it, because vLLM uses the first."""
    number = device.partition(":")[2]
    if not number:
        return {}
    visible_gpus = inherited.get(VISIBLE_GPUS_VARIABLE, "").split(",")
    first = int(number)
    chosen = list(map(str, range(first, first + count)))
    if first + count <= len(visible_gpus) and visible_gpus != [""]:
        chosen = visible_gpus[first : first + count]
    return {VISIBLE_GPUS_VARIABLE: ",".join(chosen)}


SEND_TIMEOUT_S = 5.0
WATCH_INTERVAL_S = 0.5
HEARTBEATS_MAX = 1000
"""Maximum number of queued heartbeats, which is those of more than 8 minutes."""
HEARTBEATS_MISSED = 3
"""An engine counts as hung only after this many missed heartbeats."""
OVERSLEEP_MAX_S = 2.0
"""If the servicer wakes up later than planned by this, it was suspended itself."""


class EngineStopped(ServiceError):
    """The engine process has ended, or is silent; a restart of the worker may help."""

    exit_code = 1


class EngineClient:
    """Owns the engine process and the socket to it."""

    def __init__(self, config: WorkerConfig, incarnation: str) -> None:
        """`config` is from `completed_config`; `incarnation` identifies this worker process."""
        assert config.run_dir is not None
        self._config = config
        self._incarnation = incarnation
        self._path = config.run_dir / f"engine-{os.getpid()}.sock"
        self._socket = FrameSocket(zmq.PAIR, FRAMES_MAX)
        self._heartbeats = FrameSocket(zmq.PULL, HEARTBEATS_MAX)
        self._process: Child | None = None
        self._last_frame_s = 0.0
        self._last_heartbeat_s = 0.0  # 0 for an engine without heartbeats
        self._hung = False
        self._stall = StallLimit(config.engine_unready_s / 2)
        self._preparing: dict[str, asyncio.Future[Prepared]] = {}
        self._shipping: dict[str, asyncio.Future[Shipped]] = {}
        self.report = EngineReport(Load(0, 0, 0, 0))
        self.cost_model: CostModel | None = None  # the last that the engine sent while it serves
        self.costs_learned = asyncio.Event()  # set with `cost_model`
        self.generated_tokens = 0

    @property
    def pid(self) -> int:
        """Process id of the engine, 0 before it is started."""
        return self._process.pid if self._process is not None else 0

    @property
    def responsive(self) -> bool:
        """Whether the last frame or heartbeat of the engine is newer than `engine_unready_s`."""
        return self.heartbeat_age_s < self._config.engine_unready_s

    @property
    def hung(self) -> bool:
        """Whether the engine has been silent for longer than its limit, and still is.

        The limit is half of `engine_unready_s`, but at least `HEARTBEATS_MISSED` intervals. For an
        engine that sends no heartbeats (vLLM), it grows with recent silences between frames.
        """
        return self._hung

    @property
    def silent_s(self) -> float:
        """Seconds since the last frame; an idle engine sends several frames per second."""
        return monotonic_s() - self._last_frame_s

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last frame or heartbeat; only heartbeats continue in an iteration."""
        return monotonic_s() - max(self._last_frame_s, self._last_heartbeat_s)

    async def start(self, advertise: str = "127.0.0.1") -> EngineReady:
        """Start the process and wait until it has loaded the model.

        `advertise`: the host under which other engines reach this engine.

        Raises:
            ServiceError: if the engine cannot start, with its error text.
        """
        config = self._config
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        address = f"ipc://{self._path}"
        self._socket.bind(address)
        self._heartbeats.bind(heartbeat_address(address))
        command = engine_command(config)
        command += ["--socket", address, "--parent", str(os.getpid())]
        command += ["--incarnation", self._incarnation]
        self._process = Child(command, env=engine_environment(config))
        # Ignore a broken pipe: the exit of the engine is reported below. The pipe's buffer holds
        # the whole configuration, so this write does not block.
        with contextlib.suppress(BrokenPipeError), self._process.input as pipe:
            pipe.write(dump(replace(config, advertise=advertise)).encode())
        first = asyncio.ensure_future(self._socket.recv())
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait(
                (first, ended), timeout=config.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not first.done() and ended.done():
                # The engine's last frame, with its error, may still be in transit.
                await asyncio.wait((first,), timeout=1.0)
            if not first.done():
                raise ServiceError(self._start_failure(config.start_timeout_s))
            frame = from_engine_decoder.decode(first.result())
        finally:
            first.cancel()
            ended.cancel()
        if isinstance(frame, EngineUnusable):
            raise ServiceError(frame.message)
        assert isinstance(frame, EngineReady)
        self._last_frame_s = monotonic_s()
        blocks = frame.kv_blocks_total
        load = Load(0, 0, blocks, 0, kv_blocks_total=blocks)
        self.report = EngineReport(load, parameter_bytes=frame.parameter_bytes)
        return frame

    async def run(
        self, on_progress: Callable[[Progress], None], on_hung: Callable[[], None]
    ) -> None:
        """Receive frames until cancelled.

        `on_progress` is called for each frame, after `report` was updated. `on_hung` is called when
        `hung` becomes true.

        Raises:
            ExceptionGroup: with EngineStopped, if the process ends, or is silent for
                `engine_dead_s`.
        """
        assert self._process is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive(on_progress))
            tasks.create_task(self._receive_heartbeats())
            tasks.create_task(self._watch(on_hung))
            code = await self._process.wait()
            raise EngineStopped(f"the engine process ended with code {code}")

    async def start_request(self, request: Request) -> None:
        """Submit a request to the engine."""
        await self._send(StartRequest(request))

    async def abort_request(self, request_id: str) -> None:
        """Abort a request in the engine."""
        await self._send(AbortRequest(request_id))

    async def return_requests(self, room: OtherRoom) -> None:
        """Return requests for which other groups have `room`; the worker shuts down."""
        await self._send(ReturnRequests(room))

    async def apply(self, configuration: ApplyConfiguration) -> None:
        """Apply a committed configuration in the engine."""
        await self._send(configuration)

    async def prepare(self, preparation: Prepare, timeout_s: float) -> Prepared:
        """Prepare a group change in the engine, and wait for its answer; call once per attempt.

        Raises:
            TimeoutError: if there is no answer within `timeout_s`; the caller aborts the attempt.
        """
        answer: asyncio.Future[Prepared] = asyncio.get_running_loop().create_future()
        self._preparing[preparation.attempt] = answer
        try:
            async with timeout(timeout_s):
                await self._send(preparation)
                return await answer
        finally:
            del self._preparing[preparation.attempt]

    async def abort_preparation(self, attempt: str) -> None:
        """Abort the preparation of an attempt in the engine."""
        await self._send(AbortAttempt(attempt))

    async def introduce(self, introduction: Introduce) -> None:
        """Let workers of other groups connect to the engine."""
        await self._send(introduction)

    async def ship(self, command: ShipRequests, timeout_s: float) -> Shipped:
        """Move running requests to an introduced worker, and wait until no further one moves.

        Raises:
            TimeoutError: if there is no answer within `timeout_s`; requests may still move.
        """
        answer: asyncio.Future[Shipped] = asyncio.get_running_loop().create_future()
        self._shipping[command.order] = answer
        try:
            async with timeout(timeout_s):
                await self._send(command)
                return await answer
        finally:
            del self._shipping[command.order]

    async def stop(self) -> None:
        """Kill the process and remove its sockets."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._socket.close()
        self._heartbeats.close()
        for path in (self._path, self._path.with_name(heartbeat_address(self._path.name))):
            path.unlink(missing_ok=True)

    async def _send(self, frame: ToEngine) -> None:
        # Frames to an ended engine are discarded: `run` reports its end.
        if self._process is None or self._process.returncode is not None:
            return
        async with timeout(SEND_TIMEOUT_S):
            await self._socket.send(encode(frame))

    async def _receive(self, on_progress: Callable[[Progress], None]) -> None:
        while True:
            frame = from_engine_decoder.decode(await self._socket.recv())
            # A frame ends a silence, whose length adapts the limit of an engine without heartbeats.
            self._stall.note_completed(self.silent_s)
            self._last_frame_s = monotonic_s()
            self._hung = False
            if isinstance(frame, Prepared):
                answer = self._preparing.get(frame.attempt)
                if answer is not None and not answer.done():
                    answer.set_result(frame)
                continue
            if isinstance(frame, Shipped):
                ended = self._shipping.get(frame.order)
                if ended is not None and not ended.done():
                    ended.set_result(frame)
                continue
            if isinstance(frame, CostsLearned):
                self.cost_model = frame.cost_model
                self.costs_learned.set()
                continue
            assert isinstance(frame, Progress)
            self.report = frame.report
            self.generated_tokens += len(frame.tokens)
            on_progress(frame)

    async def _receive_heartbeats(self) -> None:
        while True:
            await self._heartbeats.recv()
            self._last_heartbeat_s = monotonic_s()
            self._hung = False

    async def _watch(self, on_hung: Callable[[], None]) -> None:
        while True:
            checked_s = monotonic_s()
            await asyncio.sleep(WATCH_INTERVAL_S)
            if monotonic_s() - checked_s > WATCH_INTERVAL_S + OVERSLEEP_MAX_S:
                # This process was suspended, perhaps with the engine: restart the silence timer.
                self._last_frame_s = monotonic_s()
            was_hung, self._hung = self._hung, self._exceeds_limit()
            if self._hung and not was_hung:
                on_hung()
            if self.silent_s > self._config.engine_dead_s:
                raise EngineStopped(f"the engine process has been silent for {self.silent_s:.0f} s")

    def _exceeds_limit(self) -> bool:
        if self._last_heartbeat_s:
            return self.heartbeat_age_s > max(
                self._config.engine_unready_s / 2, HEARTBEATS_MISSED * HEARTBEAT_INTERVAL_S
            )
        return self.silent_s > self._stall.limit_s

    def _start_failure(self, timeout_s: float) -> str:
        assert self._process is not None
        if self._process.returncode is None:
            return f"the engine did not load the model within {timeout_s:.0f} s; see its log"
        return f"the engine process ended with code {self._process.returncode} during its start"
