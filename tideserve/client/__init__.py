"""The Python client of tideserve's gRPC API, for threads and for asyncio.

    from tideserve.client import Client

    with Client("localhost:50051") as client:
        print(client.chat("hello", model="smollm2-135m-instruct").choices[0].message.text)
        with client.stream_chat("hello", model="smollm2-135m-instruct") as stream:
            for piece in stream:
                print(piece.text, end="")

Responses are messages of tideserve.gateway.v1; errors are in `tideserve.client.errors`.
"""

from tideserve.client.aio import AsyncClient, AsyncStream
from tideserve.client.connection import Tls
from tideserve.client.errors import (
    AlreadyExists,
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    ResourceExhausted,
    ServerFailed,
    StreamLost,
    TideserveError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from tideserve.client.sync import Client, Stream

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Client",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "InvalidRequest",
    "ModelNotFound",
    "NotFound",
    "PermissionDenied",
    "QuotaExceeded",
    "ResourceExhausted",
    "ServerFailed",
    "Stream",
    "StreamLost",
    "TideserveError",
    "Tls",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
]
