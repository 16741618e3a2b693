"""One gRPC call: what its client sends, and what is sent to it."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError, Message

from services.gateway.bounds.body_budget import BODY_BYTES_PER_ITEM, BodyLease
from services.gateway.bounds.client import WatchedClient
from services.gateway.grpc.call_limits import CallLimits, address_of
from services.gateway.keys.principal import Principal
from services.gateway.records.request_record import RequestRecord
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import BadRequest, BodyTimeout, BodyTooLarge

MESSAGE_TIMEOUT_S = 5.0
"""How long a call's message may take; clients send it with the call itself."""
STREAM_IDLE_S = 300.0
"""How long a stream of requests may have none."""
SMALL_BYTES_MAX = 64 * 2**10
"""Longest message of calls that are no requests."""

# Messages are bytes here: they are parsed where it is known how large they are.
Context = grpc.aio.ServicerContext[bytes, bytes]
Metadata = tuple[tuple[str, str], ...]
T = TypeVar("T")
M = TypeVar("M", bound=Message)


class Call:
    """Reads and writes of one call.

    Initial metadata goes out with the first message and not before: what a client has headers of
    is never tried again by its library, however the call ends.
    """

    def __init__(
        self,
        context: Context,
        record: RequestRecord,
        stall_s: float,
        limits: CallLimits,
        identify: Callable[[], Principal],
    ) -> None:
        """`stall_s`: how long the client may take nothing; `identify`: its principal now, by its
        key, which raises Unauthorized when the key is no longer known.
        """
        self._context = context
        self.record = record
        record.address = address_of(context.peer())
        self.client: WatchedClient[Message] = WatchedClient(self._write, stall_s)
        self.identify = identify
        self.limits = limits
        self.guest = record.guest
        # Held until the message is there, or the call over: gRPC reads on until then.
        self._unread = contextlib.AsyncExitStack()
        self._headed = False
        self._turn = asyncio.Lock()
        self._operations: set[asyncio.Task[Any]] = set()
        # Bytes of the message that is being written.
        self.unread_bytes = 0
        # Output tokens of the first choice that were sent.
        self.tokens_sent = 0

    @property
    def remaining_s(self) -> float:
        """Seconds to the client's deadline; infinite without one."""
        remaining_s = self._context.time_remaining()
        return math.inf if remaining_s is None else remaining_s

    def metadata(self) -> Metadata:
        """What every answer tells beside its messages, failed or not."""
        record = self.record
        warnings = tuple(("warning", text) for text in record.told_warnings)
        return (("x-request-id", record.request_id), *record.limit_headers(), *warnings)

    async def read(self, timeout_s: float | None = None) -> bytes | None:
        """The client's next message, None at its end.

        `timeout_s`: how long it may take; None: as long as the call.

        Raises:
            BodyTimeout: if it does not come in time.
        """
        reading = self._operation(self._context.read())
        await asyncio.wait({reading}, timeout=timeout_s)
        if not reading.done():
            raise BodyTimeout(f"no message came within {timeout_s:g} s")
        message: Any = reading.result()
        return message if isinstance(message, bytes) else None

    async def message(self) -> bytes:
        """The one message of a call that has one; it counts as a request from then on.

        Raises:
            BodyTimeout: if it does not come in time.
            QueueFull: if its client has many such calls.
            BadRequest: if it has none.
        """
        await self._unread.enter_async_context(self.limits.waiting(self.guest))
        data = await self.read(MESSAGE_TIMEOUT_S)
        await self._unread.aclose()
        if data is None:
            raise BadRequest("the call has no message; send one")
        return data

    async def close(self) -> None:
        """The call is over for all but its client."""
        await self._unread.aclose()

    async def read_small(self, kind: type[M]) -> M:
        """The message of a call that asks for nothing that takes time or room.

        Such a call is no request: it is answered however many of those there are, since it may be
        what ends one.

        Raises:
            GatewayError: whatever is wrong with it.
        """
        data = await self.message()
        if len(data) > SMALL_BYTES_MAX:
            raise BodyTooLarge(
                f"the message is larger than the limit of {SMALL_BYTES_MAX} bytes; shorten it"
            )
        return decoded(kind, data)

    async def _write(self, message: Message) -> None:
        data = message.SerializeToString()
        # A stream's requests write in turn. A write whose request gives up has its turn to its end.
        await self._turn.acquire()
        self.unread_bytes = len(data)
        writing = self._operation(self._write_headed(data))
        writing.add_done_callback(self._written)
        await asyncio.shield(writing)

    def _written(self, writing: "asyncio.Task[None]") -> None:
        self.unread_bytes = 0
        self._turn.release()

    async def _write_headed(self, data: bytes) -> None:
        if not self._headed:
            self._headed = True
            await self._context.send_initial_metadata(self.metadata())
        await self._context.write(data)

    def _operation(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """A task of its own, which ends with the call at the latest.

        Nobody may cancel what gRPC has begun: its core would write into memory that the library has
        given back by then.
        """
        task = asyncio.ensure_future(work)
        self._operations.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: "asyncio.Task[Any]") -> None:
        self._operations.discard(task)
        if not task.cancelled():
            # Nobody may be left to hear that the call is over; asyncio would complain about that.
            task.exception()


async def parsed(data: bytes, parse: Callable[[bytes], T], lease: BodyLease, pool: TextPool) -> T:
    """What `parse` makes of a message, whose bytes `lease` then holds.

    Raises:
        GatewayError: whatever is wrong with it.
    """
    lease.take(len(data))
    return await pool.run(lambda: parse(data), len(data) // BODY_BYTES_PER_ITEM)


def decoded(kind: type[M], data: bytes) -> M:
    """The message in `data`. Raises BadRequest."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise BadRequest(
            f"the message is no {kind.DESCRIPTOR.full_name}; use the stubs of this server's"
            " contract",
            code="undecodable",
        ) from None
