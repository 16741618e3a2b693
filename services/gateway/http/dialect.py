"""What the generation endpoints differ in: what they read, and how they write it."""

from typing import Any, Protocol

import msgspec
from starlette.types import Message

from services.gateway.api.requests import Generation
from services.gateway.client import Client
from services.gateway.errors import GatewayError
from services.gateway.serving import Writer


class StreamWriter(Writer, Protocol):
    """Writes a response in server-sent events."""

    async def fail(self, error: GatewayError, timeout_s: float) -> None:
        """End the response, which has begun, with an error event.

        A client that does not take it within `timeout_s` learns nothing.
        """


class Dialect(Protocol):
    """One endpoint's form of a request and its response; an object serves one request.

    It holds nothing of the body but what the response repeats, about `kept_bytes` when it is
    parsed. Nor do its writers.
    """

    kept_bytes: int

    def parse(self, data: dict[str, Any]) -> Generation:
        """What the JSON object in the body asks for; raises GatewayError."""

    def whole(self, client: Client[Message], body: Generation) -> Writer:
        """Writes the response to `body`, which asks for no stream."""

    def stream(self, client: Client[Message], body: Generation) -> StreamWriter:
        """Writes the response to `body`, which asks for a stream."""


async def send_json(client: Client[Message], data: dict[str, Any]) -> None:
    """Send a whole response."""
    await send_body(client, msgspec.json.encode(data))


async def send_body(client: Client[Message], body: bytes) -> None:
    """Send a whole response that is written."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await client.send({"type": "http.response.start", "status": 200, "headers": headers})
    await client.send({"type": "http.response.body", "body": body})
