"""A worker's end of a gateway's Generate stream: queued messages, and the requests on it."""

import asyncio
from dataclasses import dataclass, field

import grpc.aio

from tideserve.common.v1 import load_pb2
from tideserve.worker.v1 import worker_pb2 as pb

# Messages (one per engine iteration) that may wait for a gateway before its stream is ended.
OUTBOX_MAX = 4096

Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


@dataclass(eq=False, slots=True)
class GatewayStream:
    """The messages queued for a gateway, and the ids of the requests that it reads."""

    outbox: asyncio.Queue[pb.GenerateResponse] = field(
        default_factory=lambda: asyncio.Queue(OUTBOX_MAX)
    )
    request_ids: set[str] = field(default_factory=set)
    overflowed: asyncio.Event = field(default_factory=asyncio.Event)

    def post(self, events: list[pb.RequestEvent], load: load_pb2.WorkerLoad | None = None) -> None:
        """Queue a message; sets `overflowed` if `OUTBOX_MAX` messages wait already."""
        try:
            self.outbox.put_nowait(pb.GenerateResponse(events=events, load=load))
        except asyncio.QueueFull:
            self.overflowed.set()

    async def write_all(self, context: Context) -> None:
        """Send queued messages until cancelled."""
        while True:
            await context.write(await self.outbox.get())
