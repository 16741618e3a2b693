"""Notes in the event log what clients get, for audits: a request's beginning, tokens and end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from services.common.clock import monotonic_s
from services.common.event_log import EventLog
from services.core.audit.facts import SegmentRead, StreamEnded, StreamOpened, TokensForwarded
from services.core.audit.record import FACT
from services.core.request import FinishReason, Request
from services.gateway.records.request_record import Stay
from services.gateway.vocabulary.errors import GatewayError

ABANDONED = "abandoned"
"""The outcome of a stream whose client has gone."""


class StreamRecord:
    """Without a log nothing is noted."""

    def __init__(self, log: EventLog | None) -> None:
        self._log = log

    @contextmanager
    def stream(
        self, request: Request, stays: Sequence[Stay]
    ) -> Iterator[Callable[[FinishReason | None], None]]:
        """Note the beginning of a request and its end, whatever that is, with its `stays` by then.

        Call what it yields with each piece's finish reason.
        """
        if self._log is None:
            yield lambda reason: None
            return
        outcome = ABANDONED

        def note_finish(reason: FinishReason | None) -> None:
            nonlocal outcome
            if reason is not None:
                outcome = str(reason)

        opened = StreamOpened(monotonic_s(), request.request_id, request.limits.max_tokens)
        self._log.append(FACT, [opened])
        try:
            yield note_finish
        except GatewayError as error:
            outcome = type(error).__name__
            raise
        finally:
            name = request.request_id
            segments = [SegmentRead(name, s.first_index, s.worker_id, s.moved) for s in stays]
            self._log.append(FACT, [*segments, StreamEnded(monotonic_s(), name, outcome)])

    def forwarded(self, request_id: str, first_index: int, token_ids: Sequence[int]) -> None:
        """Note tokens that are sent to the client now."""
        if self._log is not None and token_ids:
            fact = TokensForwarded(request_id, first_index, tuple(token_ids))
            self._log.append(FACT, [fact])
