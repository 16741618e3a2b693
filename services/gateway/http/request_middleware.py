"""Wraps every HTTP request: request id, header limits, authentication, errors, log."""

import logging
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.logging import request_ids
from services.gateway.http.errors import OVERLOADED_SCOPE_KEY, error_response, status_of
from services.gateway.keys.key_ring import KeyRing
from services.gateway.records.request_record import (
    REQUEST_ID_HEADER,
    SCOPE_KEY,
    TRACEPARENT_HEADER,
    RequestRecord,
)
from services.gateway.records.request_recorder import RequestRecorder
from services.gateway.serving.single_headers import check_single
from services.gateway.vocabulary.errors import (
    Forbidden,
    GatewayError,
    HeadersTooLarge,
    QueueFull,
    UriTooLong,
)

HEADER_BYTES_MAX = 16 * 2**10
HEADERS_MAX = 100
URI_BYTES_MAX = 8 * 2**10
# Routes without authentication: a platform's probes send no key.
OPEN_ROUTES = frozenset({"/live", "/ready", "/health", "/ping"})
# Routes for admin keys only, since they show data of all owners (tenants).
OPERATOR_ROUTES = frozenset({"/metrics"})
RESTRICTED = "restricted"
"""Set in the state of a request whose connection exceeds the limit of connections."""

log = logging.getLogger(__name__)


class RequestMiddleware:
    """ASGI middleware around the whole application."""

    def __init__(
        self, app: ASGIApp, keys: KeyRing, recorder: RequestRecorder, overloaded_status: int = 503
    ) -> None:
        """`overloaded_status`: status of 503 errors of Anthropic's API."""
        self._app = app
        self._overloaded_status = overloaded_status
        self._keys = keys
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or send an error response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = self._recorder.open(scope["path"], _header(scope, REQUEST_ID_HEADER))
        record.address = (scope.get("client") or ("",))[0]
        scope[SCOPE_KEY] = record
        scope[OVERLOADED_SCOPE_KEY] = self._overloaded_status
        refusal = self._refusal(scope, record)
        traceparent = _header(scope, TRACEPARENT_HEADER)
        self._recorder.trace(record, traceparent, admitted=refusal is None)

        started = False

        def recorded_send(message: Message) -> Awaitable[None]:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_headers(record)]
            return send(message)

        with request_ids(record.client_request_id, record.trace_id):
            try:
                if refusal is not None:
                    raise refusal
                await self._app(scope, receive, recorded_send)
            except GatewayError as error:
                await error_response(error, scope)(scope, receive, recorded_send)
                record.fail(error, status_of(error, scope))
            except Exception:
                # Catch it here: uvicorn would log the exception's text, which may quote the client.
                log.exception("a request failed unexpectedly")
                failure = GatewayError("internal error of the gateway; retry")
                # A response that has started cannot become an error response; it ends early.
                if not started:
                    await error_response(failure, scope)(scope, receive, recorded_send)
                record.fail(failure)
            finally:
                with request_ids(record.client_request_id, record.trace_id):
                    self._recorder.close(record, endpoint_of(scope))

    def _refusal(self, scope: Scope, record: RequestRecord) -> GatewayError | None:
        """The error that refuses the request, or None. Sets the record's principal."""
        path = scope["path"]
        try:
            check_headers(scope)
            if path not in OPEN_ROUTES:
                if scope.get("state", {}).get(RESTRICTED):
                    raise QueueFull("this gateway has too many connections; retry later")
                record.principal = self._keys.principal(authorization_of(scope))
                if path in OPERATOR_ROUTES and not record.principal.is_operator:
                    raise Forbidden("metrics cover all owners; use an admin key")
        except GatewayError as error:
            return error
        return None


def check_headers(scope: Scope) -> None:
    """Check the headers and the path.

    Raises:
        GatewayError: if they exceed their limits, or one of `SINGLE_HEADERS` is repeated.
    """
    headers = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers)
    if size > HEADER_BYTES_MAX or len(headers) > HEADERS_MAX:
        raise HeadersTooLarge(
            f"the headers exceed {HEADER_BYTES_MAX} bytes or {HEADERS_MAX} lines; send fewer"
        )
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > URI_BYTES_MAX:
        raise UriTooLong(f"the path exceeds {URI_BYTES_MAX} bytes; shorten it")
    check_single(name.decode("latin-1") for name, _ in headers)


def authorization_of(scope: Scope) -> str | None:
    """The credentials of a request: `authorization`, or `x-api-key` of Anthropic's clients.

    Does not accept a key in the URL, because URLs appear in logs and histories.
    """
    credentials = _header(scope, b"authorization")
    if credentials is None and (key := _header(scope, b"x-api-key")) is not None:
        credentials = b"Bearer " + key
    return None if credentials is None else credentials.decode("latin-1")


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    """The value of the last header with the name."""
    values: list[bytes] = [value for name, value in scope["headers"] if name == wanted]
    return values[-1] if values else None


def _headers(record: RequestRecord) -> list[tuple[bytes, bytes]]:
    """Headers of every response: request id, the owner's rate limits, warnings (RFC 7234)."""
    request_id = record.client_request_id.encode()
    limits = [(name.encode(), value.encode()) for name, value in record.limit_headers()]
    warnings = [(b"warning", text.encode()) for text in record.warning_headers]
    # Clients of Anthropic's API read `request-id`.
    return [(REQUEST_ID_HEADER, request_id), (b"request-id", request_id), *limits, *warnings]


def endpoint_of(scope: Scope) -> str:
    """The route's path template, a metric label with a bounded set of values."""
    return getattr(scope.get("route"), "path", "other")
