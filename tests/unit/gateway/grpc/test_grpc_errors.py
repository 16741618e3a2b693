"""The table of errors: every class has a row, and details are machine-readable."""

from collections.abc import Iterator
from typing import TypeVar

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from services.gateway.grpc.errors import (
    MESSAGE_BYTES_MAX,
    PUSHBACK,
    TABLE,
    reason_of,
    status_of,
    trailer_of,
)
from services.gateway.vocabulary import errors
from services.gateway.vocabulary.errors import GatewayError

M = TypeVar("M", bound=Message)


HTTP_ONLY = ("services.gateway.batches.", "services.gateway.http.")
"""Files and batches have no gRPC API."""


def family(kind: type[GatewayError]) -> Iterator[type[GatewayError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from family(child)


def code_of(status: status_pb2.Status) -> str:
    return next(code.name for code in grpc.StatusCode if code.value[0] == status.code)


def detail(status: status_pb2.Status, kind: type[M]) -> M | None:
    for packed in status.details:
        message = kind()
        if packed.Unpack(message):
            return message
    return None


def test_every_error_has_its_own_row() -> None:
    kinds = [kind for kind in family(GatewayError) if kind.__module__.startswith("services.")]
    assert {kind for kind in kinds if not kind.__module__.startswith(HTTP_ONLY)} == set(TABLE)
    reasons = [reason_of(kind("it failed")) for kind in TABLE]
    assert len(set(reasons)) == len(reasons), "clients branch on reasons"


@pytest.mark.parametrize("kind", TABLE)
def test_grpc_codes_match_http_statuses(kind: type[GatewayError]) -> None:
    status = status_of(kind("it failed"), "id-1")
    fitting = {
        400: {"INVALID_ARGUMENT"},
        401: {"UNAUTHENTICATED"},
        403: {"PERMISSION_DENIED"},
        404: {"NOT_FOUND", "UNIMPLEMENTED"},
        405: {"UNIMPLEMENTED"},
        408: {"DEADLINE_EXCEEDED"},
        409: {"ALREADY_EXISTS"},
        413: {"RESOURCE_EXHAUSTED"},
        414: {"INVALID_ARGUMENT"},
        415: {"INVALID_ARGUMENT"},
        429: {"RESOURCE_EXHAUSTED"},
        431: {"RESOURCE_EXHAUSTED"},
        499: {"CANCELLED"},
        500: {"INTERNAL"},
        502: {"INTERNAL"},  # UNAVAILABLE would be repeated
        503: {"UNAVAILABLE"},
        504: {"DEADLINE_EXCEEDED"},
    }
    assert code_of(status) in fitting[kind.status]
    info = detail(status, error_details_pb2.ErrorInfo)
    assert info is not None
    assert (info.domain, info.metadata["http_status"]) == ("tideserve", str(kind.status))
    request = detail(status, error_details_pb2.RequestInfo)
    assert request is not None and request.request_id == "id-1"


def test_an_invalid_field_is_named() -> None:
    status = status_of(errors.BadRequest("'n' is 0; raise it", param="n"), "id")
    bad = detail(status, error_details_pb2.BadRequest)
    assert bad is not None
    assert [
        (field_violation.field, field_violation.description)
        for field_violation in bad.field_violations
    ] == [("n", "'n' is 0; raise it")]
    assert detail(status, error_details_pb2.RetryInfo) is None
    missing = status_of(errors.NoSuchModel("no such model", param="model"), "id")
    resource = detail(missing, error_details_pb2.ResourceInfo)
    assert resource is not None and resource.resource_type == "model"


def test_a_transient_error_has_a_retry_delay() -> None:
    error = errors.QueueFull("full", retry_after_s=1.2345)
    status = status_of(error, "id")
    retry = detail(status, error_details_pb2.RetryInfo)
    assert retry is not None
    delay_ms = retry.retry_delay.ToMilliseconds()
    assert 1235 <= delay_ms <= 3235
    assert dict(trailer_of(status, error))[PUSHBACK] == str(delay_ms)
    late = errors.Expired("late", retry_after_s=2.0)
    assert PUSHBACK not in dict(trailer_of(status_of(late, "id"), late))


@pytest.mark.parametrize("kind", TABLE)
def test_errors_after_tokens_are_not_retryable(kind: type[GatewayError]) -> None:
    error = kind("it broke")
    status = status_of(error, "id", next_index=7)
    info = detail(status, error_details_pb2.ErrorInfo)
    assert info is not None
    if code_of(status_of(error, "id")) in ("UNAVAILABLE", "INTERNAL"):
        assert (code_of(status), info.reason) == ("ABORTED", "STREAM_LOST")
        assert info.metadata["next_index"] == "7"
        assert info.metadata["cause"] == reason_of(error)
    else:
        assert code_of(status) not in ("UNAVAILABLE", "ABORTED")
    assert PUSHBACK not in dict(trailer_of(status, error))


@pytest.mark.parametrize("letter", ["x", "é", "語", "😀"])
def test_trailers_stay_below_client_limits(letter: str) -> None:
    error = errors.BadRequest(letter * 5000, param="messages")
    status = status_of(error, "r" * 128)
    assert len(status.message.encode()) <= MESSAGE_BYTES_MAX
    assert status.message.endswith("…")
    percent_encoded = 3 * len(status.message.encode())
    in_base64 = sum(len(value) for _, value in trailer_of(status, error)) * 4 // 3
    assert percent_encoded + in_base64 < 8192
