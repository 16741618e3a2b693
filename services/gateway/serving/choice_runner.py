"""One request from prompt tokens to text: place, start, decode, end."""

import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial

from services.common.clock import monotonic_s
from services.core.ask import Ask, Assignment, FailedAssignment
from services.gateway.cluster.admission_client import AdmissionClient
from services.gateway.cluster.token_stream import Returned, StaleEpoch
from services.gateway.cluster.worker_client import WorkerClient
from services.gateway.records.metrics import Metrics
from services.gateway.records.request_record import ChoiceRecord
from services.gateway.records.stream_record import StreamRecord
from services.gateway.serving.chat_output import ChatOutput
from services.gateway.serving.output import OutputPiece, OutputText
from services.gateway.serving.prepared import PreparedChoice
from services.gateway.serving.request_meter import RequestMeter, measured
from services.gateway.text.tokenizer import TextPool, Tokenizer
from services.gateway.vocabulary.errors import ServiceUnavailable, WorkerLost

# Groups change seldom: more stale assignments than this in a row mean that something is wrong.
STALE_MAX = 10
# Workers that a request may lose before its first token.
LOST_MAX = 3

log = logging.getLogger(__name__)


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
    ) -> None:
        self._admission = admission
        self._workers = workers
        self._tokenizer = tokenizer
        self._pool = pool
        self._metrics = metrics
        self._record = record

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
        ask = ask_for(choice)
        lost, begun = 0, False
        with (
            self._record.stream(choice.request) as note_finish,
            measured(self._metrics.requests, choice, record, arrived_s) as meter,
        ):
            for _ in range(STALE_MAX):
                returned = False
                place = await self._admit(ask, began_s, record)
                try:
                    async with contextlib.aclosing(
                        self._pieces(choice, place, record, meter)
                    ) as pieces:
                        async for piece in pieces:
                            begun = True
                            note_finish(piece.finish_reason)
                            if piece.finish_reason is not None:
                                meter.finish(piece.finish_reason)
                            yield piece
                    return
                except StaleEpoch:
                    pass
                except Returned:
                    returned = True
                except WorkerLost:
                    lost += 1
                    # After the first token another worker would have to continue from it.
                    if begun or lost == LOST_MAX:
                        raise
                    log.info(
                        "request %s lost %s before a token", choice.request_id, place.worker_id
                    )
                # Under the same id, so that the request keeps its place in the line.
                failed = FailedAssignment(place.group_id, place.epoch, returned)
                ask = replace(ask, failed=failed)
            raise ServiceUnavailable(
                "the workers' groups keep changing; send the request again shortly"
            )

    async def _admit(self, ask: Ask, began_s: float, record: ChoiceRecord) -> Assignment:
        asked_s = monotonic_s()
        try:
            return await self._admission.admit(ask, asked_s - began_s)
        finally:
            record.queued_s.append((asked_s, monotonic_s()))

    async def _pieces(
        self,
        choice: PreparedChoice,
        place: Assignment,
        record: ChoiceRecord,
        meter: RequestMeter,
    ) -> AsyncGenerator[OutputPiece, None]:
        output = self._output(choice)
        chat = None if choice.chat is None else ChatOutput(choice.chat)
        async with self._workers.open(choice.request, place, record) as stream:
            while True:
                first_index = stream.read_index
                fresh = await stream.next()
                self._record.forwarded(choice.request_id, first_index, fresh.token_ids)
                if fresh.token_ids:
                    now_s = monotonic_s()
                    if not meter.tokens(len(fresh.token_ids), now_s):
                        record.stays[-1].first_token_s = now_s
                if numbers := fresh.prompt_numbers:
                    piece = await self._pool.run(partial(output.push, fresh), numbers)
                else:
                    piece = output.push(fresh)
                said = [piece] if chat is None else chat.push(piece)
                if piece.text or piece.token_ids or piece.finish_reason is not None:
                    for one in said:
                        yield one
                if piece.finish_reason is not None:
                    return

    def _output(self, choice: PreparedChoice) -> OutputText:
        tokenizer, skip = self._tokenizer, choice.skip_special_tokens
        prompt = None
        if choice.echo and choice.request.logprobs.prompt is not None:
            prompt = tokenizer.detokenizer(skip)
        shown = frozenset[int]() if choice.chat is None else choice.chat.marks
        return OutputText(choice, tokenizer.detokenizer(skip, shown), prompt)


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
