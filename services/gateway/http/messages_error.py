"""Writes errors in the format of Anthropic's Messages API."""

from typing import Any

from services.gateway.api.messages import FIELDS, THREAD
from services.gateway.vocabulary.errors import GatewayError

PATH = "/v1/messages"

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
# By HTTP status. Other statuses: invalid_request_error below 500, else api_error.
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",  # sent as 529 unless 'messages_529' is off
    504: "timeout_error",
}


def error_body(error: GatewayError, request_id: str | None = None) -> dict[str, Any]:
    """The body of an error, or the data of an error event."""
    kind = _KINDS.get(error.status)
    if kind is None:
        kind = "api_error" if error.status >= 500 else "invalid_request_error"
    message, param = FIELDS.names.translated(error)
    fields: dict[str, Any] = {"type": kind, "message": message}
    if param == THREAD:
        # Anthropic's code for clients to send the whole conversation instead of a thread id.
        fields["details"] = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
    body = {"type": "error", "error": fields}
    return body if request_id is None else body | {"request_id": request_id}
