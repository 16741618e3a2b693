"""The writer and the errors of the long-lived gRPC streams to the scheduler and to workers."""

import asyncio
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from services.common.frames import packed, takes_many
from services.gateway.cluster.outbox import Outbox

T = TypeVar("T", bound=Message)


class StreamBroken(Exception):
    """The stream has ended, or its owner closes the stream; the text is the reason."""


async def write_all(call: grpc.aio.StreamStreamCall[T, Any], outbox: Outbox[T]) -> None:
    """Write the frames of `outbox` until the stream ends; a stream must not have two writers.

    Raises:
        StreamBroken: if the stream has ended.
    """
    # Queued frames share a message if the peer supports it: fewer messages cost less CPU time.
    headers = asyncio.create_task(_takes_many(call))
    try:
        while True:
            frames, size_bytes = await outbox.take(lambda: headers.done() and headers.result())
            for message in packed(frames):
                await call.write(message)
            outbox.release(size_bytes)
    except asyncio.InvalidStateError as error:
        raise StreamBroken("the stream has ended") from error
    finally:
        headers.cancel()


async def _takes_many(call: grpc.aio.StreamStreamCall[Any, Any]) -> bool:
    """Whether the peer supports several frames per message, as its initial metadata says."""
    try:
        return takes_many(await call.initial_metadata())
    except grpc.aio.AioRpcError:
        return False


def cause(group: BaseExceptionGroup[BaseException]) -> str:
    """A short description of the first error in a group, for logs."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code().name.lower()
    return str(error)
