"""The tokens of one request on their way from a worker to a client."""

import asyncio

from services.gateway.cluster.journal import Journal
from services.gateway.records.request_record import ChoiceRecord
from services.gateway.vocabulary.errors import (
    BadRequest,
    GatewayError,
    QueueFull,
    WorkerLost,
)
from services.gateway.vocabulary.message import Finish, Fresh, TokenEvent


class StaleEpoch(Exception):
    """The worker serves another epoch than the assignment's: ask the scheduler again."""


class Returned(Exception):
    """The worker has had no room to begin, or has lost the KV: ask for another place."""


class KvLost(Returned):
    """The worker has lost the KV with a member of its group."""


class TokenStream:
    """The tokens of one start of a request, journalled as they come and read at the client's pace.

    While it moves to another worker it is not attached, and the loss of a link does not end it.
    """

    def __init__(self, journal: Journal, record: ChoiceRecord) -> None:
        """`record.segments` ends with the worker that has the request, which goes on after `journal`.

        All of `journal` has been read.
        """
        self.record = record
        self._attached = True
        self._changed = asyncio.Event()
        journal.reopen()
        self._journal = journal
        self._read = len(journal.token_ids)
        # Whether `next` has something to look at, and what it waits for if it has not.
        self._readable = False
        self._reader: asyncio.Future[None] | None = None
        self._error: GatewayError | None = None

    @property
    def over(self) -> bool:
        """Whether the worker is done with the request."""
        return self._journal.finish is not None or self._error is not None

    @property
    def next_index(self) -> int:
        """Output index of the first token that has not come."""
        return len(self._journal.token_ids)

    @property
    def read_index(self) -> int:
        """Output index of the first token that `next` has not returned."""
        return self._read

    @property
    def attached(self) -> bool:
        """Whether the worker that has the request has answered this gateway."""
        return self._attached

    def move(self) -> None:
        """Another worker has the request now, and has not answered yet."""
        self._attached = False
        self._changed.clear()

    async def settled(self) -> bool:
        """Wait until the new worker answers or the stream is over; False if the link is lost."""
        await self._changed.wait()
        self._changed.clear()
        return self._attached or self.over

    def lose(self, error: GatewayError) -> None:
        """The link to the worker is lost: this ends the stream unless it is moving."""
        if self._attached:
            self.fail(error)
        else:
            self._changed.set()

    def apply(self, event: TokenEvent) -> None:
        """Take its worker's event; raises JournalError if it breaks the order."""
        self._attached = True
        self._changed.set()
        if event.times is not None:
            self.record.segments[-1].times = event.times
        if event.cached_tokens:
            self.record.cached_tokens = event.cached_tokens
        self._journal.apply(event)
        self._wake_reader()

    def fail(self, error: GatewayError) -> None:
        """End the stream with an error, unless it has ended already."""
        if not self.over:
            self._error = error
            self._wake_reader()
            self._changed.set()

    async def next(self) -> Fresh:
        """All tokens since the last call, and the ending if that is reached; waits for news.

        Raises:
            StaleEpoch: if the request must be admitted again.
            Returned: likewise, as its worker has given it back.
            GatewayError: if the request failed; tokens that came before are returned first.
        """
        while True:
            if not self._readable:
                await self._wait_readable()
            self._readable = False
            fresh = self._take()
            if fresh.finish is not None:
                return fresh
            if fresh.token_ids:
                self._readable = self.over
                return fresh
            self._raise_failure()

    def _wake_reader(self) -> None:
        self._readable = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _wait_readable(self) -> None:
        """There is one reader, and it waits for each token: an Event would cost more."""
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _take(self) -> Fresh:
        journal, first = self._journal, self._read
        self._read = len(journal.token_ids)
        ended = journal.finish in (Finish.STOP, Finish.LENGTH)
        return Fresh(
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
                raise Returned
            case Finish.KV_LOST:
                raise KvLost
            case Finish.INVALID:
                raise BadRequest(journal.message or "the worker refuses the request")
            case Finish.OVERLOADED:
                raise QueueFull(journal.message or "the worker is full; try again")
            case Finish.ENGINE_DIED:
                message = journal.message or "the engine died; try again"
                raise WorkerLost(message, engine_died=True)
            case Finish.ERROR:
                raise WorkerLost(journal.message or "the engine failed; try again")
        if self._error is not None:
            raise self._error
