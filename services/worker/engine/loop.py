"""The engine's loop: drain the inbox, plan an iteration, run it, publish what it produced."""

import logging

import zmq

from services.common.clock import monotonic_s
from services.core.iteration.events import (
    Command,
    EmitToken,
    Event,
    IterationFinished,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
)
from services.core.iteration.state import IterationState
from services.worker.engine.runner import ModelRunner
from services.worker.ipc import (
    AbortRequest,
    FromEngine,
    Progress,
    StartRequest,
    encode,
    to_engine_decoder,
)

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
        self, state: IterationState, runner: ModelRunner, socket: zmq.Socket[bytes]
    ) -> None:
        self._state = state
        self._runner = runner
        self._socket = socket
        self._received: list[str] = []

    def run(self) -> None:
        """Serve until the process is ended."""
        while True:
            self.step(IDLE_HEARTBEAT_MS)

    def step(self, wait_ms: int) -> None:
        """One turn: wait for work up to `wait_ms` if there is none, run one iteration, publish."""
        commands = self._drain_inbox()
        batch = self._state.plan()
        if batch is None:
            if not commands:
                self._socket.poll(wait_ms)
        else:
            sampled = self._runner.run(batch)
            commands += self._state.handle(IterationFinished(monotonic_s(), sampled))
        self._publish(commands)

    def _drain_inbox(self) -> list[Command]:
        commands: list[Command] = []
        while self._socket.poll(0):
            commands += self._state.handle(self._receive())
        return commands

    def _receive(self) -> Event:
        frame = to_engine_decoder.decode(self._socket.recv())
        match frame:
            case StartRequest(request=request):
                self._received.append(request.request_id)
                return RequestArrived(monotonic_s(), request)
            case AbortRequest(request_id=request_id):
                return RequestAborted(monotonic_s(), request_id)

    def _publish(self, commands: list[Command]) -> None:
        tokens = [command for command in commands if isinstance(command, EmitToken)]
        refusals = [command for command in commands if isinstance(command, RefuseRequest)]
        received, self._received = self._received, []
        send(self._socket, Progress(received, tokens, refusals, self._state.load()))
