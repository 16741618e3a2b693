"""Learns from the memory manager which models lack KV that no merge can gain."""

import asyncio
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from services.common.clock import monotonic_s
from services.common.grpc_client import Dial
from services.common.membership import Directory
from services.common.push import keep_pushing
from services.common.timeouts import timeout
from services.core.scheduler.vocabulary import ShortfallsTold
from services.scheduler.translate import to_shortfalls
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc

SILENCE_S = 5.0
"""After this silence the last shortfalls no longer count; a report comes every second."""
OLDER_RETRY_S = 30.0
"""A memory manager of an older version, without such reports, is asked again after this."""

log = logging.getLogger(__name__)


class ShortfallWatch:
    """Passes changes to `apply`. Without reports no model counts as short."""

    def __init__(
        self,
        services: Directory[record_pb2.ServiceRecord],
        apply: Callable[[ShortfallsTold], None],
        dial: Dial,
    ) -> None:
        self._services = services
        self._apply = apply
        self._dial = dial
        self._told: dict[str, int] = {}

    async def run(self) -> None:
        """Listen until cancelled."""
        await keep_pushing(self._services, "memmgr", self._listen, self._dial)

    async def _listen(self, channel: grpc.aio.Channel) -> None:
        call = memmgr_pb2_grpc.MemmgrServiceStub(channel).WatchShortfalls(
            memmgr_pb2.WatchShortfallsRequest()
        )
        try:
            while True:
                async with timeout(SILENCE_S):
                    answer = await call.read()
                if not isinstance(answer, memmgr_pb2.WatchShortfallsResponse):
                    return
                self._tell(to_shortfalls(answer))
        except TimeoutError:
            log.info("the memory manager is silent; no model is taken to be short of KV")
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            await asyncio.sleep(OLDER_RETRY_S)
        finally:
            call.cancel()
            self._tell({})

    def _tell(self, shortfalls: dict[str, int]) -> None:
        if shortfalls != self._told:
            self._told = shortfalls
            self._apply(ShortfallsTold(monotonic_s(), shortfalls))
