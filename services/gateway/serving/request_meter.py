"""Observes latencies and token counts of a choice in the gateway's metrics."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from services.core.request import FinishReason
from services.gateway.records.class_metrics import TokenGroup
from services.gateway.records.metrics import RequestHistograms
from services.gateway.records.request_record import ChoiceRecord
from services.gateway.serving.prepared import PreparedChoice
from services.gateway.vocabulary.errors import GatewayError


class RequestMeter:
    """Observes a choice; `measured` creates it.

    `tokens`: output tokens so far. `ttft_s`: time from the end of reading the client's request to
    the first token, None before. `reason` is set once the choice has finished.
    """

    def __init__(
        self,
        histograms: RequestHistograms,
        choice: PreparedChoice,
        record: ChoiceRecord,
        arrived_s: float,
    ) -> None:
        self._histograms = histograms
        self._of_class = histograms.by_class.of(choice.request.service.service_class)
        self._choice = choice
        self._record = record
        self._arrived_s = arrived_s
        self._first_s: float | None = None
        self._last_s = arrived_s
        self.tokens = 0
        self.ttft_s: float | None = None
        self._group = TokenGroup(choice.request.service, self._of_class.slo["tpot"])
        self.reason: FinishReason | None = None

    def observe_tokens(self, count: int, now_s: float) -> bool:
        """Observe `count` tokens that arrived at `now_s`; returns False for the first tokens."""
        begun = self._first_s is not None
        self._histograms.by_class.tokens.total += count
        if begun:
            per_token_s = (now_s - self._last_s) / count
            self._of_class.inter_token.observe(per_token_s)
            self._group.add_tokens(count, per_token_s)
        else:
            self._first_s = now_s
            self.ttft_s = now_s - self._arrived_s
            self._of_class.ttft.observe(self.ttft_s)
            self._note_ttft(now_s - self._choice.request.arrival_s)
        self._last_s = now_s
        self.tokens += count
        return begun

    def restart(self) -> None:
        """The choice starts again without the tokens so far."""
        self.tokens = 0

    def finish(self, reason: FinishReason) -> None:
        """Observe the end of a choice that finished; sets `reason`."""
        histograms, request = self._histograms, self._choice.request
        histograms.latency.observe(self._last_s - self._arrived_s)
        if self._first_s is not None and self.tokens > 1:
            per_token_s = (self._last_s - self._first_s) / (self.tokens - 1)
            self._of_class.per_token.observe(per_token_s)
            self._group.end()
        histograms.generation_tokens.observe(self.tokens)
        histograms.max_generation_tokens.observe(self.tokens)
        histograms.prompt_tokens.observe(len(request.prompt_ids))
        histograms.params_n.observe(self._choice.n)
        histograms.params_max_tokens.observe(request.limits.max_tokens)
        self._observe_phases()
        self.reason = reason

    def fail(self) -> None:
        """Observe that the choice failed."""
        # A request that fails before its first token has missed its TTFT target.
        if self._first_s is None:
            self._note_ttft(math.inf)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the choice as in flight inside the `with` block."""
        with self._of_class.inflight.track_inprogress():
            yield

    def _note_ttft(self, seconds: float) -> None:
        target_s = self._choice.request.service.ttft_s
        if target_s is not None:
            self._of_class.slo["ttft"].observe(seconds, target_s)

    def _observe_phases(self) -> None:
        """Observe queue, prefill and decode times that the workers reported."""
        histograms, record = self._histograms, self._record
        reported = [segment.times for segment in record.segments if segment.times is not None]
        histograms.queue.observe(record.queue_s + sum(times.wait_s for times in reported))
        # A choice that ends at a stop string is aborted before its worker reports times.
        if reported and record.segments[-1].times is not None:
            prefill_s = sum(times.prefill_s for times in reported)
            decode_s = sum(times.decode_s for times in reported)
            histograms.prefill.observe(prefill_s)
            histograms.decode.observe(decode_s)
            histograms.inference.observe(prefill_s + decode_s)


@contextmanager
def measured(
    histograms: RequestHistograms, choice: PreparedChoice, record: ChoiceRecord, arrived_s: float
) -> Iterator[RequestMeter]:
    """Meter `choice` in the `with` block; on exit, count it as finished, failed or aborted."""
    meter = RequestMeter(histograms, choice, record, arrived_s)
    outcome = "abort"
    try:
        with meter.counted():
            yield meter
    except GatewayError:
        outcome = "error"
        meter.fail()
        raise
    finally:
        histograms.finished[str(meter.reason) if meter.reason is not None else outcome].inc()
