"""Intercepts every public gRPC call: request id, authentication, dispatch, errors, log.

Replaces gRPC's dispatch of registered methods: before its authentication, a call reaches no other
code of the gateway, and none of its messages is read. Unknown methods are refused. A call is parked
while only unread messages remain, since gRPC's server cannot end it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.rpc import status_pb2

from services.common.logging import request_ids
from services.gateway.api.field_names import SAME_NAMES, FieldNames
from services.gateway.bounds.client import ClientGone
from services.gateway.bounds.connections import ClientConnection
from services.gateway.grpc.call import Call, Context
from services.gateway.grpc.call_limits import CallLimits
from services.gateway.grpc.errors import abort, status_of
from services.gateway.keys.key_ring import KeyRing
from services.gateway.keys.principal import Principal
from services.gateway.records.metrics import Metrics
from services.gateway.records.request_record import CLIENT_DISCONNECTED, RequestRecord
from services.gateway.records.request_recorder import RequestRecorder
from services.gateway.serving.service_policy import SLO_HEADERS
from services.gateway.serving.single_headers import check_single
from services.gateway.vocabulary.errors import GatewayError, NoSuchRoute, QueueFull

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Method:
    """A method and how its calls are recorded.

    `single`: each call is a request, recorded at its end; else the method records several requests
    itself, and the interceptor only records refused calls. `public`: needs no key and is not
    recorded. `names`: of the fields in errors.
    """

    run: Callable[[Call], Awaitable[None]]
    single: bool = True
    public: bool = False
    names: FieldNames = SAME_NAMES


class RequestInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates, dispatches and records all calls."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        connection_of: Callable[[Mapping[str, str | bytes]], ClientConnection],
        keys: KeyRing,
        recorder: RequestRecorder,
        metrics: Metrics,
        stall_s: float,
    ) -> None:
        """`methods`: by full name. `connection_of` returns the connection of a call's metadata.

        `stall_s`: seconds that clients may go without reading.
        """
        self._methods = methods
        self._connection_of = connection_of
        self._keys = keys
        self._recorder = recorder
        self._metrics = metrics
        self._stall_s = stall_s
        self._limits = CallLimits()
        metrics.export_calls(self._limits.by_kind)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of the call; see grpc.aio."""
        path = handler_call_details.method
        method = self._methods.get(path)
        received = tuple(handler_call_details.invocation_metadata or ())
        metadata = {key: value for key, value in received}
        connection = self._connection_of(metadata)
        connection.touch()
        record = self._recorder.open(path, _bytes(metadata.get("x-request-id")))
        record.address = connection.address
        record.slo_headers = {
            name: value for name in SLO_HEADERS if isinstance(value := metadata.get(name), str)
        }
        identify = partial(self._keys.principal, _authorization(metadata))
        keys = [key for key, _ in received]
        refusal = self._refusal(method, keys, connection, identify, record)
        traced = refusal is None and method is not None and not method.public
        self._recorder.trace(record, _bytes(metadata.get("traceparent")), admitted=traced)
        handler = partial(self._handle, method, connection, record, identify, refusal)
        # Use a stream handler for unary calls too, as they have the same wire format: without a
        # deserialiser it lets `Call` decide when to read each message, as raw bytes.
        return grpc.stream_stream_rpc_method_handler(handler)

    def _refusal(
        self,
        method: Method | None,
        keys: Iterable[str],
        connection: ClientConnection,
        identify: Callable[[], Principal],
        record: RequestRecord,
    ) -> GatewayError | None:
        """The error that refuses a call with these metadata keys, or None.

        Sets the record's principal.
        """
        if method is not None and method.public:
            return None
        try:
            if not connection.admit():
                raise QueueFull("this gateway has too many connections; retry later")
            check_single(keys)
            record.principal = identify()
            if method is None:
                raise NoSuchRoute("unknown method; see the .proto files or server reflection")
        except GatewayError as error:
            return error
        return None

    async def _handle(
        self,
        method: Method | None,
        connection: ClientConnection,
        record: RequestRecord,
        identify: Callable[[], Principal],
        refusal: GatewayError | None,
        requests: Any,
        context: Context,
    ) -> None:
        # A call without a key does not keep its connection from making room for others.
        keyed = refusal is None and method is not None and not method.public
        with connection.request() if keyed else contextlib.nullcontext():
            await self._serve(method, record, identify, refusal, context)

    async def _serve(
        self,
        method: Method | None,
        record: RequestRecord,
        identify: Callable[[], Principal],
        refusal: GatewayError | None,
        context: Context,
    ) -> None:
        call = Call(context, record, self._stall_s, self._limits, identify)
        failure: tuple[status_pb2.Status, GatewayError] | None = None
        probe = method is not None and method.public
        recorded = refusal is not None or (method is not None and method.single and not probe)
        with request_ids(record.client_request_id, record.trace_id):
            try:
                await self._run(method, refusal, call)
                record.status, record.grpc_code = 200, grpc.StatusCode.OK.name
            except GatewayError as error:
                names = SAME_NAMES if method is None else method.names
                failure = self._record_failure(error, names, call), error
            except ClientGone:
                self._record_disconnect(call, counted=not probe)
            except asyncio.CancelledError:
                self._record_disconnect(call, counted=not probe)
                raise
            finally:
                await call.close()
                if recorded:
                    self._recorder.close(record, record.path if method is not None else "other")
        # Close the record first: the client determines the duration of the following steps.
        if failure is not None:
            await self._fail(*failure, call, context)
        elif record.status == CLIENT_DISCONNECTED:
            await self._park(call, context)

    async def _run(self, method: Method | None, refusal: GatewayError | None, call: Call) -> None:
        """Run the method. Raises GatewayError, also in place of unexpected exceptions."""
        if refusal is not None:
            raise refusal
        assert method is not None, "calls of unknown methods are refused"
        if not method.public:
            self._limits.check(call.limit_key)
        try:
            await method.run(call)
        except (GatewayError, ClientGone):
            raise
        except Exception as error:
            # Log the exception, and hide it from clients: it may reveal internals.
            log.exception("a call failed unexpectedly")
            raise GatewayError("internal error of the gateway; retry") from error

    def _record_failure(
        self, error: GatewayError, names: FieldNames, call: Call
    ) -> status_pb2.Status:
        """Record and count a failure; return the status for the client."""
        record, begun = call.record, call.client.started
        record.fail(error)
        next_index = call.tokens_sent if begun else None
        status = status_of(error, record.client_request_id, next_index, names)
        record.grpc_code = next(c.name for c in grpc.StatusCode if c.value[0] == status.code)
        if begun:
            self._metrics.count_failed_stream(error.code or "error")
        else:
            self._metrics.count_refusal(error, record.service_class, record.model)
        return status

    async def _fail(
        self, status: status_pb2.Status, error: GatewayError, call: Call, context: Context
    ) -> None:
        """Send the error. Raises gRPC's exception that ends a call.

        The call counts as parked while the client has not read the messages before the error.
        """
        with contextlib.ExitStack() as stack:
            if call.unread_bytes:
                stack.enter_context(self._limits.parked(call.limit_key, call.unread_bytes))
            await abort(context, status, error, call.metadata())

    async def _park(self, call: Call, context: Context) -> None:
        """Count the call of a client that stopped reading as parked, until the client ends it."""
        with self._limits.parked(call.limit_key, call.unread_bytes):
            await context.abort(grpc.StatusCode.CANCELLED, "the client stopped reading")

    def _record_disconnect(self, call: Call, counted: bool) -> None:
        call.record.note_disconnect()
        call.record.grpc_code = grpc.StatusCode.CANCELLED.name
        if call.client.started and counted:
            self._metrics.count_failed_stream("client_gone")


def _authorization(metadata: Mapping[str, str | bytes]) -> str | None:
    """The credentials of a call, from either header that the HTTP API accepts."""
    authorization, key = metadata.get("authorization"), metadata.get("x-api-key")
    if authorization is None and isinstance(key, str):
        return f"Bearer {key}"
    return authorization if isinstance(authorization, str) else None


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode("latin-1", "replace") if isinstance(value, str) else value
