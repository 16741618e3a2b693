"""A worker's real servicer on a loopback port; the test plays its engine."""

import asyncio
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import asynccontextmanager
from itertools import count

import grpc.aio

from services.core.planner.events import EmitToken, RefuseRequest
from services.core.report import EngineReport, Load
from services.core.request import FinishReason, Request
from services.worker.group_view import Place
from services.worker.ipc import AdoptedRequest, EngineReady, MovedRequest, Progress
from services.worker.servicer import WorkerServicer
from tests.support.waiting import eventually
from tideserve.common.v1 import load_pb2
from tideserve.worker.v1 import worker_pb2_grpc

FACTS = EngineReady(64, 100, 4, 16, 1024, 1 << 20, 1 << 18, 0)
REPORT = EngineReport(Load(0, 0, 16, 0))
EPOCHS = count(100)


class Owner:
    """Replaces EngineClient; the test decides what the engine does with its requests."""

    def __init__(self, worker_id: str, epoch: int) -> None:
        self.worker_id = worker_id
        self.address = ""
        self.now_s = 0.0
        self.place = Place(f"group-{worker_id}", epoch, leads=True)
        self.received: list[str] = []
        self.started: list[str] = []
        self.unnoted: list[str] = []
        self.aborted: list[str] = []
        self.servicer = WorkerServicer(
            self,
            FACTS,
            lambda: self.place,
            self.received.append,
            lambda: load_pb2.WorkerLoad(worker_id=worker_id),
            lambda group_id, epoch: "",
            lambda: self.now_s,
        )

    async def start_request(self, request: Request) -> None:
        """As EngineClient."""
        self.started.append(request.request_id)
        self.unnoted.append(request.request_id)

    async def abort_request(self, request_id: str) -> None:
        """As EngineClient."""
        self.aborted.append(request_id)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Owner"]:
        """Serve during the body."""
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, server)
        port = server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await server.start()
        sweeping = asyncio.create_task(self.servicer.run())
        try:
            yield self
        finally:
            sweeping.cancel()
            await asyncio.wait([sweeping])
            await server.stop(0)

    def publish(
        self,
        *commands: EmitToken | RefuseRequest | AdoptedRequest | MovedRequest,
        received: Sequence[str] | None = None,
    ) -> None:
        """Deliver a frame of the engine that acknowledges all starts, or `received`."""
        if received is None:
            received, self.unnoted = self.unnoted, []
        by_kind = {
            kind: [command for command in commands if isinstance(command, kind)]
            for kind in (EmitToken, RefuseRequest, AdoptedRequest, MovedRequest)
        }
        tokens, refusals, adopted, moved = by_kind.values()
        self.servicer.deliver(Progress(list(received), tokens, refusals, REPORT, adopted, moved))

    def emit(self, request_id: str, tokens: Sequence[int], first: int, end: int) -> None:
        """Emit tokens `first` to `end` (exclusive), each in a frame of its own."""
        for index in range(first, end):
            last = index == len(tokens) - 1
            reason = FinishReason.LENGTH if last else None
            self.publish(EmitToken(request_id, index, tokens[index], reason))

    def adopt(self, request_id: str, tokens: Sequence[int], next_index: int) -> None:
        """Adopt a request."""
        emitted = list(tokens[:next_index])
        place = self.place
        self.publish(AdoptedRequest(request_id, place.group_id, place.epoch, emitted))

    def check_idle(self) -> None:
        """Raise AssertionError if the servicer holds state of a request."""
        self.servicer._handovers.check_invariants()
        assert self.servicer.active == 0

    def moved(self, request_id: str, to: "Owner", next_index: int) -> MovedRequest:
        """The engine's event after it has handed a request to `to`: each time a newer epoch."""
        epoch = next(EPOCHS)
        group_id = to.place.group_id
        return MovedRequest(request_id, to.worker_id, to.address, group_id, epoch, next_index)

    async def has_started(self, request_id: str) -> None:
        """Wait until the engine has the request."""
        await self._has(self.started, request_id)

    async def is_awaited(self, request_id: str) -> None:
        """Wait until a gateway has attached to a request that has not arrived."""
        await self._has(self.servicer._handovers._expected, request_id)

    async def is_read(self, request_id: str) -> None:
        """Wait until a gateway reads a request."""
        await self._has(self.servicer._streams, request_id)

    async def is_unwanted(self, request_id: str) -> None:
        """Wait until the servicer has the abort of a request that has not arrived."""
        await self._has(self.servicer._handovers._aborted, request_id)

    async def has_aborted(self, request_id: str) -> None:
        """Wait until the servicer has sent an abort to the engine."""
        await self._has(self.aborted, request_id)

    async def _has(self, ids: Container[str], request_id: str) -> None:
        await eventually(lambda: request_id in ids, interval_s=0.001)
