"""What a call can end with, told apart by the reason in its error details.

Each error is a `TideserveError`; docs/grpc.md has a table of them.
"""

from collections.abc import Mapping

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

DOMAIN = "tideserve"


class TideserveError(Exception):
    """Base of all errors of calls.

    `reason` is the server's, "" if the error is not its own; `request_id` the one in its log;
    `field` the path of the request's field that is wrong, by its name in the HTTP API.
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
    """The request itself is wrong."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output do not fit into the model's context."""


class Unsupported(InvalidRequest):
    """The request asks for something that is not served."""


class Unauthenticated(TideserveError):
    """No key, or a wrong one."""


class PermissionDenied(TideserveError):
    """The key may not do that."""


class NotFound(TideserveError):
    """What the request names is not there."""


class ModelNotFound(NotFound):
    """No such model."""


class AlreadyExists(TideserveError):
    """The same request id was used a short time ago."""


class ResourceExhausted(TideserveError):
    """The request is too large."""


class QuotaExceeded(ResourceExhausted):
    """The key's quota is used up for now."""


class Unavailable(TideserveError):
    """Nobody can serve the request now; a retry is sensible."""


class DeadlineExceeded(TideserveError):
    """The request waited or ran too long."""


class StreamLost(TideserveError):
    """The stream broke after tokens were out; a new request would begin anew."""

    @property
    def next_index(self) -> int | None:
        """Number of output tokens that came of the first choice; None if that was not told."""
        text = self.metadata.get("next_index", "")
        return int(text) if text.isdigit() else None


class Cancelled(TideserveError):
    """The call was cancelled, here or by Cancel."""


class ServerFailed(TideserveError):
    """The server broke, or something between it and here."""


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
    """The class of a call's error; `reason` is "" where the server told none."""
    return _BY_REASON.get(reason) or _BY_CODE.get(code, ServerFailed)


def error_of(error: grpc.RpcError) -> TideserveError:
    """The error of a call that failed, with what its details say."""
    # Not `RpcError` itself, which has no methods; those of calls and of asyncio have the same ones.
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    code = error.code()
    reason, request_id, field = "", "", None
    retry_after_s: float | None = None
    metadata: dict[str, str] = {}
    for detail in _details(error):
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
    """The google.rpc details of the error; none where it has none or they are garbled."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        return []
    found: list[object] = []
    for packed in status.details if status is not None else ():
        for kind in _DETAILS:
            message = kind()
            if packed.Unpack(message):
                found.append(message)
    return found
