"""gRPC channels between services, configured to detect frozen peers."""

from collections.abc import Callable

import grpc.aio

MESSAGE_BYTES_MAX = 64 * 2**20

# gRPC reports a frozen peer as lost after keepalive_time + ping_timeout.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)

Dial = Callable[[str, str], grpc.aio.Channel]
"""Opens a channel to an address (host:port) of a service with the given role."""


def open_channel(address: str) -> grpc.aio.Channel:
    """A plain-text channel to `address` (host:port)."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
