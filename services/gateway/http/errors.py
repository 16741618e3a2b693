"""Writes error responses in the format of the endpoint's API."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from services.gateway.api.responses import FIELDS as RESPONSES
from services.gateway.api.responses import PATH as RESPONSES_PATH
from services.gateway.http import messages_error
from services.gateway.records.request_record import record_of
from services.gateway.vocabulary.errors import GatewayError, MethodNotAllowed, NoSuchRoute

OVERLOADED_SCOPE_KEY = "tideserve.overloaded_status"
"""Key of the ASGI scope: status of 503 errors of Anthropic's API; without it, 503."""


def status_of(error: GatewayError, scope: Scope) -> int:
    """The HTTP status of an error; Anthropic's API has 529 where others have 503."""
    if error.status == 503 and scope["path"].startswith(messages_error.PATH):
        status: int = scope.get(OVERLOADED_SCOPE_KEY, error.status)
        return status
    return error.status


def error_response(
    error: GatewayError, scope: Scope, headers: Mapping[str, str] | None = None
) -> Response:
    """The response for an error, with Retry-After if the error states when to retry."""
    all_headers = dict(headers or {})
    if error.retry_s is not None:
        all_headers["retry-after"] = str(error.retry_s)
    if not error.automatic_retry:
        # The libraries of OpenAI and Anthropic retry all errors of servers without it.
        all_headers["x-should-retry"] = "false"
    # RFC 9110 requires the header with 401.
    if error.status == 401:
        all_headers["www-authenticate"] = "Bearer"
    body = error_body(error, scope["path"], record_of(scope).client_request_id)
    return Response(
        json.dumps(body, ensure_ascii=False),
        status_code=status_of(error, scope),
        headers=all_headers,
        media_type="application/json",
    )


def error_body(error: GatewayError, path: str, request_id: str) -> dict[str, Any]:
    """The body of an error response to a request to `path`."""
    if path.startswith(messages_error.PATH):
        return messages_error.error_body(error, request_id)
    body = error.body()
    if path == RESPONSES_PATH:
        message, param = RESPONSES.names.translated(error)
        body["error"] |= {"message": message, "param": param}
    return body


def add_handlers(app: FastAPI) -> None:
    """Register handlers for all errors, including FastAPI's own and unexpected exceptions."""
    app.add_exception_handler(GatewayError, _gateway_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(500, _crash)


async def _gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return _response(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        message = f"the method {request.method} is not allowed here; see /openapi.json"
        return _response(request, MethodNotAllowed(message), error.headers)
    if error.status_code == 404:
        return _response(request, NoSuchRoute("this route does not exist; see /openapi.json"))
    return _response(request, GatewayError("the request failed"), error.headers)


async def _crash(request: Request, error: Exception) -> Response:
    # The middleware logs the exception; hide it from clients, as it may reveal internals.
    return _response(request, GatewayError("internal error of the gateway; retry"))


def _response(
    request: Request, error: GatewayError, headers: Mapping[str, str] | None = None
) -> Response:
    """The response for an error; also sets the error in the request's record."""
    record_of(request.scope).fail(error, status_of(error, request.scope))
    return error_response(error, request.scope, headers)
