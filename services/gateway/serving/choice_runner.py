"""Runs a choice on the cluster and yields its output.

The scheduler assigns a worker (an `Ask` is the gateway's request for an `Assignment`), the worker
generates tokens, and the gateway detokenizes them. If the worker is lost, the choice resumes on
another worker after the last received token. The part of a choice that ran on one worker is a
segment.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from services.common import failpoint
from services.common.clock import monotonic_s
from services.core.ask import AVOIDED_MAX, Ask, Assignment
from services.core.request import FinishReason, Request
from services.gateway.cluster.admission_client import AdmissionClient
from services.gateway.cluster.journal import Journal
from services.gateway.cluster.token_stream import (
    GoneOn,
    KvLost,
    Returned,
    StaleEpoch,
    TokenStream,
)
from services.gateway.cluster.worker_client import WorkerClient
from services.gateway.records.metrics import Metrics, RequestHistograms
from services.gateway.records.request_record import (
    ChoiceRecord,
    RequestMove,
    StreamRecord,
    WorkerSegment,
)
from services.gateway.serving.chat_output import ChatOutput
from services.gateway.serving.output import OutputPiece, OutputText
from services.gateway.serving.prepared import PreparedChoice
from services.gateway.serving.request_meter import RequestMeter, measured
from services.gateway.serving.retry import Failure, RetryState, resumed, resumed_ask, retry_ask
from services.gateway.text.tokenizer import TextPool, Tokenizer
from services.gateway.vocabulary.errors import GatewayError, QueueFull, WorkerLost
from services.gateway.vocabulary.message import Moved, UnreadTokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OutputState:
    """Output state of a choice, kept when it resumes on another worker.

    `held`: the output is delivered when it is complete.
    """

    journal: Journal
    output: OutputText
    chat: ChatOutput | None
    held: bool


class ChoiceRunner:
    """Runs prepared choices of a model on the cluster."""

    def __init__(
        self,
        admission: AdmissionClient,
        workers: WorkerClient,
        tokenizer: Tokenizer,
        pool: TextPool,
        metrics: Metrics,
        histograms: RequestHistograms,
        stream_record: StreamRecord,
        resumes: bool,
        resumes_grammars: Callable[[], bool] = lambda: True,
    ) -> None:
        """`tokenizer` and `histograms` are those of the model.

        `resumes`: resume requests whose worker is lost after the first token elsewhere."""
        self._admission = admission
        self._workers = workers
        self._tokenizer = tokenizer
        self._pool = pool
        self._metrics = metrics
        self._histograms = histograms
        self._stream_record = stream_record
        self._resumes = resumes
        self._resumes_grammars = resumes_grammars

    async def run(
        self, choice: PreparedChoice, record: ChoiceRecord, arrived_s: float
    ) -> AsyncGenerator[OutputPiece, None]:
        """Yield the output of `choice`; the last piece has a finish reason.

        Closing the generator early withdraws the request from the scheduler's queue or aborts it
        at its worker. `arrived_s`: monotonic time at which the client's request had been read.
        Adds workers, times and tokens to `record`, whose `output_ids` begin the output.

        Raises:
            GatewayError: if the request fails.
        """
        began_s = monotonic_s()
        held = self._held(choice, record)
        state = self._state(choice, record, held is not None)
        request = resumed(choice.request, tuple(record.output_ids))
        request = replace(request, resumable=self._resumes)
        ask = resumed_ask(ask_for(choice), request, len(record.output_ids))
        retries, placed = RetryState(self._resumes), None
        with (
            self._stream_record.log_stream(request, record) as note_finish,
            measured(self._histograms, choice, record, arrived_s) as meter,
            self._end_reported(request, record, meter),
        ):
            for piece in _noted(_earlier(state), note_finish, meter, held):
                yield piece
            while meter.reason is None:
                assignment = placed or await self._admit(ask, began_s, record)
                failpoint.hit("gateway.assigned")
                segments = len(record.segments)
                started = resumed(request, tuple(record.output_ids), record.server_losses)
                try:
                    async with self._workers.open(
                        started, assignment, record, state.journal, choice.coalesced
                    ) as stream:
                        while meter.reason is None:
                            pieces = await self._read(stream, started, state, record, meter)
                            for piece in _noted(pieces, note_finish, meter, held):
                                yield piece
                except (StaleEpoch, Returned, WorkerLost, QueueFull) as failure:
                    if held is not None:
                        state = self._restarted(choice, record, meter, held)
                    # Raises if the request must not be retried.
                    output, lost = len(record.output_ids), record.server_losses
                    retries.fail(failure, output, request.limits.max_tokens, lost)
                    last = _failed_at(assignment, record.segments[segments:], failure)
                    ask = self._retried(ask, request, last, failure, began_s, record, retries)
                    placed = self._place(failure, request, last, record)
            for piece in self._released(held, request, record):
                yield piece

    def _held(self, choice: PreparedChoice, record: ChoiceRecord) -> list[OutputPiece] | None:
        """Where to keep output back that may start again; None if it is delivered at once."""
        if not choice.held or self._resumes_grammars():
            return None
        # No engine can resume the output of an earlier run either.
        record.output_ids.clear()
        return []

    def _released(
        self, held: list[OutputPiece] | None, request: Request, record: ChoiceRecord
    ) -> Sequence[OutputPiece]:
        """The pieces that were kept back."""
        if held is None:
            return ()
        self._stream_record.log_forwarded(request.request_id, 0, record.output_ids)
        return held

    def _state(self, choice: PreparedChoice, record: ChoiceRecord, held: bool) -> OutputState:
        journal = _journal(choice.request, record)
        return OutputState(journal, self._output(choice), _chat(choice), held)

    def _restarted(
        self,
        choice: PreparedChoice,
        record: ChoiceRecord,
        meter: RequestMeter,
        held: list[OutputPiece],
    ) -> OutputState:
        """Discard the output of a choice of which nothing was delivered."""
        held.clear()
        record.output_ids.clear()
        meter.restart()
        return self._state(choice, record, held=True)

    async def _admit(self, ask: Ask, began_s: float, record: ChoiceRecord) -> Assignment:
        queued_from_s = monotonic_s()
        try:
            avoided, avoided_s = self._workers.avoided()
            ask = replace(ask, avoided=avoided[:AVOIDED_MAX], avoided_s=avoided_s)
            return await self._admission.admit(ask, queued_from_s - began_s)
        except GatewayError as error:
            if not ask.resumed:
                raise
            # The client already has part of the output, so do not report a queueing error.
            raise WorkerLost(
                f"the worker of this request was lost, and no other worker could resume it"
                f" ({error.message}); retry the request"
            ) from error
        finally:
            record.queued_s.append((queued_from_s, monotonic_s()))

    def _retried(
        self,
        ask: Ask,
        request: Request,
        last: Assignment | WorkerSegment,
        failure: Failure,
        began_s: float,
        record: ChoiceRecord,
        retries: RetryState,
    ) -> Ask:
        """Record the failure of a start at `last`; returns the ask for the next."""
        output = len(record.output_ids)
        self._record_failure(failure, request, output, last.worker_id, record)
        age_s = monotonic_s() - began_s
        return retry_ask(ask, request, output, last, failure, age_s, alone=retries.alone)

    def _place(
        self,
        failure: Failure,
        request: Request,
        last: Assignment | WorkerSegment,
        record: ChoiceRecord,
    ) -> Assignment | None:
        """Where the request goes on without an ask, with its KV; None if it has to ask."""
        if not isinstance(failure, GoneOn):
            return None
        to = failure.destination
        moved = Moved(to.worker_id, to.address, to.group_id, to.epoch)
        record.moves.append(RequestMove(monotonic_s(), last.worker_id, moved))
        self._metrics.count_moved_stream()
        failpoint.hit("gateway.placed")
        self._admission.report_placed(request.request_id, to)
        return Assignment(request.request_id, to.group_id, to.epoch, to.worker_id, to.address)

    def _record_failure(
        self, failure: Failure, request: Request, output: int, worker_id: str, record: ChoiceRecord
    ) -> None:
        request_id = request.request_id
        if isinstance(failure, GoneOn):
            log.info("request %s moves to %s", request_id, failure.destination.worker_id)
        elif output:
            failpoint.hit("gateway.resumed")
            log.info(
                "request %s cannot continue on %s; it resumes after %d output tokens",
                *(request_id, worker_id, output),
            )
            record.resumed += 1
            self._metrics.count_resumed_request()
        elif isinstance(failure, (WorkerLost, KvLost)):
            log.info("request %s lost %s; it starts again", request_id, worker_id)

    async def _read(
        self,
        stream: TokenStream,
        request: Request,
        state: OutputState,
        record: ChoiceRecord,
        meter: RequestMeter,
    ) -> Sequence[OutputPiece]:
        """Wait for tokens; returns their pieces, none if their text is held back."""
        first_index = stream.read_index
        unread = await stream.next()
        if not state.held:
            self._stream_record.log_forwarded(request.request_id, first_index, unread.token_ids)
        if unread.token_ids:
            failpoint.hit("gateway.token")
            now_s = monotonic_s()
            if not meter.observe_tokens(len(unread.token_ids), now_s):
                record.segments[-1].first_token_s = now_s
                self._report_outcome(request, record, meter)
        output = state.output
        if unread.prompt_logprobs:
            # Converting the log probabilities of a long prompt would block the event loop.
            push = partial(output.push, unread)
            piece = await self._pool.run(push, unread.prompt_logprob_count)
        else:
            piece = output.push(unread)
        return _pieces(piece, state.chat)

    @contextmanager
    def _end_reported(
        self, request: Request, record: ChoiceRecord, meter: RequestMeter
    ) -> Iterator[None]:
        """Report the end of a choice on exit, also if it failed or was closed early."""
        try:
            yield
        finally:
            cut_off = meter.reason is not FinishReason.STOP
            self._report_outcome(request, record, meter, meter.tokens, cut_off)

    def _report_outcome(
        self,
        request: Request,
        record: ChoiceRecord,
        meter: RequestMeter,
        output_tokens: int = 0,
        cut_off: bool = False,
    ) -> None:
        """Report the first token of a choice, or its end, unless it was restarted or has moved."""
        first = len(record.queued_s) == len(record.segments) == 1 and not request.output_ids
        if meter.ttft_s is not None and first:
            self._admission.report_outcome(request.request_id, meter.ttft_s, output_tokens, cut_off)

    def _output(self, choice: PreparedChoice) -> OutputText:
        tokenizer, skip = self._tokenizer, choice.skip_special_tokens
        prompt = None
        if choice.echo and choice.request.logprobs.prompt is not None:
            prompt = tokenizer.detokenizer(skip)
        # The chat parser needs the text of special tokens such as <tool_call>.
        markers = frozenset[int]() if choice.chat is None else choice.chat.markers
        return OutputText(choice, tokenizer.detokenizer(skip, markers), prompt)


def _journal(request: Request, record: ChoiceRecord) -> Journal:
    # Let the worker generate the last token again, as it reports how the output ends.
    limits, output_ids = request.limits, record.output_ids
    del output_ids[limits.max_tokens - 1 :]
    if output_ids and output_ids[-1] in limits.stop_token_ids:
        output_ids.pop()
    return Journal(request.limits.max_tokens, record.output_ids)


def _earlier(state: OutputState) -> Sequence[OutputPiece]:
    """The pieces of the output of an earlier run."""
    token_ids = state.journal.token_ids
    if not token_ids:
        return ()
    return _pieces(state.output.push(UnreadTokens(token_ids[:], None)), state.chat)


def _pieces(piece: OutputPiece, chat: ChatOutput | None) -> Sequence[OutputPiece]:
    """The pieces to yield for a piece of text; none if it has nothing new."""
    pieces = (piece,) if chat is None else chat.push(piece)
    if piece.text or piece.token_ids or piece.finish_reason is not None:
        return pieces
    return ()


def _noted(
    pieces: Iterable[OutputPiece],
    note_finish: Callable[[FinishReason | None], None],
    meter: RequestMeter,
    held: list[OutputPiece] | None,
) -> Iterator[OutputPiece]:
    """The pieces to yield now: each, unless they are `held`. Notes how the choice ends."""
    for piece in pieces:
        note_finish(piece.finish_reason)
        if piece.finish_reason is not None:
            meter.finish(piece.finish_reason)
        if held is None:
            yield piece
        else:
            held.append(piece)


def _failed_at(
    assignment: Assignment, segments: Sequence[WorkerSegment], failure: Failure
) -> Assignment | WorkerSegment:
    """The last worker of a request that failed: a moved request has left the assigned worker."""
    if not segments:
        return assignment
    segments[-1].returned = isinstance(failure, Returned)
    return segments[-1]


def _chat(choice: PreparedChoice) -> ChatOutput | None:
    return None if choice.chat is None else ChatOutput(choice.chat)


def ask_for(choice: PreparedChoice) -> Ask:
    """The first request to the scheduler for a worker that runs `choice`."""
    request = choice.request
    return Ask(
        request_id=request.request_id,
        model=choice.model,
        prompt_tokens=len(request.prompt_ids),
        max_tokens=request.limits.max_tokens,
        service=request.service,
        traceparent=request.traceparent,
        prefix=choice.prefix,
        expected_tokens=choice.expected_tokens,
        fingerprint=choice.fingerprint,
        choice=request.choice,
        affinity=choice.affinity,
        adapter=request.adapter,
    )
