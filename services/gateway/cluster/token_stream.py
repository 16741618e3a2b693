"""Buffers the tokens of a request between its worker and its client.

A *link* is the gRPC stream to a worker. A request *moves* when its group changes and another worker
continues the request. An *epoch* numbers the configurations of a group.
"""

import asyncio

from services.core.destination import Destination
from services.gateway.cluster.journal import Journal
from services.gateway.records.request_record import ChoiceRecord
from services.gateway.vocabulary.errors import (
    BadRequest,
    GatewayError,
    QueueFull,
    WorkerLost,
)
from services.gateway.vocabulary.message import Finish, TokenEvent, UnreadTokens


class StaleEpoch(Exception):
    """The worker's group is no longer in the epoch of the assignment: get another assignment."""


class Returned(Exception):
    """The worker returned the request for another assignment, for example for lack of memory."""


class GoneOn(Returned):
    """The worker returned the request, whose KV was shipped to `destination`."""

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination.worker_id)
        self.destination = destination


class KvLost(Returned):
    """The worker returned the request because a member of its group failed with parts of its KV."""


class WorkerLeaving(Returned):
    """The worker returned the request because it shuts down."""


class TokenStream:
    """The tokens of a started request: the worker's link writes them, the client reads them.

    From a move until the first event of the new worker the stream is *detached*: a lost link then
    does not end the stream.
    """

    def __init__(self, journal: Journal, record: ChoiceRecord) -> None:
        """`journal` has the output of earlier workers; `record.segments` ends with this worker."""
        self.record = record
        self._attached = True
        self._changed = asyncio.Event()  # wakes `wait_reattached`
        journal.reopen()
        self._journal = journal
        self._read_index = len(journal.token_ids)
        self._readable = False  # whether `next` has an event to process
        self._reader: asyncio.Future[None] | None = None  # wakes `next`
        self._error: GatewayError | None = None

    @property
    def over(self) -> bool:
        """Whether the request has ended at its worker."""
        return self._journal.finish is not None or self._error is not None

    @property
    def next_index(self) -> int:
        """Output index of the next token to receive."""
        return len(self._journal.token_ids)

    @property
    def read_index(self) -> int:
        """Output index of the next token that `next` returns."""
        return self._read_index

    @property
    def attached(self) -> bool:
        """False from a move until the first event of the new worker."""
        return self._attached

    def move(self) -> None:
        """Detach the stream, because the request has moved to another worker."""
        self._attached = False
        self._changed.clear()

    async def wait_reattached(self) -> bool:
        """Wait for the new worker's first event or the end; returns False if the link is lost."""
        await self._changed.wait()
        self._changed.clear()
        return self._attached or self.over

    def lose(self, error: GatewayError) -> None:
        """The link is lost: end the stream, unless it is detached."""
        if self._attached:
            self.fail(error)
        else:
            self._changed.set()

    def apply(self, event: TokenEvent) -> None:
        """Apply an event of the worker; raises JournalError if it violates the protocol."""
        self._attached = True
        self._changed.set()
        if event.times is not None:
            self.record.segments[-1].times = event.times
        if event.cached_tokens:
            self.record.cached_tokens = event.cached_tokens
        if event.server_losses:
            self.record.server_losses = event.server_losses
        new_tokens = self._journal.apply(event)
        quota = self.record.quota
        # Count tokens here, because the client may read them much later.
        if quota is None or not new_tokens or quota.count_output(new_tokens):
            self._wake_reader()

    def fail(self, error: GatewayError) -> None:
        """End the stream with an error, unless it has ended already."""
        if not self.over:
            self._error = error
            self._wake_reader()
            self._changed.set()

    async def next(self) -> UnreadTokens:
        """Wait for and return all tokens since the last call, with the finish once it is reached.

        Raises:
            StaleEpoch: if the request must be admitted again, as its group has changed.
            Returned: if the request must be admitted again, as its worker returned it.
            GatewayError: if the request failed; earlier tokens are returned first.
        """
        while True:
            if not self._readable:
                await self._wait_readable()
            self._readable = False
            unread = self._take()
            if unread.finish is not None:
                return unread
            # Return tokens that came before a failure first; the next call raises the failure.
            if unread.token_ids:
                self._readable = self.over
                return unread
            self._raise_failure()

    def _wake_reader(self) -> None:
        self._readable = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _wait_readable(self) -> None:
        # Not an Event: a future costs less CPU time, and the single reader waits for each token.
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _take(self) -> UnreadTokens:
        journal, first = self._journal, self._read_index
        self._read_index = len(journal.token_ids)
        ended = journal.finish in (Finish.STOP, Finish.LENGTH)
        return UnreadTokens(
            token_ids=journal.token_ids[first:],
            finish=journal.finish if ended else None,
            logprobs=journal.take_logprobs(),
            prompt_logprobs=journal.prompt_logprobs if first == 0 else (),
        )

    def _raise_failure(self) -> None:
        journal = self._journal
        match journal.finish:
            case Finish.STALE_EPOCH:
                raise StaleEpoch
            case Finish.RETURNED:
                raise Returned if journal.go_to is None else GoneOn(journal.go_to)
            case Finish.KV_LOST:
                raise KvLost
            case Finish.LEAVING:
                raise WorkerLeaving
            case Finish.INVALID:
                raise BadRequest(journal.message or "the worker refused the request")
            case Finish.OVERLOADED:
                raise QueueFull(journal.message or "the worker is full; retry")
            case Finish.ENGINE_DIED:
                message = journal.message or "the engine crashed; retry"
                raise WorkerLost(message, engine_died=True)
            case Finish.ERROR:
                raise WorkerLost(journal.message or "the engine failed; retry")
        if self._error is not None:
            raise self._error
