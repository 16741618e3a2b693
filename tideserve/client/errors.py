"""Errors of calls, selected by the reason in the error details, else by the status code.

All are `TideserveError`s; docs/grpc.md lists them.
"""

from collections.abc import Mapping

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

DOMAIN = "tideserve"


class TideserveError(Exception):
    """Base of all errors of calls.

    `reason`: the server's reason, "" if the error does not come from the server; `request_id`: the
    id in the server's log; `field`: path of the invalid field, by its name in the HTTP API.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str = "",
        request_id: str = "",
        retry_after_s: float | None = None,
        field: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        self.field = field
        self.metadata = dict(metadata or {})


class InvalidRequest(TideserveError):
    """The request is invalid."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output exceed the model's context."""


class Unsupported(InvalidRequest):
    """The request uses a feature that the server does not support."""


class Unauthenticated(TideserveError):
    """The API key is missing or invalid."""


class PermissionDenied(TideserveError):
    """The API key does not permit the call."""


class NotFound(TideserveError):
    """The request names an object that does not exist."""


class ModelNotFound(NotFound):
    """No such model."""


class AlreadyExists(TideserveError):
    """The request id was used recently."""


class ResourceExhausted(TideserveError):
    """The request is too large."""


class QuotaExceeded(ResourceExhausted):
    """The key's quota is exhausted for now."""


class Unavailable(TideserveError):
    """The request cannot be served now; retry."""


class DeadlineExceeded(TideserveError):
    """The request exceeded its deadline."""


class StreamLost(TideserveError):
    """The stream broke after tokens were sent; a retry would start from the beginning."""

    @property
    def next_index(self) -> int | None:
        """Output tokens of the first choice that were sent; None if the server did not say."""
        text = self.metadata.get("next_index", "")
        return int(text) if text.isdigit() else None


class Cancelled(TideserveError):
    """The call was cancelled by its caller or by `Cancel`."""


class ServerFailed(TideserveError):
    """The server or a proxy failed."""


_BY_REASON: dict[str, type[TideserveError]] = {
    "CONTEXT_LENGTH_EXCEEDED": ContextLengthExceeded,
    "MODEL_NOT_FOUND": ModelNotFound,
    "RATE_LIMIT_EXCEEDED": QuotaExceeded,
    "STREAM_LOST": StreamLost,
    "UNSUPPORTED_PARAMETER": Unsupported,
}
_BY_CODE: dict[grpc.StatusCode, type[TideserveError]] = {
    grpc.StatusCode.ABORTED: StreamLost,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
}


def kind_of(code: grpc.StatusCode, reason: str) -> type[TideserveError]:
    """Return the class of an error; `reason` is "" if the server sent none."""
    return _BY_REASON.get(reason) or _BY_CODE.get(code, ServerFailed)


def error_of(error: grpc.RpcError) -> TideserveError:
    """Convert gRPC's error of a failed call, with its details."""
    # `RpcError` itself has no methods; the subclasses that calls raise have the same methods.
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    code = error.code()
    reason, request_id, field = "", "", None
    retry_after_s: float | None = None
    metadata: dict[str, str] = {}
    for detail in _details(error):
        # Proxies may attach an ErrorInfo of their own, with another domain.
        if isinstance(detail, error_details_pb2.ErrorInfo) and detail.domain == DOMAIN:
            reason, metadata = detail.reason, dict(detail.metadata)
            field = metadata.get("param")
        elif isinstance(detail, error_details_pb2.RequestInfo):
            request_id = detail.request_id
        elif isinstance(detail, error_details_pb2.RetryInfo):
            retry_after_s = detail.retry_delay.ToTimedelta().total_seconds()
    return kind_of(code, reason)(
        error.details() or code.name,
        code=code,
        reason=reason,
        request_id=request_id,
        retry_after_s=retry_after_s,
        field=field,
        metadata=metadata,
    )


_DETAILS = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.RequestInfo,
    error_details_pb2.RetryInfo,
)


def _details(error: grpc.Call | grpc.aio.AioRpcError) -> list[object]:
    """Return the error's google.rpc details; empty if there are none or they are malformed."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        return []
    details: list[object] = []
    for packed in status.details if status is not None else ():
        # Details of unknown types, from newer servers, are skipped.
        for kind in _DETAILS:
            message = kind()
            if packed.Unpack(message):
                details.append(message)
    return details
