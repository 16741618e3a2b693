"""grpc.health.v1 for everybody: probes of a platform carry no key.

The library's own servicer would answer what is no message with an exception's text, and wait for
ever for one that does not come.
"""

import contextlib
from typing import TypeVar

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from services.common.health import HealthServicer, TooManyWatchers
from services.gateway.errors import InvalidRequest, ModelNotFound, QueueFull
from services.gateway.grpc.call import MESSAGE_TIMEOUT_S, Call, decoded
from services.gateway.grpc.interceptors import Method

SERVICE = "grpc.health.v1.Health"
Answer = health_pb2.HealthCheckResponse
M = TypeVar("M", bound=Message)


def health_methods(health: HealthServicer) -> dict[str, Method]:
    """Its methods by full name, which need no key and are told nobody."""

    async def check(call: Call) -> None:
        name = (await _read(call, health_pb2.HealthCheckRequest)).service
        statuses = health.statuses()
        if name not in statuses:
            known = ", ".join(sorted(filter(None, statuses)))
            raise ModelNotFound(
                f"{name[:64]!a} is not served here; ask for {known}",
                param="service",
                code="service_not_found",
            )
        await call.client.send(Answer(status=statuses[name]))

    async def listed(call: Call) -> None:
        await _read(call, health_pb2.HealthListRequest)
        statuses = {name: Answer(status=status) for name, status in health.statuses().items()}
        await call.client.send(health_pb2.HealthListResponse(statuses=statuses))

    async def watch(call: Call) -> None:
        name = (await _read(call, health_pb2.HealthCheckRequest)).service
        try:
            async with contextlib.aclosing(health.changes(name)) as changes:
                async for status in changes:
                    await call.client.send(Answer(status=status))
        except TooManyWatchers as error:
            raise QueueFull(str(error)) from None

    methods = {"Check": check, "List": listed, "Watch": watch}
    return {f"/{SERVICE}/{name}": Method(run, open=True) for name, run in methods.items()}


async def _read(call: Call, kind: type[M]) -> M:
    """The call's message; nobody waits for it in line, since a probe must come through."""
    data = await call.read(MESSAGE_TIMEOUT_S)
    if data is None:
        raise InvalidRequest("the call has no message; send one")
    return decoded(kind, data)
