"""Which caller may call what, over mutual TLS: by the role that its certificate names.

A method that the table does not list is refused.
"""

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any

import grpc
import grpc.aio

from services.common.role import ADMIN, DOMAIN, GATEWAY, MEMMGR, ROLES, SCHEDULER, WORKER

ANYONE = frozenset(("anyone with a certificate of the cluster",))

_TOLD_MAX = 100

_SERVICES: Mapping[str, Mapping[str, Collection[str]]] = {
    "tideserve.worker.v1.WorkerService": {"Generate": (GATEWAY,)},
    "tideserve.worker.v1.MemberService": {"Prepare": (MEMMGR,), "Abort": (MEMMGR,)},
    "tideserve.scheduler.v1.SchedulerService": {
        "Admit": (GATEWAY,),
        "ReportLoad": (WORKER,),
    },
    "tideserve.memmgr.v1.MemmgrService": {
        "ReportMemory": (WORKER,),
        "ReportDemand": (SCHEDULER,),
        "WatchShortfalls": (SCHEDULER,),
        "ListGroups": (GATEWAY, ADMIN),
        "GetCluster": (GATEWAY, ADMIN),
        "MergeGroups": (GATEWAY, ADMIN),
        "SplitGroup": (GATEWAY, ADMIN),
    },
    "tideserve.gateway.v1.GatewayPeerService": {"EndRequest": (GATEWAY,)},
    "tideserve.common.v1.ProcessService": {"GetProcess": (GATEWAY, ADMIN)},
    "grpc.health.v1.Health": {"Check": ANYONE, "List": ANYONE, "Watch": ANYONE},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": (ADMIN,)},
}
METHODS = {
    f"/{service}/{method}": frozenset(roles)
    for service, methods in _SERVICES.items()
    for method, roles in methods.items()
}
"""The roles that may call each method, by its full name."""

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


def roles_of(auth_context: Mapping[str, Any]) -> frozenset[str]:
    """The roles that the certificate of a call's peer names."""
    names = (name.decode("ascii", "replace") for name in auth_context.get("peer_dns") or ())
    roles = {name.removesuffix(DOMAIN) for name in names if name.endswith(DOMAIN)}
    return frozenset(roles & set(ROLES))


class Authorization(grpc.aio.ServerInterceptor):
    """Refuses calls whose caller has no role for them, as PERMISSION_DENIED."""

    def __init__(self) -> None:
        self._told: set[tuple[str, frozenset[str]]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler behind a look at the certificate; see grpc.aio."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        allowed = METHODS.get(method, frozenset())
        if handler is None or allowed == ANYONE:
            return handler

        async def check(context: Context) -> None:
            roles = roles_of(context.auth_context())
            if not roles & allowed:
                self._tell(method, roles)
                who = " and ".join(sorted(roles)) or "without a role"
                await context.abort(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"{method} is for {' and '.join(sorted(allowed)) or 'nobody'}, and the caller's"
                    f" certificate is {who}; use the certificate of the right service",
                )

        return _guarded(handler, check)

    def _tell(self, method: str, roles: frozenset[str]) -> None:
        """Log a refusal, once for each kind: a caller that is refused tries again."""
        if (method, roles) not in self._told and len(self._told) < _TOLD_MAX:
            self._told.add((method, roles))
            log.warning("refused %s to a caller with roles %s", method, sorted(roles))


def _guarded(handler: Any, check: Callable[[Context], Awaitable[None]]) -> Any:
    """The same handler, whose behaviour begins with `check`."""
    kinds = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }
    behaviour, make = kinds[handler.request_streaming, handler.response_streaming]

    async def yielding(request: Any, context: Context) -> AsyncIterator[Any]:
        await check(context)
        async with contextlib.aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                yield response

    async def answering(request: Any, context: Context) -> Any:
        await check(context)
        return await behaviour(request, context)

    guarded = yielding if inspect.isasyncgenfunction(behaviour) else answering
    return make(guarded, handler.request_deserializer, handler.response_serializer)
