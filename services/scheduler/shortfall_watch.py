"""Receives KV shortfalls from the memory manager.

A shortfall is the KV, in tokens, that a model lacks even if all its groups merge.
"""

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
from services.core.scheduler.vocabulary import ShortfallsReported
from services.scheduler.translate import to_shortfalls
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc

SILENCE_S = 5.0
"""Time without a message after which shortfalls expire; the memory manager sends every second."""
OLDER_RETRY_S = 30.0
"""Retry interval with an older memory manager that does not support these reports."""

log = logging.getLogger(__name__)


class ShortfallWatch:
    """Calls `apply` when the shortfalls change; without reports it assumes none."""

    def __init__(
        self,
        services: Directory[record_pb2.ServiceRecord],
        apply: Callable[[ShortfallsReported], None],
        dial: Dial,
    ) -> None:
        self._services = services
        self._apply = apply
        self._dial = dial
        self._reported: dict[str, int] = {}

    async def run(self) -> None:
        """Receive reports until cancelled."""
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
                self._report(to_shortfalls(answer))
        except TimeoutError:
            log.info("no reports from the memory manager; assuming no KV shortfall")
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            await asyncio.sleep(OLDER_RETRY_S)
        finally:
            call.cancel()
            # Without reports assume no shortfall, so that no request is refused for it.
            self._report({})

    def _report(self, shortfalls: dict[str, int]) -> None:
        if shortfalls != self._reported:
            self._reported = shortfalls
            self._apply(ShortfallsReported(monotonic_s(), shortfalls))
