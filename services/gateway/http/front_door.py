"""What every HTTP request passes first: limits, the key, the metrics."""

import hashlib
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.clock import monotonic_s
from services.gateway.errors import GatewayError, HeadersTooLarge, Unauthorized, UriTooLong
from services.gateway.http.errors import error_response
from services.gateway.metrics import Metrics

HEADER_BYTES_MAX = 16 * 2**10
HEADERS_MAX = 100
URI_BYTES_MAX = 8 * 2**10
# Probes of the platform carry no key.
OPEN_ROUTES = frozenset({"/live", "/ready", "/health"})
HUNG_UP = 499


class FrontDoor:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, api_key: str | None, metrics: Metrics) -> None:
        self._app = app
        # Comparing digests takes the same time whatever is alike.
        self._key_digest = _digest(api_key.encode()) if api_key is not None else None
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = monotonic_s()
        status = HUNG_UP

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, counted_send)
        except GatewayError as error:
            await error_response(error)(scope, receive, counted_send)
        finally:
            self._metrics.request_done(_endpoint(scope), status, monotonic_s() - began_s)

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if size > HEADER_BYTES_MAX or len(headers) > HEADERS_MAX:
            raise HeadersTooLarge(
                f"the headers exceed {HEADER_BYTES_MAX} bytes or {HEADERS_MAX} lines; send fewer"
            )
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > URI_BYTES_MAX:
            raise UriTooLong(f"the path exceeds {URI_BYTES_MAX} bytes; shorten it")
        if self._key_digest is not None and scope["path"] not in OPEN_ROUTES:
            given = next((value for name, value in headers if name == b"authorization"), b"")
            kind, _, key = given.partition(b" ")
            right = hmac.compare_digest(_digest(key.strip()), self._key_digest)
            if kind.lower() != b"bearer" or not right:
                raise Unauthorized("a valid API key is needed; send 'Authorization: Bearer <key>'")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _endpoint(scope: Scope) -> str:
    """The route's template, so that clients cannot make new label values."""
    return getattr(scope.get("route"), "path", "other")
