"""Runs a choice: get a worker from the scheduler, start there, detokenize the stream.

If the worker is lost, the choice resumes on another worker after the last received token.
"""

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from services.common import failpoint
from services.common.clock import monotonic_s
from services.core.ask import AVOIDED_MAX, Ask, Assignment
from services.core.request import Request
from services.gateway.cluster.admission_client import AdmissionClient
from services.gateway.cluster.journal import Journal
from services.gateway.cluster.token_stream import KvLost, Returned, StaleEpoch, TokenStream
from services.gateway.cluster.worker_client import WorkerClient
from services.gateway.records.metrics import Metrics
from services.gateway.records.request_record import ChoiceRecord, StreamRecord
from services.gateway.serving.chat_output import ChatOutput
from services.gateway.serving.output import OutputPiece, OutputText
from services.gateway.serving.prepared import PreparedChoice
from services.gateway.serving.request_meter import RequestMeter, measured
from services.gateway.serving.retry import Failure, RetryState, resumed, retry_ask
from services.gateway.text.tokenizer import TextPool, Tokenizer
from services.gateway.vocabulary.errors import GatewayError, QueueFull, WorkerLost

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OutputState:
    """Output state of a choice, kept across workers: tokens, detokenizer and chat parser."""

    journal: Journal
    output: OutputText
    chat: ChatOutput | None


class ChoiceRunner:
    """Runs prepared choices on the cluster."""

    def __init__(
        self,
        admission: AdmissionClient,
        workers: WorkerClient,
        tokenizer: Tokenizer,
        pool: TextPool,
        metrics: Metrics,
        record: StreamRecord,
        resumes: bool,
    ) -> None:
        """`resumes`: resume requests on another worker if theirs is lost after the first token."""
        self._admission = admission
        self._workers = workers
        self._tokenizer = tokenizer
        self._pool = pool
        self._metrics = metrics
        self._record = record
        self._resumes = resumes

    async def run(
        self, choice: PreparedChoice, record: ChoiceRecord, arrived_s: float
    ) -> AsyncGenerator[OutputPiece, None]:
        """Yield the output of `choice`; the last piece has a finish reason.

        Closing the generator early withdraws the request from the scheduler's queue or aborts it
        at its worker. Workers and times are noted in `record`. `arrived_s` is when the client's
        request had been read, on the monotonic clock.

        Raises:
            GatewayError: if the request fails.
        """
        began_s = monotonic_s()
        ask, request = ask_for(choice), replace(choice.request, resumable=self._resumes)
        journal = Journal(request.limits.max_tokens)
        state = OutputState(journal, self._output(choice), _chat(choice))
        retries = RetryState(self._resumes)
        with (
            self._record.stream(request, record.segments) as note_finish,
            measured(self._metrics.requests, choice, record, arrived_s) as meter,
        ):
            while True:
                place = await self._admit(ask, began_s, record)
                failpoint.hit("gateway.assigned")
                segments = len(record.segments)
                started = resumed(request, tuple(journal.token_ids))
                try:
                    async with self._workers.open(
                        started, place, record, journal, choice.coalesced
                    ) as stream:
                        while meter.reason is None:
                            for piece in await self._next(stream, started, state, record, meter):
                                note_finish(piece.finish_reason)
                                if piece.finish_reason is not None:
                                    meter.finish(piece.finish_reason)
                                yield piece
                    return
                except (StaleEpoch, Returned, WorkerLost, QueueFull) as failure:
                    output = len(journal.token_ids)
                    # Raises if the request must not be retried.
                    retries.fail(failure, output, request.limits.max_tokens)
                    # A moved request failed at its last worker, not at the assigned worker.
                    last = record.segments[-1] if len(record.segments) > segments else place
                    self._note_failure(failure, request, output, last.worker_id, record)
                    since_s = monotonic_s() - began_s
                    ask = retry_ask(
                        ask, request, output, last, failure, since_s, alone=retries.alone
                    )

    async def _admit(self, ask: Ask, began_s: float, record: ChoiceRecord) -> Assignment:
        asked_s = monotonic_s()
        try:
            avoided, avoided_s = self._workers.avoided()
            ask = replace(ask, avoided=avoided[:AVOIDED_MAX], avoided_s=avoided_s)
            return await self._admission.admit(ask, asked_s - began_s)
        except GatewayError as refused:
            if not ask.resumed:
                raise
            # The client already has part of the answer; a queueing error would make no sense to it.
            raise WorkerLost(
                f"the worker of this request was lost, and no other worker could resume it"
                f" ({refused.message}); retry the request"
            ) from refused
        finally:
            record.queued_s.append((asked_s, monotonic_s()))

    def _note_failure(
        self, failure: Failure, request: Request, output: int, worker_id: str, record: ChoiceRecord
    ) -> None:
        request_id = request.request_id
        if output:
            failpoint.hit("gateway.resumed")
            log.info(
                "request %s cannot continue on %s; it resumes after %d output tokens",
                *(request_id, worker_id, output),
            )
            record.resumed += 1
            self._metrics.stream_resumed()
        elif isinstance(failure, (WorkerLost, KvLost)):
            log.info("request %s lost %s before its first token; restarting", request_id, worker_id)

    async def _next(
        self,
        stream: TokenStream,
        request: Request,
        state: OutputState,
        record: ChoiceRecord,
        meter: RequestMeter,
    ) -> Sequence[OutputPiece]:
        """The pieces for the next tokens; empty if there is nothing to send yet."""
        first_index = stream.read_index
        fresh = await stream.next()
        self._record.forwarded(request.request_id, first_index, fresh.token_ids)
        if fresh.token_ids:
            failpoint.hit("gateway.token")
            now_s = monotonic_s()
            if not meter.tokens(len(fresh.token_ids), now_s):
                record.segments[-1].first_token_s = now_s
        output, chat = state.output, state.chat
        if fresh.prompt_logprobs:
            # Log probabilities of a long prompt take too long for the event loop.
            push = partial(output.push, fresh)
            piece = await self._pool.run(push, fresh.prompt_numbers)
        else:
            piece = output.push(fresh)
        pieces = (piece,) if chat is None else chat.push(piece)
        if piece.text or piece.token_ids or piece.finish_reason is not None:
            return pieces
        return ()

    def _output(self, choice: PreparedChoice) -> OutputText:
        tokenizer, skip = self._tokenizer, choice.skip_special_tokens
        prompt = None
        if choice.echo and choice.request.logprobs.prompt is not None:
            prompt = tokenizer.detokenizer(skip)
        shown = frozenset[int]() if choice.chat is None else choice.chat.markers
        return OutputText(choice, tokenizer.detokenizer(skip, shown), prompt)


def _chat(choice: PreparedChoice) -> ChatOutput | None:
    return None if choice.chat is None else ChatOutput(choice.chat)


def ask_for(choice: PreparedChoice) -> Ask:
    """The scheduler ask for a choice that needs a worker."""
    request = choice.request
    return Ask(
        request_id=request.request_id,
        model=choice.model,
        prompt_tokens=len(request.prompt_ids),
        max_tokens=request.limits.max_tokens,
        service=request.service,
        traceparent=request.traceparent,
        prefix=choice.prefix,
    )
