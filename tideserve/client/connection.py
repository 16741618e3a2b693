"""What the clients for threads and for asyncio have in common."""

from typing import Any

from tideserve.client.channel import Tls, options_of, tls_of
from tideserve.client.metadata import metadata_of
from tideserve.gateway.v1 import gateway_pb2_grpc

TIMEOUT_S = 600.0


class GatewayConnection:
    """A channel to a gateway, and what goes with each call."""

    _channels: Any
    """The part of gRPC that makes the channel: grpc or grpc.aio."""
    _stub: Any

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: Tls | bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`target`: host:port, or a gRPC name such as dns:///host:port, whose addresses take turns.

        Raises:
            OSError: if a file of `tls` cannot be read.
        """
        self._api_key = api_key
        self._timeout_s = timeout_s
        secure, options = tls_of(tls), options_of(tls_of(tls))
        if secure is None:
            self._channel = self._channels.insecure_channel(target, options=options)
        else:
            credentials = secure.credentials()
            self._channel = self._channels.secure_channel(target, credentials, options=options)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    def _keywords(self, timeout_s: float | None, request_id: str) -> dict[str, Any]:
        return {
            "timeout": self._timeout_s if timeout_s is None else timeout_s,
            "metadata": metadata_of(self._api_key, request_id),
        }


class StreamedCall:
    """The call of a streamed answer; `id` is that of the response."""

    def __init__(self, call: Any) -> None:
        """`call`: a running call of gRPC's."""
        self._call = call
        self.id = ""

    def close(self) -> None:
        """End the request if it still runs."""
        self._call.cancel()
