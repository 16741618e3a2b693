"""Reads and writes the messages of a public gRPC call.

A call waits from its start until its message arrives; it occupies no request slot then, so waiting
calls are limited per client (`CallLimits`).
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError, Message

from services.gateway.bounds.body_budget import BODY_BYTES_PER_ITEM, BodyLease
from services.gateway.bounds.client import WatchedClient
from services.gateway.grpc.call_limits import CallLimits
from services.gateway.keys.principal import Principal
from services.gateway.records.request_record import RequestRecord
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import BadRequest, BodyTimeout, BodyTooLarge

MESSAGE_TIMEOUT_S = 5.0
"""Timeout for a call's message; clients send it together with the call."""
STREAM_IDLE_S = 300.0
"""Timeout for the next request on a stream of requests."""
SMALL_BYTES_MAX = 64 * 2**10
"""Maximum message size of calls that occupy no request slot."""

# Messages are raw bytes: the callers parse them after a check of their size.
Context = grpc.aio.ServicerContext[bytes, bytes]
Metadata = tuple[tuple[str, str], ...]
T = TypeVar("T")
M = TypeVar("M", bound=Message)


class Call:
    """Reads and writes the messages of a call.

    Sends the initial metadata only with the first message: a client's library does not retry a call
    after it has received the initial metadata.
    """

    def __init__(
        self,
        context: Context,
        record: RequestRecord,
        stall_s: float,
        limits: CallLimits,
        identify: Callable[[], Principal],
    ) -> None:
        """`stall_s`: seconds that the client may go without reading. `identify` returns the
        client's current principal; raises Unauthorized once its key is revoked.
        """
        self._context = context
        self.record = record
        self.client: WatchedClient[Message] = WatchedClient(self._write, stall_s)
        self.identify = identify
        self.limits = limits
        self.limit_key = record.limit_key
        # Holds the slot of a waiting call until its message arrives or the call ends. A timeout
        # does not release it, because gRPC continues to read the message.
        self._waiting = contextlib.AsyncExitStack()
        self._metadata_sent = False
        self._write_lock = asyncio.Lock()
        self._operations: set[asyncio.Task[Any]] = set()
        # Bytes of the message that is being written.
        self.unread_bytes = 0
        # Output tokens of the first choice sent so far.
        self.tokens_sent = 0

    @property
    def remaining_s(self) -> float:
        """Seconds until the client's deadline; infinite without a deadline."""
        remaining_s = self._context.time_remaining()
        return math.inf if remaining_s is None else remaining_s

    def metadata(self) -> Metadata:
        """Metadata of every response, failed or not: request id, rate limits, warnings."""
        record = self.record
        warnings = tuple(("warning", text) for text in record.warning_headers)
        return (("x-request-id", record.client_request_id), *record.limit_headers(), *warnings)

    async def read(self, timeout_s: float | None = None) -> bytes | None:
        """The client's next message; None at the end of its stream.

        `timeout_s` None: wait as long as the call lasts.

        Raises:
            BodyTimeout: if the message does not arrive in time.
        """
        reading = self._operation(self._context.read())
        # `wait`, not `wait_for`: a timeout must not cancel gRPC's read.
        await asyncio.wait({reading}, timeout=timeout_s)
        if not reading.done():
            raise BodyTimeout(f"no message arrived within {timeout_s:g} s")
        message: Any = reading.result()
        return message if isinstance(message, bytes) else None

    async def message(self) -> bytes:
        """The message of a unary call. The call counts as waiting until the message arrives.

        Raises:
            BodyTimeout: if the message does not arrive in time.
            QueueFull: if the client has too many waiting calls.
            BadRequest: if the client sends no message.
        """
        await self._waiting.enter_async_context(self.limits.waiting(self.limit_key))
        data = await self.read(MESSAGE_TIMEOUT_S)
        await self._waiting.aclose()
        if data is None:
            raise BadRequest("the call has no message; send a request message")
        return data

    async def close(self) -> None:
        """Release the slot of a waiting call."""
        await self._waiting.aclose()

    async def read_small(self, kind: type[M]) -> M:
        """The message of a cheap call, such as a cancellation.

        Such a call occupies no request slot: a cancellation must work on a full gateway.

        Raises:
            GatewayError: if the message is missing, late, too large or invalid.
        """
        data = await self.message()
        if len(data) > SMALL_BYTES_MAX:
            raise BodyTooLarge(
                f"the message exceeds the limit of {SMALL_BYTES_MAX} bytes; shorten it"
            )
        return decoded(kind, data)

    async def _write(self, message: Message) -> None:
        data = message.SerializeToString()
        # Serialise the writes of a stream's requests. If a request is cancelled, gRPC still
        # completes its write, so only `_written` releases the lock.
        await self._write_lock.acquire()
        self.unread_bytes = len(data)
        writing = self._operation(self._write_with_metadata(data))
        writing.add_done_callback(self._written)
        await asyncio.shield(writing)

    def _written(self, writing: "asyncio.Task[None]") -> None:
        self.unread_bytes = 0
        self._write_lock.release()

    async def _write_with_metadata(self, data: bytes) -> None:
        if not self._metadata_sent:
            self._metadata_sent = True
            await self._context.send_initial_metadata(self.metadata())
        await self._context.write(data)

    def _operation(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run a gRPC operation in a separate task, which ends with the call at the latest."""
        # Never cancel a started operation: gRPC's core would write into freed memory.
        task = asyncio.ensure_future(work)
        self._operations.add(task)
        task.add_done_callback(self._discard)
        return task

    def _discard(self, task: "asyncio.Task[Any]") -> None:
        self._operations.discard(task)
        if not task.cancelled():
            # Retrieve the exception: asyncio logs exceptions that no task awaits.
            task.exception()


async def parsed(data: bytes, parse: Callable[[bytes], T], lease: BodyLease, pool: TextPool) -> T:
    """Charge a message to `lease` and parse it.

    Raises:
        GatewayError: if the budget is exhausted or the message is invalid.
    """
    lease.take(len(data))
    return await pool.run(lambda: parse(data), len(data) // BODY_BYTES_PER_ITEM)


def decoded(kind: type[M], data: bytes) -> M:
    """Decode a message. Raises BadRequest."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise BadRequest(
            f"the message is not a valid {kind.DESCRIPTOR.full_name}; use the stubs of this"
            " server's .proto files",
            code="undecodable",
        ) from None
