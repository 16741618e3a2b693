"""The engine's loop: drain the inbox, plan an iteration, run it, publish what it produced."""

import logging
from collections import deque

import zmq

from services.common.clock import monotonic_s
from services.common.event_log import EventLog
from services.core.iteration.batch import Microbatch
from services.core.iteration.events import (
    Command,
    EmitToken,
    Event,
    IterationDropped,
    IterationFinished,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
)
from services.core.iteration.state import IterationState
from services.worker.engine.pacer import Pacer
from services.worker.engine.runner import ModelRunner
from services.worker.ipc import (
    FRAMES_MAX,
    Abandon,
    AbortRequest,
    ApplyConfiguration,
    FromEngine,
    Prepare,
    Prepared,
    Progress,
    StartRequest,
    encode,
    to_engine_decoder,
)
from services.worker.profile.idle import IdleProfiler

IDLE_HEARTBEAT_MS = 500
SEND_TIMEOUT_MS = 10_000

log = logging.getLogger(__name__)


def connect(address: str) -> zmq.Socket[bytes]:
    """The engine's end of the socket to its servicer; sending gives up after a deadline."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, SEND_TIMEOUT_MS)
    socket.connect(address)
    return socket


def send(socket: zmq.Socket[bytes], frame: FromEngine) -> None:
    """Send a frame; raises zmq.Again when the servicer takes nothing for `SEND_TIMEOUT_MS`."""
    socket.send(encode(frame))


class EngineLoop:
    """Drives the planner with what arrives, and the model with what it plans."""

    def __init__(
        self,
        state: IterationState,
        runner: ModelRunner,
        socket: zmq.Socket[bytes],
        pacer: Pacer | None = None,
        profiler: IdleProfiler | None = None,
        event_log: EventLog | None = None,
    ) -> None:
        self._state = state
        self._runner = runner
        self._socket = socket
        self._pacer = pacer
        self._profiler = profiler
        self._event_log = event_log
        self._inbox: deque[Event] = deque()
        self._received: list[str] = []
        self._dropped = False  # whether the last iteration was given up

    def run(self) -> None:
        """Serve until the process is ended."""
        while True:
            self.step(IDLE_HEARTBEAT_MS)

    def step(self, wait_ms: int) -> None:
        """One turn: wait for work up to `wait_ms` if there is none, run one iteration, publish."""
        commands = self._drain_inbox()
        microbatch = self._plan()
        if microbatch is not None:
            commands += self._run(microbatch)
        elif not commands and not self._profiled_a_batch():
            self._socket.poll(wait_ms)
        self._publish(commands)

    def _run(self, microbatch: Microbatch) -> list[Command]:
        """Run an iteration; it is given up when one of its requests is aborted meanwhile.

        So blocks are free within a layer's time, however long the iteration. Never two in a row,
        or a storm of aborts would hold everybody up.
        """
        started_s = monotonic_s()
        if self._profiler is not None:
            self._profiler.note_work()
        batch = microbatch.batch
        ids = frozenset(chunk.request_id for chunk in batch.chunks)
        interrupted = None if self._dropped else lambda: self._aborts_one_of(ids)
        sampled = self._runner.run(batch, interrupted)
        self._dropped = sampled is None
        if sampled is None:
            return self._handle(IterationDropped(monotonic_s()))
        if self._pacer is not None:
            self._pacer.pad(batch, started_s)
        return self._handle(IterationFinished(monotonic_s(), sampled, microbatch.number))

    def _aborts_one_of(self, request_ids: frozenset[str]) -> bool:
        """Whether the inbox holds an abort of one of them."""
        self._fill_inbox()
        return any(
            isinstance(event, RequestAborted) and event.request_id in request_ids
            for event in self._inbox
        )

    def _handle(self, event: Event) -> list[Command]:
        commands = self._state.handle(event)
        if self._event_log is not None:
            self._event_log.append("event", [event])
            self._event_log.append("command", commands)
        return commands

    def _plan(self) -> Microbatch | None:
        microbatch = self._state.plan()
        if self._event_log is not None:
            self._event_log.append("batch", [microbatch])
        return microbatch

    def _profiled_a_batch(self) -> bool:
        """Use a quiet moment; only while no sequence owns a block."""
        if self._profiler is None or self._state.sequences:
            return False
        return self._profiler.step(lambda: bool(self._socket.poll(0)))

    def _drain_inbox(self) -> list[Command]:
        self._fill_inbox()
        commands: list[Command] = []
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, RequestArrived):
                self._received.append(event.request.request_id)
            commands += self._handle(event)
        return commands

    def _fill_inbox(self) -> None:
        while len(self._inbox) < FRAMES_MAX and self._socket.poll(0):
            event = self._receive()
            if event is not None:
                self._inbox.append(event)

    def _receive(self) -> Event | None:
        frame = to_engine_decoder.decode(self._socket.recv())
        match frame:
            case StartRequest(request=request):
                return RequestArrived(monotonic_s(), request)
            case AbortRequest(request_id=request_id):
                return RequestAborted(monotonic_s(), request_id)
            case Prepare(attempt=attempt):
                error = "this engine runs all layers and cannot give any away"
                send(self._socket, Prepared(attempt, error))
                return None
            case ApplyConfiguration() | Abandon():
                # Nothing is prepared, so nothing but a group of its own can be committed.
                return None

    def _publish(self, commands: list[Command]) -> None:
        tokens = [command for command in commands if isinstance(command, EmitToken)]
        refusals = [command for command in commands if isinstance(command, RefuseRequest)]
        received, self._received = self._received, []
        send(self._socket, Progress(received, tokens, refusals, self._state.load()))
