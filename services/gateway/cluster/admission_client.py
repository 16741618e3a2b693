"""Requests worker assignments from the scheduler over a long-lived gRPC stream.

An *ask* requests a worker for a choice. The scheduler confirms with a *ticket* that the ask is in
its queue, and answers it with an *assignment* or a *refusal*. An *estimated* ask, sent before the
prompt is tokenized, only asks whether the request would be refused now. An *outcome* reports the
first token or the end of a request, from which the scheduler learns.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from services.common.clock import monotonic_s
from services.common.frames import TAKES_MANY, unpacked
from services.common.grpc_client import Dial
from services.common.timeouts import timeout
from services.core.ask import Ask, Assignment, Proceed, Refusal, RefusalReason
from services.core.destination import Destination
from services.core.service import ServiceClass
from services.gateway.cluster import translate
from services.gateway.cluster.outbox import Outbox
from services.gateway.cluster.stream import StreamBroken, cause, write_all
from services.gateway.vocabulary.errors import (
    BadRequest,
    ContextExceeded,
    Expired,
    GatewayError,
    QueueFull,
    ServiceUnavailable,
    TooLate,
)
from services.gateway.vocabulary.message import ClassWait, Heartbeat, SchedulerMessage, Ticket
from tideserve.common.v1 import load_pb2
from tideserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

RESEND_S = 1.0
SWEEP_S = 0.25
HEARTBEAT_TIMEOUT_S = 3.0
RECONNECT_S = 0.2
# Maximum wait of a resumed request without a running scheduler, which restarts faster than that.
RESUME_TIMEOUT_S = 60.0
# Maximum wait for the answer to an estimated ask; then the request is tokenized without it.
ESTIMATED_TIMEOUT_S = 0.5
# Maximum outcomes that wait for the next sweep; further outcomes are not reported.
OUTCOMES_MAX = 4096

log = logging.getLogger(__name__)
AdmitCall = grpc.aio.StreamStreamCall[scheduler_pb2.AdmitRequest, scheduler_pb2.AdmitResponse]


@dataclass(slots=True, eq=False)
class _Pending:
    """An ask that the scheduler has not answered."""

    ask: Ask
    asked_s: float
    answer: asyncio.Future[Assignment]
    # Last time when the ask was known to be in the queue of a running scheduler.
    known_s: float
    ticketed: bool = False  # whether the scheduler has confirmed that it queued the ask
    sent_s: float = 0.0
    # Exponential back-off, so that retries do not add load to a slow scheduler.
    backoff_s: float = RESEND_S


class AdmissionClient:
    """Queues requests at the scheduler and waits for their assignments."""

    def __init__(
        self,
        address: Callable[[], str | None],
        admit_timeout_s: float,
        dial: Dial,
    ) -> None:
        """`address` returns host:port of the newest scheduler, None while none is registered."""
        self._address = address
        self._admit_timeout_s = admit_timeout_s
        self._dial = dial
        self._pending: dict[str, _Pending] = {}
        # Answers to estimated asks, by request id.
        self._estimated: dict[str, asyncio.Future[Refusal | None]] = {}
        # Frames of outcomes, sent together by the next sweep.
        self._outcomes: list[scheduler_pb2.AdmitRequest] = []
        self._outbox: Outbox[scheduler_pb2.AdmitRequest] | None = None
        self._changed = asyncio.Event()
        self._received_s = 0.0
        self.heartbeat: Heartbeat | None = None

    @property
    def waiting(self) -> int:
        """Number of asks without an answer."""
        return len(self._pending)

    def notify_scheduler_change(self) -> None:
        """Notify the client that `address` may return another scheduler."""
        self._changed.set()

    async def admit(self, ask: Ask, waited_s: float = 0.0) -> Assignment:
        """Wait for an assignment; cancelling the call withdraws the ask.

        `waited_s`: seconds that the request has waited before.

        Raises:
            GatewayError: if the scheduler refuses the request.
            ServiceUnavailable: if the request was in the queue of no running scheduler for
                `admit_timeout_s`, or `RESUME_TIMEOUT_S` if it is resumed.
        """
        now_s = monotonic_s()
        answer: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        pending = _Pending(ask, now_s - waited_s, answer, known_s=now_s)
        self._pending[ask.request_id] = pending
        self._send_ask(pending)
        assigned = False
        try:
            assignment = await answer
            assigned = True
            return assignment
        finally:
            del self._pending[ask.request_id]
            if not assigned:
                self._send(translate.withdraw_frame(ask.request_id))

    async def check(self, asks: Sequence[Ask]) -> None:
        """Ask whether a request whose prompts are not tokenized yet would be refused now.

        `asks`: an estimated ask for each choice. Returns if the scheduler refuses no choice, or
        does not answer within `ESTIMATED_TIMEOUT_S`.

        Raises:
            GatewayError: if the scheduler refuses choices: the refusal with the latest retry.
        """
        loop = asyncio.get_running_loop()
        answers = dict[str, asyncio.Future[Refusal | None]]()
        for ask in asks:
            answers[ask.request_id] = loop.create_future()
            self._send(translate.ask_frame(ask, 0.0))
        self._estimated |= answers
        try:
            await asyncio.wait(answers.values(), timeout=ESTIMATED_TIMEOUT_S)
        finally:
            for request_id in answers:
                del self._estimated[request_id]
        done = [answer.result() for answer in answers.values() if answer.done()]
        if refusals := [refusal for refusal in done if refusal is not None]:
            raise refusal_error(max(refusals, key=lambda refusal: refusal.retry_after_s or 0.0))

    def class_wait(self, model: str, service_class: ServiceClass) -> ClassWait | None:
        """The predicted wait of a class; None if it is unknown."""
        heartbeat = self.heartbeat
        return None if heartbeat is None else heartbeat.class_waits.get((model, service_class))

    def report_outcome(
        self, request_id: str, ttft_s: float, output_tokens: int = 0, cut_off: bool = False
    ) -> None:
        """Report a first token, or with `output_tokens` an end, if the scheduler wants outcomes.

        `cut_off`: `max_tokens`, the client or an error ended the output.
        """
        wanted = self.heartbeat is not None and self.heartbeat.wants_outcomes
        if wanted and len(self._outcomes) < OUTCOMES_MAX:
            self._outcomes.append(
                translate.outcome_frame(request_id, ttft_s, output_tokens, cut_off)
            )

    def report_placed(self, request_id: str, destination: Destination) -> None:
        """Report that a request continues at another worker without an ask."""
        self._send(translate.placed_frame(request_id, destination))

    def forward_load(self, load: load_pb2.WorkerLoad) -> None:
        """Forward a worker's load to the scheduler, ahead of all later asks."""
        self._send(translate.load_frame(load))

    async def run(self) -> None:
        """Maintain a stream to the newest scheduler until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sweep())
            tasks.create_task(self._keep_stream())

    async def _sweep(self) -> None:
        """Resend asks without a ticket; fail asks that have been in no queue for too long."""
        while True:
            await asyncio.sleep(SWEEP_S)
            outcomes, self._outcomes = self._outcomes, []
            for outcome in outcomes:
                self._send(outcome)
            now_s = monotonic_s()
            for pending in self._pending.values():
                if pending.answer.done():
                    continue
                # Any message confirms that the scheduler still has this stream's asks in its queue.
                if pending.ticketed:
                    pending.known_s = self._received_s
                resumed = pending.ask.resumed
                limit_s = RESUME_TIMEOUT_S if resumed else self._admit_timeout_s
                if now_s - pending.known_s > limit_s:
                    pending.answer.set_exception(
                        ServiceUnavailable("the scheduler is unreachable; retry shortly")
                    )
                elif not pending.ticketed and now_s - pending.sent_s > pending.backoff_s:
                    pending.backoff_s *= 2
                    self._send_ask(pending)

    async def _keep_stream(self) -> None:
        while True:
            address = self._address()
            if address is None:
                await self._wait_for_change(RESEND_S)
                continue
            began_s = monotonic_s()
            try:
                await self._run_stream(address)
            except* (StreamBroken, grpc.RpcError) as group:
                # A dead scheduler stays registered until its etcd lease ends: log only the first
                # attempt, after which no message arrives.
                if self._received_s > began_s:
                    log.warning("stream to the scheduler at %s ended: %s", address, cause(group))
            await asyncio.sleep(RECONNECT_S)

    async def _wait_for_change(self, timeout_s: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with timeout(timeout_s):
                await self._changed.wait()

    async def _run_stream(self, address: str) -> None:
        """Run a stream until it breaks or a newer scheduler registers."""
        began_s = monotonic_s()
        outbox: Outbox[scheduler_pb2.AdmitRequest] = Outbox()
        self._outbox = outbox
        async with self._dial(address, "scheduler") as channel:
            call: AdmitCall = scheduler_pb2_grpc.SchedulerServiceStub(channel).Admit(
                metadata=TAKES_MANY
            )
            # The scheduler removes the asks of an ended stream: start a new stream with all asks.
            for pending in self._pending.values():
                pending.backoff_s = RESEND_S
                self._send_ask(pending)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(write_all(call, outbox))
                    tasks.create_task(self._read(call))
                    tasks.create_task(self._watch(address, outbox, began_s))
            finally:
                self._outbox = None
                self.heartbeat = None
                for answer in self._estimated.values():
                    if not answer.done():
                        answer.set_result(None)
                for pending in self._pending.values():
                    if pending.ticketed:
                        pending.known_s = self._received_s
                    pending.ticketed = False
                call.cancel()

    async def _read(self, call: AdmitCall) -> None:
        async for message in call:
            self._received_s = monotonic_s()
            for frame in unpacked(message):
                self._handle(translate.scheduler_message(frame))
        raise StreamBroken("the scheduler closed the stream")

    def _handle(self, message: SchedulerMessage | None) -> None:
        if isinstance(message, Heartbeat):
            self.heartbeat = message
        elif message is not None:
            self._answer(message)

    async def _watch(
        self, address: str, outbox: Outbox[scheduler_pb2.AdmitRequest], began_s: float
    ) -> None:
        """Raise StreamBroken when the scheduler hangs or is replaced."""
        while True:
            await self._wait_for_change(SWEEP_S)
            if self._address() not in (None, address):
                raise StreamBroken("a newer scheduler has registered")
            if monotonic_s() - max(self._received_s, began_s) > HEARTBEAT_TIMEOUT_S:
                raise StreamBroken(f"no heartbeat for {HEARTBEAT_TIMEOUT_S:g} s")
            if outbox.full:
                raise StreamBroken("the scheduler reads no frames")

    def _answer(self, message: Ticket | Assignment | Refusal | Proceed) -> None:
        if isinstance(message, Proceed) or (isinstance(message, Refusal) and message.estimated):
            self._answer_estimated(message)
            return
        pending = self._pending.get(message.request_id)
        if pending is None or pending.answer.done():
            return
        if isinstance(message, Ticket):
            pending.ticketed = True
        elif isinstance(message, Assignment):
            pending.answer.set_result(message)
        else:
            pending.answer.set_exception(refusal_error(message))

    def _answer_estimated(self, message: Proceed | Refusal) -> None:
        """Answer an estimated ask; no effect after its timeout."""
        answer = self._estimated.get(message.request_id)
        if answer is not None and not answer.done():
            answer.set_result(message if isinstance(message, Refusal) else None)

    def _send_ask(self, pending: _Pending) -> None:
        now_s = monotonic_s()
        pending.sent_s = now_s
        self._send(translate.ask_frame(pending.ask, now_s - pending.asked_s))

    def _send(self, frame: scheduler_pb2.AdmitRequest) -> None:
        """Queue a frame, or discard it while there is no stream or the outbox is full."""
        # Discarding is safe: a new stream starts with all asks, workers also send their load to
        # the scheduler, and `_watch` ends the stream if the outbox is full.
        if self._outbox is not None and not self._outbox.full:
            self._outbox.put(frame)


_OVERLOAD: dict[RefusalReason, type[ServiceUnavailable] | type[Expired]] = {
    RefusalReason.QUEUE_FULL: QueueFull,
    RefusalReason.TOO_LATE: TooLate,
    RefusalReason.EXPIRED: Expired,
}


def refusal_error(refusal: Refusal) -> GatewayError:
    """The error to send to a client whose ask was refused."""
    message = refusal.message or "the scheduler refused the request"
    match refusal.reason:
        case RefusalReason.TOO_LARGE:
            return ContextExceeded(message)
        case RefusalReason.INVALID:
            return BadRequest(message)
    # An unknown model is unavailable, not missing: this gateway is configured to serve it, so its
    # workers may start later.
    kind: type[ServiceUnavailable] | type[Expired] = ServiceUnavailable
    if refusal.reason is not None:
        kind = _OVERLOAD.get(refusal.reason, kind)
    error = kind(message, retry_after_s=refusal.retry_after_s or 1.0, booked=refusal.booked)
    if isinstance(error, ServiceUnavailable):
        error.unserved = refusal.reason is RefusalReason.UNKNOWN_MODEL
    return error
