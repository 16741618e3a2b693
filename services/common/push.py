"""Keeps a call to the newest instance of a service open, such as a stream of reports."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio

from services.common.grpc_client import Dial
from services.common.membership import SERVICES, Directory
from tideserve.common.v1 import record_pb2

RETRY_S = 0.2

log = logging.getLogger(__name__)
Push = Callable[[grpc.aio.Channel], Coroutine[Any, Any, None]]


async def keep_pushing(
    services: Directory[record_pb2.ServiceRecord], name: str, push: Push, dial: Dial
) -> None:
    """Call `push` with a channel to the newest instance of a service, until cancelled.

    Restarts when it fails or a newer instance is registered.
    """
    prefix = f"{SERVICES}{name}/"
    while True:
        await services.wait_for(lambda: services.newest(prefix) is not None)
        record = services.newest(prefix)
        assert record is not None
        try:
            # Open a channel per attempt, so that it uses the current certificate and address.
            async with dial(record.address, name) as channel:
                await _push_while_newest(services, prefix, record, push(channel))
        except grpc.RpcError as error:
            log.info("reports to the %s were interrupted: %s", name, _code(error))
        await asyncio.sleep(RETRY_S)


async def _push_while_newest(
    services: Directory[record_pb2.ServiceRecord],
    prefix: str,
    record: record_pb2.ServiceRecord,
    push: Coroutine[Any, Any, None],
) -> None:
    """Push until it fails or a newer instance appears; a call to a dead instance may hang."""
    pushing = asyncio.create_task(push)
    superseded = asyncio.create_task(services.wait_for(lambda: services.newest(prefix) != record))
    try:
        await asyncio.wait((pushing, superseded), return_when=asyncio.FIRST_COMPLETED)
        if pushing.done():
            pushing.result()
    finally:
        pushing.cancel()
        superseded.cancel()
        await asyncio.gather(pushing, superseded, return_exceptions=True)


def _code(error: grpc.RpcError) -> str:
    return error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
