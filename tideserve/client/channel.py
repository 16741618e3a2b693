"""How the client reaches a gateway: TLS, retries, keepalive."""

import json
from dataclasses import dataclass
from pathlib import Path

import grpc

SERVICE = "tideserve.gateway.v1.GatewayService"
# Three times more, waiting as long as the server says, if it says so.
_ATTEMPTS_MAX = 4
_SERVICE_CONFIG = {
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
    # Where most calls fail, retries would only add to the load.
    "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
}
OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.enable_retries", 1),
    # A frozen peer is noticed within a minute, while calls run.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_receive_message_length", 64 * 2**20),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to the gateway. Files are PEM.

    `ca_file`: the CAs that are trusted; None: grpc's defaults. `cert_file` and `key_file`: the
    client's own certificate, where a proxy before the gateway asks for one. `server_name`: what the
    server's certificate names, if it is not the address.
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
    """The options of a channel."""
    if tls is None or tls.server_name is None:
        return OPTIONS
    return (*OPTIONS, ("grpc.ssl_target_name_override", tls.server_name))


def tls_of(tls: Tls | bool) -> Tls | None:
    """True is TLS with default trust, False none."""
    if isinstance(tls, Tls):
        return tls
    return Tls() if tls else None
