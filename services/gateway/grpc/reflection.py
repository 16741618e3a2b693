"""Tells clients such as grpcurl the contracts that are served here."""

import contextlib
from collections.abc import Iterable

from grpc_reflection.v1alpha import reflection, reflection_pb2

from services.gateway.grpc.call import Call, decoded
from services.gateway.grpc.interceptors import Method
from services.gateway.vocabulary.errors import BodyTimeout

IDLE_S = 30.0


def reflection_methods(services: Iterable[str]) -> dict[str, Method]:
    """The methods of grpc.reflection.v1alpha.ServerReflection about these services and itself."""
    servicer = reflection.ReflectionServicer((*services, reflection.SERVICE_NAME))

    async def reflect(call: Call) -> None:
        # A caller that asks nothing for a while is done.
        with call.lobby.stream(call.guest), contextlib.suppress(BodyTimeout):
            while (data := await call.read(IDLE_S)) is not None:
                request = decoded(reflection_pb2.ServerReflectionRequest, data)
                for answer in servicer.ServerReflectionInfo(iter((request,)), None):
                    await call.client.send(answer)

    return {f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": Method(reflect)}
