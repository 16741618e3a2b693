"""Checks every request to the admin port: DNS rebinding, CSRF, authentication.

A browser sends requests of any website to any address that it can reach, localhost included. So a
request must name a known host (against DNS rebinding) and must not come from another origin.
Requests with side effects also need a header that pages of other origins can only send after a CORS
preflight, which this port never grants.
"""

import ipaddress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.address import is_loopback
from services.common.clock import monotonic_s
from services.common.logging import request_ids
from services.gateway.http.errors import error_response
from services.gateway.http.request_middleware import authorization_of, check_headers, endpoint_of
from services.gateway.keys.key_ring import KeyRing
from services.gateway.records.request_log import RequestLog
from services.gateway.records.request_record import SCOPE_KEY, RequestRecord, new_record
from services.gateway.vocabulary.errors import Forbidden, GatewayError

ADMIN_HEADER = "x-tideserve-admin"
SAFE_METHODS = frozenset({"GET", "HEAD"})
ERROR_STATUS = 400
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class AdminGuard:
    """ASGI middleware around the admin application."""

    def __init__(
        self, app: ASGIApp, host: str, names: str, keys: KeyRing, open_paths: frozenset[str]
    ) -> None:
        """`host`: the listening address. `names`: further host names, separated by commas.

        `open_paths` need no key: the files of the page with the login form.
        """
        self._app = app
        self._only_loopback = is_loopback(host)
        configured = {name.strip().lower() for name in names.split(",")} - {""}
        self._names = configured | {"localhost", host.lower()}
        self._keys = keys
        self._open_paths = open_paths
        self._log = RequestLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request to the application, or refuse it with 400, 401 or 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        record = scope[SCOPE_KEY] = new_record(scope["path"], None, monotonic_s())

        async def secured_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.client_request_id
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        with request_ids(record.client_request_id, ""):
            try:
                self._check(scope, record)
                await self._app(scope, receive, secured_send)
            except GatewayError as error:
                await error_response(error, scope)(scope, receive, secured_send)
                record.fail(error)
            finally:
                record.endpoint, record.ended_s = endpoint_of(scope), monotonic_s()
                # Log only errors and requests with side effects: clients poll the status often.
                if scope["method"] not in SAFE_METHODS or record.status >= ERROR_STATUS:
                    self._log.write(record)

    def _check(self, scope: Scope, record: RequestRecord) -> None:
        check_headers(scope)
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        # DNS rebinding: the browser sends the attacker's host name, which is not in the list.
        if not self._is_known_host(host):
            raise Forbidden(
                f"the host name {host[:64]!a} is not allowed on the admin port; use its address, or"
                " add the name to 'admin_names'"
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise Forbidden("pages of another origin may not use the admin port; open its own page")
        if scope["path"] in self._open_paths:
            return
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Forbidden("pages of another site may not use the admin port; open its own page")
        record.principal = self._keys.operator(authorization_of(scope))
        # CSRF: a page of another origin cannot set the header without a preflight.
        if scope["method"] not in SAFE_METHODS and headers.get(ADMIN_HEADER) != "1":
            raise Forbidden(f"this request needs the header '{ADMIN_HEADER}: 1'; send it")

    def _is_known_host(self, host: str) -> bool:
        """Whether a Host header may name this port. IP addresses cannot be rebound by DNS."""
        name = host_name(host)
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback if self._only_loopback else True


def host_name(host: str) -> str:
    """The host of a Host header in lower case, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
