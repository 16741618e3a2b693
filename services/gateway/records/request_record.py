"""Records the path of a request through the gateway, for its log line, metrics and trace.

Ids. `client_request_id` is the id that the client sees: its own id if it sent one, else the
response id. `response_id` is created here and unique in the cluster. Each choice runs at scheduler
and workers under `Request.request_id`, which is derived from `response_id`. An engine appends a
suffix per start, which makes a sequence id (`services/core/planner/sequence_ids.py`).

Records hold counts, times and names, never texts of clients. Times are on the monotonic clock.
"""

import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from services.common.clock import monotonic_s
from services.common.event_log import EventLog
from services.common.tracing import SpanLink, TraceContext
from services.core.audit.facts import (
    LineEnded,
    LinesClaimed,
    SegmentRead,
    StreamEnded,
    StreamOpened,
    TokensForwarded,
)
from services.core.audit.record import FACT
from services.core.request import FinishReason, Request
from services.core.service import ServiceClass
from services.gateway.bounds.drain import RequestSlot
from services.gateway.keys.principal import ANYONE, Principal
from services.gateway.keys.quotas import Headers, QuotaLease, Quotas
from services.gateway.vocabulary.errors import GatewayError
from services.gateway.vocabulary.message import Moved, WorkerTimes

CLIENT_DISCONNECTED = 499
REQUEST_ID_HEADER = b"x-request-id"
TRACEPARENT_HEADER = b"traceparent"
SCOPE_KEY = "tideserve.record"

_SAFE_ID = re.compile(rb"[A-Za-z0-9._:=@+/-]{1,128}")
GATEWAY_DIGITS = 8
"""Leading hex digits of a gateway's incarnation that are part of its response ids."""
RPC = "/tideserve.gateway.v1.GatewayService/"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    f"{RPC}Chat": "chat",
    f"{RPC}StreamChat": "chat",
    f"{RPC}Complete": "text_completion",
    f"{RPC}StreamComplete": "text_completion",
    "/inference.GRPCInferenceService/ModelInfer": "text_completion",
    "/inference.GRPCInferenceService/ModelStreamInfer": "text_completion",
}
# Prefixes of response ids, as in the APIs that clients know.
_PREFIXES = {"chat": "chatcmpl-", "text_completion": "cmpl-"}
_DIALECT_PREFIXES = {"/v1/messages": "msg_", "/v1/responses": "resp_"}
_RESPONSE_ID = re.compile(
    rf"[a-z]+[-_]([0-9a-f]{{{GATEWAY_DIGITS}}})[0-9a-f]{{{32 - GATEWAY_DIGITS}}}"
)


@dataclass(slots=True)
class WorkerSegment:
    """The part of a choice that ran at one worker."""

    worker_id: str
    group_id: str
    epoch: int
    began_s: float
    ended_s: float | None = None
    first_token_s: float | None = None  # set only at the worker of the choice's first token
    times: WorkerTimes | None = None  # as reported by the worker
    first_index: int = 0  # output index of the first token from this worker
    moved: bool = False  # whether the worker adopted the request from the previous worker
    returned: bool = False  # whether the worker returned the request


@dataclass(frozen=True, slots=True)
class RequestMove:
    """A move of a running request to another worker; `link` is the trace of the group change."""

    at_s: float
    from_worker: str
    to: Moved
    link: SpanLink | None = None


@dataclass(slots=True)
class ChoiceRecord:
    """The path of a choice through the cluster."""

    queued_s: list[tuple[float, float]] = field(default_factory=list)  # start and end of each wait
    segments: list[WorkerSegment] = field(default_factory=list)
    moves: list[RequestMove] = field(default_factory=list)
    cached_tokens: int = 0  # prompt tokens found in a prefix cache
    server_losses: int = 0  # losses of upstream servers under it
    resumed: int = 0  # resumptions after the loss of a worker that had sent tokens
    # Output tokens so far; at first those of an earlier run of the request, which is resumed.
    output_ids: list[int] = field(default_factory=list)
    quota: QuotaLease | None = None  # of its request

    @property
    def queue_s(self) -> float:
        """Seconds in the scheduler's queue."""
        return sum(end_s - began_s for began_s, end_s in self.queued_s)


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of queueing, prefill and decode, summed over all choices.

    `reported`: whether a worker reported times; else only the time in the scheduler's queue counts.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    reported: bool


WARNINGS_MAX = 8
WARNING_LENGTH_MAX = 256
# Characters that a quoted string of a header escapes.
_ESCAPED = re.compile(r'["\\]')


@dataclass(slots=True)
class RequestRecord:
    """The record of a request; see the module for its ids."""

    client_request_id: str
    began_s: float
    trace_id: str = ""  # "" if neither client nor gateway traces the request
    context: TraceContext | None = None  # set if this gateway traces the request
    path: str = ""  # HTTP path or full name of the gRPC method
    endpoint: str = "other"
    status: int = CLIENT_DISCONNECTED  # HTTP status; for gRPC its equivalent
    address: str = ""  # client address without port
    principal: Principal = ANYONE  # the authenticated sender
    quotas: Quotas | None = None
    quota: QuotaLease | None = None  # the request's charge against its owner's quota
    slo_headers: Mapping[str, str] = field(default_factory=dict)  # see service_policy.SLO_HEADERS
    earlier_ids: Sequence[int] = ()  # output of an earlier run, which the first choice resumes
    slot: RequestSlot | None = None  # its slot in the gateway's limit of concurrent requests
    service_class: ServiceClass | None = None  # None until the body is read
    warnings: tuple[str, ...] = ()  # ASCII sentences for the client, without quotes
    grpc_code: str | None = None  # set for gRPC requests only
    code: str | None = None  # error code
    retry_after_s: float | None = None
    response_id: str = ""
    fingerprint: int = 0  # hash of the body, by which the scheduler recognises a retry
    model: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # by GenAI attribute name
    parsed_s: float | None = None
    tokenised_s: float | None = None
    first_token_s: float | None = None
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    replayed: bool = False  # whether the response is the cached response of an earlier request
    choices: list[ChoiceRecord] = field(default_factory=list)

    @property
    def limit_key(self) -> str:
        """The key for per-client limits: the owner of the API key, else the client's address."""
        return f"owner {self.principal.owner}" if self.principal.owner else self.address

    @property
    def phases(self) -> Phases:
        """The times of the phases so far, as far as workers have reported them."""
        reported = [
            segment.times
            for choice in self.choices
            for segment in choice.segments
            if segment.times is not None
        ]
        return Phases(
            max((choice.queue_s for choice in self.choices), default=0.0)
            + sum(times.wait_s for times in reported),
            sum(times.prefill_s for times in reported),
            sum(times.decode_s for times in reported),
            reported=bool(reported),
        )

    @property
    def operation(self) -> str | None:
        """The operation name in OpenTelemetry's GenAI conventions; None if nothing is generated."""
        return OPERATIONS.get(self.path)

    def warn(self, text: str) -> None:
        """Add an ASCII text to the warnings of the response."""
        self.warnings += (text,)

    @property
    def warning_headers(self) -> tuple[str, ...]:
        """Values of `Warning` headers (RFC 7234)."""
        # Bounded in number and length, because clients limit the size of headers.
        first = self.warnings[:WARNINGS_MAX]
        more = len(self.warnings) - len(first)
        rest = (f"and {more} more",) if more else ()
        texts = (text[:WARNING_LENGTH_MAX] for text in (*first, *rest))
        return tuple('299 tideserve "' + _ESCAPED.sub(r"\\\g<0>", text) + '"' for text in texts)

    @property
    def given_id(self) -> bytes | None:
        """The client's own id, None if it sent none."""
        return self.client_request_id.encode() if self.has_client_id else None

    @property
    def has_client_id(self) -> bool:
        """Whether the client sent its own id, so that both ids differ."""
        return self.client_request_id != self.response_id

    def note_client_id(self, chosen_id: str) -> None:
        """Set the client's id from the body, unless a header had an id."""
        if not self.has_client_id:
            self.client_request_id = chosen_id

    def limit_headers(self) -> Headers:
        """The rate-limit headers of the request's owner."""
        return self.quotas.headers(self.principal) if self.quotas is not None else ()

    def fail(self, error: GatewayError, status: int | None = None) -> None:
        """Record that the request failed, perhaps in the middle of its response.

        `status`: the status that the client gets, if it is not the error's own.
        """
        self.status, self.code = status or error.status, error.code or "error"
        self.retry_after_s = error.retry_after_s

    def note_disconnect(self) -> None:
        """Record that the client disconnected or stopped reading."""
        self.status, self.code = CLIENT_DISCONNECTED, "client_gone"

    def note_replay(self, response_id: str) -> None:
        """Record that the client receives the cached response `response_id`."""
        self.response_id, self.replayed = response_id, True

    def add_choice(self) -> ChoiceRecord:
        """Add and return the record of another choice."""
        earlier_ids = () if self.choices else self.earlier_ids
        self.choices.append(ChoiceRecord(quota=self.quota, output_ids=list(earlier_ids)))
        return self.choices[-1]


def fingerprint_of(data: bytes | bytearray) -> int:
    """A hash of a request's body, above 0 and below 2**64."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") or 1


def new_record(
    path: str, given_id: bytes | None, began_s: float, gateway: str = ""
) -> RequestRecord:
    """Create the record of a request to `path`.

    `given_id`, the client's id from a header, becomes `client_request_id` if it has 1 to 128
    letters, digits and ``._:=@+/-``. `gateway` is this gateway's incarnation.
    """
    # The id identifies the gateway, so that any gateway can forward a cancellation. Never use the
    # client's id instead: workers must not see an id twice.
    digits = (gateway[:GATEWAY_DIGITS] + uuid.uuid4().hex)[:32]
    prefix = _DIALECT_PREFIXES.get(path) or _PREFIXES.get(OPERATIONS.get(path, ""), "req-")
    response_id = prefix + digits
    client_request_id = response_id
    # Ids are shown in headers and logs, so only safe characters are accepted.
    if given_id is not None and _SAFE_ID.fullmatch(given_id):
        client_request_id = given_id.decode("ascii")
    return RequestRecord(client_request_id, began_s, path=path, response_id=response_id)


def gateway_of(response_id: str) -> str | None:
    """The gateway digits of a response id (see `GATEWAY_DIGITS`), None for ids of clients."""
    match = _RESPONSE_ID.fullmatch(response_id)
    return match.group(1) if match is not None else None


def record_of(scope: Mapping[str, Any]) -> RequestRecord:
    """The request record in an ASGI scope."""
    record = scope[SCOPE_KEY]
    assert isinstance(record, RequestRecord)
    return record


ABANDONED = "abandoned"
"""The outcome of a stream whose client disconnected or cancelled."""


class StreamRecord:
    """Writes the tokens that are sent to clients to the event log, for audits.

    Does nothing without a log.
    """

    def __init__(self, log: EventLog | None) -> None:
        self._log = log

    @contextmanager
    def log_stream(
        self, request: Request, record: ChoiceRecord
    ) -> Iterator[Callable[[FinishReason | None], None]]:
        """Log the start of a request and, on exit, its outcome and the segments of `record`.

        The tokens that `record` has at the start are those of an earlier run.

        Yields a function to call with the finish reason, or None, of each piece of output.
        """
        if self._log is None:
            yield lambda reason: None
            return
        outcome = ABANDONED

        def note_finish(reason: FinishReason | None) -> None:
            nonlocal outcome
            if reason is not None:
                outcome = str(reason)

        request_id, tokens_max = request.request_id, request.limits.max_tokens
        opened = StreamOpened(monotonic_s(), request_id, tokens_max, len(record.output_ids))
        self._log.append(FACT, [opened])
        self.log_forwarded(request_id, 0, record.output_ids)
        try:
            yield note_finish
        except GatewayError as error:
            outcome = type(error).__name__
            raise
        finally:
            reads = [
                SegmentRead(
                    *(request_id, segment.first_index, segment.worker_id),
                    *(segment.moved, segment.returned),
                )
                for segment in record.segments
            ]
            self._log.append(FACT, [*reads, StreamEnded(monotonic_s(), request_id, outcome)])

    def log(self, fact: LinesClaimed | LineEnded) -> None:
        """Log a fact about lines of batches."""
        if self._log is not None:
            self._log.append(FACT, [fact])

    def log_forwarded(self, request_id: str, first_index: int, token_ids: Sequence[int]) -> None:
        """Log tokens that are sent to the client now."""
        if self._log is not None and token_ids:
            fact = TokensForwarded(request_id, first_index, tuple(token_ids))
            self._log.append(FACT, [fact])
