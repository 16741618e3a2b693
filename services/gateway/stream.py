"""What the long-lived gRPC streams to scheduler and workers have in common."""

import asyncio
from typing import Any, TypeVar

import grpc.aio

T = TypeVar("T")

# Frames that a stream may hold back; a peer that lets them pile up counts as frozen.
OUTBOX_FRAMES = 16_384


class StreamBroken(Exception):
    """The stream cannot be used any longer."""


async def write_all(call: grpc.aio.StreamStreamCall[T, Any], outbox: asyncio.Queue[T]) -> None:
    """Write what comes in `outbox` until the stream ends; two writers at once would kill it.

    Raises:
        StreamBroken: if the stream has ended.
    """
    while True:
        frame = await outbox.get()
        try:
            await call.write(frame)
        except asyncio.InvalidStateError as error:
            raise StreamBroken("it has ended") from error


def cause(group: BaseExceptionGroup[BaseException]) -> str:
    """A few words about the first error of a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code().name.lower()
    return str(error)
