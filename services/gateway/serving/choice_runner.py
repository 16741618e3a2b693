"""One request from prompt tokens to text: place, start, decode, end.

A request whose worker is lost goes on at another one, from the tokens that have come.
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
class Reading:
    """What has come of a choice, whichever workers it came from: tokens, and their text so far."""

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
        """`resumes`: requests that have lost their worker after a token go on at another one."""
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
        """The output of `choice`, piece by piece; the last piece has a finish reason.

        Closing the generator early withdraws or aborts the request, wherever it is. `record`
        learns where it was and when; `arrived_s` is when its client's request had come.

        Raises:
            GatewayError: if the request fails.
        """
        began_s = monotonic_s()
        ask, request = ask_for(choice), replace(choice.request, resumable=self._resumes)
        journal = Journal(request.limits.max_tokens)
        reading = Reading(journal, self._output(choice), _chat(choice))
        attempts = RetryState(self._resumes)
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
                            for piece in await self._next(stream, started, reading, record, meter):
                                note_finish(piece.finish_reason)
                                if piece.finish_reason is not None:
                                    meter.finish(piece.finish_reason)
                                yield piece
                    return
                except (StaleEpoch, Returned, WorkerLost, QueueFull) as failure:
                    output = len(journal.token_ids)
                    attempts.fail(failure, output, request.limits.max_tokens)
                    last = record.segments[-1] if len(record.segments) > segments else place
                    self._note_failure(failure, request, output, last.worker_id, record)
                    since_s = monotonic_s() - began_s
                    ask = retry_ask(
                        ask, request, output, last, failure, since_s, alone=attempts.alone
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
            # Its client knows nothing of queues any more: it has a part of the answer.
            raise WorkerLost(
                f"the worker of this request was lost, and no other goes on with it"
                f" ({refused.message}); send the request again"
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
                "request %s cannot go on at %s; another start follows its %d tokens",
                *(request_id, worker_id, output),
            )
            record.resumed += 1
            self._metrics.stream_resumed()
        elif isinstance(failure, (WorkerLost, KvLost)):
            log.info("request %s lost %s before a token and starts again", request_id, worker_id)

    async def _next(
        self,
        stream: TokenStream,
        request: Request,
        reading: Reading,
        record: ChoiceRecord,
        meter: RequestMeter,
    ) -> Sequence[OutputPiece]:
        """What the next tokens give: no piece if they show nothing yet, several of a chat."""
        first_index = stream.read_index
        fresh = await stream.next()
        self._record.forwarded(request.request_id, first_index, fresh.token_ids)
        if fresh.token_ids:
            failpoint.hit("gateway.token")
            now_s = monotonic_s()
            if not meter.tokens(len(fresh.token_ids), now_s):
                record.segments[-1].first_token_s = now_s
        output, chat = reading.output, reading.chat
        if fresh.prompt_logprobs:
            push = partial(output.push, fresh)
            piece = await self._pool.run(push, fresh.prompt_numbers)
        else:
            piece = output.push(fresh)
        said = (piece,) if chat is None else chat.push(piece)
        if piece.text or piece.token_ids or piece.finish_reason is not None:
            return said
        return ()

    def _output(self, choice: PreparedChoice) -> OutputText:
        tokenizer, skip = self._tokenizer, choice.skip_special_tokens
        prompt = None
        if choice.echo and choice.request.logprobs.prompt is not None:
            prompt = tokenizer.detokenizer(skip)
        shown = frozenset[int]() if choice.chat is None else choice.chat.marks
        return OutputText(choice, tokenizer.detokenizer(skip, shown), prompt)


def _chat(choice: PreparedChoice) -> ChatOutput | None:
    return None if choice.chat is None else ChatOutput(choice.chat)


def ask_for(choice: PreparedChoice) -> Ask:
    """What the scheduler is told of a choice that needs a place."""
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
