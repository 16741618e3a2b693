"""Converts errors to gRPC statuses with the details of google.rpc."""

import math
from collections.abc import Iterable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.gateway.api.field_names import SAME_NAMES, FieldNames
from services.gateway.vocabulary import errors
from services.gateway.vocabulary.errors import GatewayError

DOMAIN = "tideserve"
STREAM_LOST = "STREAM_LOST"
PUSHBACK = "grpc-retry-pushback-ms"
MESSAGE_BYTES_MAX = 1024
"""Maximum error message: trailers are limited to 8 KiB and repeat it up to three times, encoded."""

TABLE: dict[type[GatewayError], grpc.StatusCode] = {
    GatewayError: grpc.StatusCode.INTERNAL,
    errors.BadRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ContextExceeded: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotSupported: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthorized: grpc.StatusCode.UNAUTHENTICATED,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    # An unknown method, or an unsupported feature.
    errors.NoSuchRoute: grpc.StatusCode.UNIMPLEMENTED,
    errors.MethodNotAllowed: grpc.StatusCode.UNIMPLEMENTED,
    errors.NoSuchModel: grpc.StatusCode.NOT_FOUND,
    errors.DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    errors.IdempotencyKeyReused: grpc.StatusCode.ALREADY_EXISTS,
    errors.BodyTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    # gRPC itself uses this code for messages and metadata above its limits.
    errors.BodyTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.HeadersTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OverQuota: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UriTooLong: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedMediaType: grpc.StatusCode.INVALID_ARGUMENT,
    errors.CancelledByClient: grpc.StatusCode.CANCELLED,
    errors.EngineFailed: grpc.StatusCode.INTERNAL,
    errors.EngineKilled: grpc.StatusCode.INTERNAL,
    errors.ServerLost: grpc.StatusCode.INTERNAL,
    errors.ServiceUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.QueueFull: grpc.StatusCode.UNAVAILABLE,
    errors.TooLate: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerLost: grpc.StatusCode.UNAVAILABLE,
    errors.ShuttingDown: grpc.StatusCode.UNAVAILABLE,
    errors.Expired: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.ClientDeadline: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""The code of each class, without inheritance: a new class needs its own row."""

_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)


def reason_of(error: GatewayError) -> str:
    """The machine-readable reason: the HTTP API's error code in upper case."""
    if error.code is not None:
        return error.code.upper()
    return "INVALID_REQUEST" if isinstance(error, errors.BadRequest) else "INTERNAL"


def status_of(
    error: GatewayError,
    request_id: str,
    next_index: int | None = None,
    names: FieldNames = SAME_NAMES,
) -> status_pb2.Status:
    """The status of a failed call, with the field names of the call's message.

    `next_index`: number of output tokens of the first choice already sent; None before any token.
    """
    code, reason = TABLE[type(error)], reason_of(error)
    metadata = {"http_status": str(error.status)}
    message, param = names.translated(error)
    if param is not None:
        metadata["param"] = param
    # After the first tokens, use ABORTED: clients would retry other codes and start a new response.
    if next_index is not None and code in _LOST:
        metadata |= {"cause": reason, "next_index": str(next_index)}
        code, reason = grpc.StatusCode.ABORTED, STREAM_LOST
    message = _shortened(message)
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata),
        error_details_pb2.RequestInfo(request_id=request_id),
        *_details(error, code, message, param),
    ]
    number: int = code.value[0]
    return status_pb2.Status(code=number, message=message, details=map(_packed, details))


def _details(
    error: GatewayError, code: grpc.StatusCode, message: str, param: str | None
) -> Iterable[Message]:
    if param is not None and code is grpc.StatusCode.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(field=param, description=message)
        yield error_details_pb2.BadRequest(field_violations=[violation])
    if code is grpc.StatusCode.NOT_FOUND:
        yield error_details_pb2.ResourceInfo(resource_type=param or "", description=message)
    if isinstance(error, errors.OverQuota):
        subject = f"owner:{error.owner}"
        quota = error_details_pb2.QuotaFailure.Violation(subject=subject, description=message)
        yield error_details_pb2.QuotaFailure(violations=[quota])
    if error.retry_delay_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(math.ceil(error.retry_delay_s * 1000))
        yield retry


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _shortened(message: str) -> str:
    """Truncate to `MESSAGE_BYTES_MAX` bytes of UTF-8, at a character boundary."""
    data = message.encode("utf-8", "replace")
    if len(data) <= MESSAGE_BYTES_MAX:
        return data.decode()
    return data[: MESSAGE_BYTES_MAX - 3].decode("utf-8", "ignore") + "…"


def trailer_of(
    status: status_pb2.Status, error: GatewayError
) -> tuple[tuple[str, str | bytes], ...]:
    """The trailing metadata: the status details and the retry push-back."""
    trailer = tuple(rpc_status.to_status(status).trailing_metadata)
    # Client libraries retry by this push-back, so send it only for the retryable UNAVAILABLE.
    if status.code == grpc.StatusCode.UNAVAILABLE.value[0] and error.retry_delay_s is not None:
        trailer += ((PUSHBACK, str(math.ceil(error.retry_delay_s * 1000))),)
    return trailer


async def abort(
    context: grpc.aio.ServicerContext[Any, Any],
    status: status_pb2.Status,
    error: GatewayError,
    metadata: tuple[tuple[str, str], ...] = (),
) -> NoReturn:
    """End the call with `status`, the result of `status_of(error)`, and with `metadata`."""
    code = rpc_status.to_status(status).code
    await context.abort(code, status.message, (*metadata, *trailer_of(status, error)))
