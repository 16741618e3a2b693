"""The gRPC service grpc.health.v1: liveness of the process (name ""), readiness by service name.

The status is computed at each request, because conditions such as a recent heartbeat of the engine
change without an event.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import ServiceError

WATCH_INTERVAL_S = 0.5
WATCHERS_MAX = 64

_SERVING: int = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
ListContext = grpc.aio.ServicerContext[health_pb2.HealthListRequest, health_pb2.HealthListResponse]


class TooManyWatchers(ServiceError):
    """The maximum number of watches is open."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Reports "" as serving always, and `names` while `ready()` is true and no drain has begun."""

    def __init__(self, names: Collection[str], ready: Callable[[], bool]) -> None:
        self._names = frozenset(names)
        self._ready = ready
        self._draining = False
        self._closed = False
        self._watchers = 0

    def drain(self) -> None:
        """Report the names as not serving, regardless of `ready`."""
        self._draining = True

    def close(self) -> None:
        """End the watches, so that the server can stop."""
        self._draining = self._closed = True

    def status_of(self, name: str) -> int:
        """The status of a service; SERVICE_UNKNOWN for an unknown name."""
        if name == "":
            return _SERVING
        if name not in self._names:
            return _UNKNOWN
        return _SERVING if self._ready() and not self._draining else _NOT_SERVING

    def statuses(self) -> dict[str, int]:
        """The status of all services by name."""
        return {name: self.status_of(name) for name in ("", *self._names)}

    async def changes(self, name: str) -> AsyncGenerator[int, None]:
        """The status of a service, and every change within `WATCH_INTERVAL_S`, until `close`.

        The final status is yielded as well.

        Raises:
            TooManyWatchers: if `WATCHERS_MAX` watches are open.
        """
        if self._watchers >= WATCHERS_MAX:
            raise TooManyWatchers(f"{WATCHERS_MAX} watches are open already; use Check")
        self._watchers += 1
        try:
            reported: int | None = None
            while True:
                closed, status = self._closed, self.status_of(name)
                if status != reported:
                    reported = status
                    yield status
                if closed:
                    return
                # Poll, because readiness changes without an event.
                await asyncio.sleep(WATCH_INTERVAL_S)
        finally:
            self._watchers -= 1

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        status = self.status_of(request.service)
        if status == _UNKNOWN:
            known = ", ".join(sorted(self._names))
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"'{request.service}' is not served here; known services: {known}",
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: ListContext
    ) -> health_pb2.HealthListResponse:
        statuses = {
            name: health_pb2.HealthCheckResponse(status=status)
            for name, status in self.statuses().items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """See grpc.health.v1; changes are reported within `WATCH_INTERVAL_S`."""
        try:
            async with contextlib.aclosing(self.changes(request.service)) as changes:
                async for status in changes:
                    yield health_pb2.HealthCheckResponse(status=status)
        except TooManyWatchers as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
