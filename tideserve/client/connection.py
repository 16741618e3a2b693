"""Channel options, TLS and metadata, common to the clients for threads and for asyncio."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tideserve.gateway.v1 import gateway_pb2_grpc

SERVICE = "tideserve.gateway.v1.GatewayService"
# Up to three retries; a back-off that the server requests takes precedence over the policy's.
_ATTEMPTS_MAX = 4
_SERVICE_CONFIG = {
    # With dns:/// targets, calls are spread over all addresses.
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{"service": SERVICE}],
            "retryPolicy": {
                "maxAttempts": _ATTEMPTS_MAX,
                "initialBackoff": "0.2s",
                "maxBackoff": "5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    # Suspends retries while most calls fail, so that they do not add to an overload.
    "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
}
OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.enable_retries", 1),
    # Detects a frozen peer within a minute while calls run.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_receive_message_length", 64 * 2**20),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings of a connection; files are in PEM format.

    `ca_file`: trusted CAs; None: gRPC's defaults. `cert_file` and `key_file`: a client certificate,
    if a proxy in front of the gateway requires it. `server_name`: the name in the server's
    certificate, if it differs from the address.
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises OSError."""
        ca, key, cert = (
            Path(path).read_bytes() if path is not None else None
            for path in (self.ca_file, self.key_file, self.cert_file)
        )
        return grpc.ssl_channel_credentials(ca, key, cert)


def options_of(tls: Tls | None) -> tuple[tuple[str, int | str], ...]:
    """Return the options of a channel."""
    if tls is None or tls.server_name is None:
        return OPTIONS
    return (*OPTIONS, ("grpc.ssl_target_name_override", tls.server_name))


def tls_of(tls: Tls | bool) -> Tls | None:
    """Return TLS settings: True means TLS with the default CAs, False no TLS."""
    if isinstance(tls, Tls):
        return tls
    return Tls() if tls else None


Metadata = tuple[tuple[str, str], ...]


def metadata_of(api_key: str | None, request_id: str) -> Metadata:
    """Return a call's metadata: API key, request id, and the caller's current trace."""
    # gRPC requires lower-case keys.
    pairs = []
    if api_key is not None:
        pairs.append(("authorization", f"Bearer {api_key}"))
    if request_id:
        pairs.append(("x-request-id", request_id))
    if traceparent := _traceparent():
        pairs.append(("traceparent", traceparent))
    return tuple(pairs)


def _no_trace() -> str:
    return ""


def _trace_reader() -> Callable[[], str]:
    """Return a function that reads the current W3C traceparent, "" without OpenTelemetry."""
    # OpenTelemetry is an optional dependency of the client.
    try:
        from opentelemetry import trace
    except ImportError:
        return _no_trace

    def read() -> str:
        span = trace.get_current_span().get_span_context()
        if not span.is_valid:
            return ""
        return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"

    return read


_traceparent = _trace_reader()


TIMEOUT_S = 600.0


class GatewayConnection:
    """A channel to a gateway, and the timeout and metadata of its calls."""

    _channels: Any
    """Module that makes the channel: grpc or grpc.aio."""
    _stub: Any

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: Tls | bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`target`: host:port, or a gRPC name such as dns:///host:port to rotate over addresses.

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
    """The call of a streamed response; `id` is the response's id."""

    def __init__(self, call: Any) -> None:
        """`call`: a running gRPC call."""
        self._call = call
        self.id = ""

    def close(self) -> None:
        """Cancel the request if it still runs."""
        self._call.cancel()
