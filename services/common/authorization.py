"""Authorizes gRPC calls over mutual TLS: the role in a certificate must be allowed for the method.

Calls of methods that the table does not list are refused.
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

_LOGGED_MAX = 100

_SERVICES: Mapping[str, Mapping[str, Collection[str]]] = {
    "tideserve.worker.v1.WorkerService": {"Generate": (GATEWAY,)},
    "tideserve.worker.v1.MemberService": {
        "Prepare": (MEMMGR,),
        "Abort": (MEMMGR,),
        "Introduce": (MEMMGR,),
        "ShipRequests": (MEMMGR,),
    },
    "tideserve.scheduler.v1.SchedulerService": {
        "Admit": (GATEWAY,),
        "ReportLoad": (WORKER,),
        "FindRoom": (WORKER,),
        "ListRefusals": (GATEWAY, ADMIN),
    },
    "tideserve.memmgr.v1.MemmgrService": {
        "ReportMemory": (WORKER,),
        "ReportDemand": (SCHEDULER,),
        "WatchShortfalls": (SCHEDULER,),
        "ListGroups": (GATEWAY, ADMIN),
        "GetCluster": (GATEWAY, ADMIN),
        "MergeGroups": (GATEWAY, ADMIN),
        "SplitGroup": (GATEWAY, ADMIN),
        "MoveRequests": (GATEWAY, ADMIN),
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
"""The roles that may call each method, by full method name."""

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


def roles_of(auth_context: Mapping[str, Any]) -> frozenset[str]:
    """The roles in the certificate of a call's client."""
    names = (name.decode("ascii", "replace") for name in auth_context.get("peer_dns") or ())
    roles = {name.removesuffix(DOMAIN) for name in names if name.endswith(DOMAIN)}
    return frozenset(roles & set(ROLES))


class Authorization(grpc.aio.ServerInterceptor):
    """Aborts calls with PERMISSION_DENIED unless the client's certificate has an allowed role."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, frozenset[str]]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method's handler in a check of the certificate; see grpc.aio."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        allowed = METHODS.get(method, frozenset())
        if handler is None or allowed == ANYONE:
            return handler

        async def check(context: Context) -> None:
            roles = roles_of(context.auth_context())
            if not roles & allowed:
                self._log(method, roles)
                held = " and ".join(sorted(roles)) or "no role"
                await context.abort(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"{method} requires the role {' or '.join(sorted(allowed)) or '(none)'}, but"
                    f" the caller's certificate has {held}; use the right service's certificate",
                )

        return _guarded(handler, check)

    def _log(self, method: str, roles: frozenset[str]) -> None:
        """Log a refusal once per method and roles, since refused callers retry."""
        if (method, roles) not in self._logged and len(self._logged) < _LOGGED_MAX:
            self._logged.add((method, roles))
            log.warning("refused %s to a caller with roles %s", method, sorted(roles))


def _guarded(handler: Any, check: Callable[[Context], Awaitable[None]]) -> Any:
    """The same handler, preceded by `check`."""
    kinds = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }
    behaviour, make = kinds[handler.request_streaming, handler.response_streaming]

    async def guarded_stream(request: Any, context: Context) -> AsyncIterator[Any]:
        await check(context)
        async with contextlib.aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                yield response

    async def guarded_call(request: Any, context: Context) -> Any:
        await check(context)
        return await behaviour(request, context)

    # grpc.aio inspects the kind of a handler, so the wrapper must be of the same kind.
    guarded = guarded_stream if inspect.isasyncgenfunction(behaviour) else guarded_call
    return make(guarded, handler.request_deserializer, handler.response_serializer)
