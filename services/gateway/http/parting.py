"""Makes clients of a leaving gateway reconnect: they then reach another gateway."""

from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.bounds.drain import Drain

_CLOSE = (b"connection", b"close")


class Parting:
    """ASGI middleware: once the gateway leaves, every answer is the last one on its connection.

    A kept-alive connection would bring requests long after the platform has taken this gateway
    out of its list.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        def parting_send(message: Message) -> Awaitable[None]:
            if self._drain.leaving and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            return send(message)

        await self._app(scope, receive, parting_send if scope["type"] == "http" else send)
