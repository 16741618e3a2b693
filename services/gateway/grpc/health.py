"""Serves grpc.health.v1 without authentication, since a platform's probes send no key.

Replaces the library's servicer, which replies to an invalid message with the text of an exception
and waits for a missing message without a timeout.
"""

import contextlib
from typing import TypeVar

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from services.common.health import WATCHERS_MAX, HealthServicer, TooManyWatchers
from services.gateway.bounds.concurrency_limit import ConcurrencyLimit
from services.gateway.grpc.call import MESSAGE_TIMEOUT_S, Call, decoded
from services.gateway.grpc.call_limits import CallLimits
from services.gateway.grpc.interceptors import Method
from services.gateway.vocabulary.errors import (
    BadRequest,
    BodyTooLarge,
    NoSuchModel,
    QueueFull,
)

SERVICE = "grpc.health.v1.Health"
BYTES_MAX = 1024
READING_MAX = 8
"""Probes per address whose message is read at a time; gRPC may hold 4 MiB for each."""
WATCHING_MAX = 16
"""Maximum watches per address."""
Response = health_pb2.HealthCheckResponse
M = TypeVar("M", bound=Message)


def health_methods(health: HealthServicer) -> dict[str, Method]:
    """The health methods by full name: public, and neither logged nor counted."""
    probes = _Probes(health)
    methods = {"Check": probes.check, "List": probes.list, "Watch": probes.watch}
    return {f"/{SERVICE}/{name}": Method(run, public=True) for name, run in methods.items()}


class _Probes:
    """Serves unauthenticated calls, under limits of their own."""

    def __init__(self, health: HealthServicer) -> None:
        self._health = health
        self._limits = CallLimits(READING_MAX, MESSAGE_TIMEOUT_S)
        self._watches = ConcurrencyLimit(WATCHING_MAX, WATCHERS_MAX)

    async def check(self, call: Call) -> None:
        """Send the status of a service."""
        name = (await self._read(call, health_pb2.HealthCheckRequest)).service
        statuses = self._health.statuses()
        if name not in statuses:
            known = ", ".join(sorted(filter(None, statuses)))
            raise NoSuchModel(
                f"the service {name[:64]!a} is unknown; ask for {known}",
                param="service",
                code="service_not_found",
            )
        await call.client.send(Response(status=statuses[name]))

    async def list(self, call: Call) -> None:
        """Send the status of all services."""
        await self._read(call, health_pb2.HealthListRequest)
        statuses = {
            name: Response(status=status) for name, status in self._health.statuses().items()
        }
        await call.client.send(health_pb2.HealthListResponse(statuses=statuses))

    async def watch(self, call: Call) -> None:
        """Send the status of a service, now and on every change."""
        name = (await self._read(call, health_pb2.HealthCheckRequest)).service
        if self._watches.full(call.limit_key):
            raise QueueFull(f"your address already has {WATCHING_MAX} watches; use Check")
        try:
            with self._watches.entered(call.limit_key):
                async with contextlib.aclosing(self._health.changes(name)) as changes:
                    async for status in changes:
                        await call.client.send(Response(status=status))
        except TooManyWatchers as error:
            raise QueueFull(str(error)) from None

    async def _read(self, call: Call, kind: type[M]) -> M:
        """Read the call's message. Raises GatewayError if it is missing or invalid."""
        async with self._limits.waiting(call.limit_key):
            data = await call.read(MESSAGE_TIMEOUT_S)
        if data is None:
            raise BadRequest("the call has no message; send a request message")
        if len(data) > BYTES_MAX:
            raise BodyTooLarge(f"the message exceeds {BYTES_MAX} bytes; shorten it")
        return decoded(kind, data)
