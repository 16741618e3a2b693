"""One request from prompt tokens to text: place, start, decode, end."""

import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace

from services.common.clock import monotonic_s
from services.gateway.admission_client import AdmissionClient
from services.gateway.errors import Unavailable, WorkerLost
from services.gateway.message import Ask, Assignment, Job
from services.gateway.metrics import Metrics
from services.gateway.output import OutputText, Piece
from services.gateway.request_meter import RequestMeter, measured
from services.gateway.request_record import ChoiceRecord
from services.gateway.stream_record import StreamRecord
from services.gateway.token_stream import StaleEpoch
from services.gateway.tokenizer import Tokenizer
from services.gateway.worker_client import WorkerClient

# Groups change seldom: more stale assignments than this in a row mean that something is wrong.
STALE_MAX = 10
# Workers that a request may lose before its first token.
LOST_MAX = 3

log = logging.getLogger(__name__)


class Generator:
    """Runs jobs on the cluster."""

    def __init__(
        self,
        admission: AdmissionClient,
        workers: WorkerClient,
        tokenizer: Tokenizer,
        metrics: Metrics,
        record: StreamRecord,
    ) -> None:
        self._admission = admission
        self._workers = workers
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._record = record

    async def run(
        self, job: Job, choice: ChoiceRecord, arrived_s: float
    ) -> AsyncGenerator[Piece, None]:
        """The output of `job`, piece by piece; the last piece has a finish reason.

        Closing the generator early withdraws or aborts the job, wherever it is. `choice` learns
        where it was and when; `arrived_s` is when its request had come.

        Raises:
            GatewayError: if the job fails.
        """
        began_s = monotonic_s()
        ask = Ask(job.request_id, job.model, len(job.prompt_ids), job.limits.max_tokens)
        lost, begun = 0, False
        with (
            self._record.stream(job) as note_finish,
            measured(self._metrics.requests, job, choice, arrived_s) as meter,
        ):
            for _ in range(STALE_MAX):
                place = await self._admit(ask, began_s, choice)
                try:
                    async with contextlib.aclosing(
                        self._pieces(job, place, choice, meter)
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
                except WorkerLost:
                    lost += 1
                    # Once a token is out, another worker would have to go on from it.
                    if begun or lost == LOST_MAX:
                        raise
                    log.info("request %s lost %s before a token", job.request_id, place.worker_id)
                # Under the same id, so that the request keeps its place in the line.
                ask = replace(ask, refused_epoch=place.epoch, refused_group_id=place.group_id)
            raise Unavailable("the workers' groups keep changing; send the request again shortly")

    async def _admit(self, ask: Ask, began_s: float, choice: ChoiceRecord) -> Assignment:
        asked_s = monotonic_s()
        try:
            return await self._admission.admit(ask, asked_s - began_s)
        finally:
            choice.queued_s.append((asked_s, monotonic_s()))

    async def _pieces(
        self, job: Job, place: Assignment, choice: ChoiceRecord, meter: RequestMeter
    ) -> AsyncGenerator[Piece, None]:
        output = OutputText(job, self._tokenizer.detokenizer())
        async with self._workers.open(job, place, choice) as stream:
            while True:
                first_index = stream.read_index
                token_ids, finish = await stream.next()
                self._record.forwarded(job.request_id, first_index, token_ids)
                if token_ids:
                    now_s = monotonic_s()
                    if not meter.tokens(len(token_ids), now_s):
                        choice.stays[-1].first_token_s = now_s
                piece = output.push(token_ids, finish)
                if piece.text or piece.tokens or piece.finish_reason is not None:
                    yield piece
                if piece.finish_reason is not None:
                    return
