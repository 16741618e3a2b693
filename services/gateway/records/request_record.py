"""The record of one request, for its log line and for its trace if it has one.

Holds counts, times and names only, never texts of clients. Times are of the monotonic clock.
"""

import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from services.common.clock import monotonic_s
from services.common.event_log import EventLog
from services.common.tracing import SpanLink, TraceContext
from services.core.audit.facts import SegmentRead, StreamEnded, StreamOpened, TokensForwarded
from services.core.audit.record import FACT
from services.core.request import FinishReason, Request
from services.core.service import ServiceClass
from services.gateway.bounds.drain import RequestPlace
from services.gateway.keys.principal import ANYONE, Principal
from services.gateway.keys.quotas import Headers, QuotaLease, Quotas
from services.gateway.vocabulary.errors import GatewayError
from services.gateway.vocabulary.message import Moved, WorkerTimes

HUNG_UP = 499
REQUEST_ID_HEADER = b"x-request-id"
TRACEPARENT_HEADER = b"traceparent"
SCOPE_KEY = "tideserve.record"

_SAFE_ID = re.compile(rb"[A-Za-z0-9._:=@+/-]{1,128}")
GATEWAY_DIGITS = 8
"""Digits of a gateway's incarnation that stand in the ids of its responses."""
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
# Ids that are made here are also those of responses, which clients know by their beginning.
_PREFIXES = {"chat": "chatcmpl-", "text_completion": "cmpl-"}
_DIALECT_PREFIXES = {"/v1/messages": "msg_", "/v1/responses": "resp_"}
_MADE_ID = re.compile(rf"[a-z]+[-_]([0-9a-f]{{{GATEWAY_DIGITS}}})[0-9a-f]{{{32 - GATEWAY_DIGITS}}}")


@dataclass(slots=True)
class WorkerSegment:
    """A request at one worker. `first_token_s`: of the request's first, if that came from there.

    `times` are the worker's own, None if it has not told them. Its tokens begin at `first_index`;
    those before came from other workers, the last of which has handed it over if it has `moved`.
    """

    worker_id: str
    group_id: str
    epoch: int
    began_s: float
    ended_s: float | None = None
    first_token_s: float | None = None
    times: WorkerTimes | None = None
    first_index: int = 0
    moved: bool = False


@dataclass(frozen=True, slots=True)
class RequestMove:
    """A request went over from one worker to another; `link` is the change that moved it."""

    at_s: float
    from_worker: str
    to: Moved
    link: SpanLink | None = None


@dataclass(slots=True)
class ChoiceRecord:
    """The way of one choice through the cluster; `cached_tokens` of its prompt were in a cache.

    `resumed` counts how often it went on elsewhere once its worker was lost after a token.
    """

    queued_s: list[tuple[float, float]] = field(default_factory=list)
    segments: list[WorkerSegment] = field(default_factory=list)
    moves: list[RequestMove] = field(default_factory=list)
    cached_tokens: int = 0
    resumed: int = 0

    @property
    def queue_s(self) -> float:
        """Seconds in the scheduler's queue."""
        return sum(end_s - began_s for began_s, end_s in self.queued_s)


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of waiting, of reading the prompt and of making the output; sums over all choices.

    `told`: whether workers told any; else all but the time in the scheduler's queue is missing.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    told: bool


WARNINGS_MAX = 8
WARNING_LENGTH_MAX = 256


@dataclass(slots=True)
class RequestRecord:
    """One request. `path` is that of HTTP or the full name of gRPC's method.

    `trace_id` is "" where nobody traces; `context` is set while this gateway does. `settings` are
    what the client asked for, by the names of attributes. `address` is where it comes from, without
    a port; `principal` is its sender, which `quotas` hold to limits, and `quota` what it has taken
    of those; `promise` what headers (or metadata) of `service_policy` say, by their names. `place`
    is its place in the gateway, and `service_class` None until its body is read.
    `warnings` are ASCII sentences for the client, without quotes. `grpc_code` is set at gRPC's
    door, where `status` is what it would have been over HTTP. `replayed`: its answer is that of an
    earlier request, which was made once.
    """

    request_id: str
    began_s: float
    trace_id: str = ""
    context: TraceContext | None = None
    path: str = ""
    endpoint: str = "other"
    status: int = HUNG_UP
    address: str = ""
    principal: Principal = ANYONE
    quotas: Quotas | None = None
    quota: QuotaLease | None = None
    promise: Mapping[str, str] = field(default_factory=dict)
    place: RequestPlace | None = None
    service_class: ServiceClass | None = None
    warnings: tuple[str, ...] = ()
    grpc_code: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    response_id: str = ""
    model: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    parsed_s: float | None = None
    tokenised_s: float | None = None
    first_token_s: float | None = None
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    replayed: bool = False
    choices: list[ChoiceRecord] = field(default_factory=list)

    @property
    def guest(self) -> str:
        """The guest that the request counts for: the owner of its key, else an address."""
        return f"owner {self.principal.owner}" if self.principal.owner else self.address

    @property
    def phases(self) -> Phases:
        """The phases so far, as far as workers have reported them."""
        times = [
            segment.times
            for one in self.choices
            for segment in one.segments
            if segment.times is not None
        ]
        return Phases(
            max((choice.queue_s for choice in self.choices), default=0.0)
            + sum(one.wait_s for one in times),
            sum(one.prefill_s for one in times),
            sum(one.decode_s for one in times),
            told=bool(times),
        )

    @property
    def operation(self) -> str | None:
        """The operation of the GenAI conventions; None for requests that do not generate."""
        return OPERATIONS.get(self.path)

    @property
    def told_warnings(self) -> tuple[str, ...]:
        """The warnings in RFC 7234's form, as many and as long as any client's headers may be."""
        first = self.warnings[:WARNINGS_MAX]
        more = len(self.warnings) - len(first)
        rest = (f"and {more} more",) if more else ()
        return tuple(f'299 tideserve "{text[:WARNING_LENGTH_MAX]}"' for text in (*first, *rest))

    @property
    def given_id(self) -> bytes | None:
        """The client's own id; None if it has none."""
        return self.request_id.encode() if self.renamed else None

    @property
    def renamed(self) -> bool:
        """Whether the client's own id stands for the request, and another one for its response."""
        return self.request_id != self.response_id

    def rename(self, chosen_id: str) -> None:
        """The client has an id for the request in its body; one in a header comes first."""
        if not self.renamed:
            self.request_id = chosen_id

    def limit_headers(self) -> Headers:
        """The headers about the limits of the request's owner."""
        return self.quotas.headers(self.principal) if self.quotas is not None else ()

    def fail(self, error: GatewayError) -> None:
        """The request ends with an error, perhaps in the middle of its response."""
        self.status, self.code = error.status, error.code or "error"
        self.retry_after_s = error.retry_after_s

    def hang_up(self) -> None:
        """Note that the client went away, or took nothing any more."""
        self.status, self.code = HUNG_UP, "client_gone"

    def replays(self, response_id: str) -> None:
        """The request gets the answer of an earlier one, which has that id."""
        self.response_id, self.replayed = response_id, True

    def add_choice(self) -> ChoiceRecord:
        """Add a record for a further choice."""
        self.choices.append(ChoiceRecord())
        return self.choices[-1]


def new_record(
    path: str, given_id: bytes | None, began_s: float, gateway: str = ""
) -> RequestRecord:
    """The record of a request to `path`. Its id is the client's own if that is safe.

    Safe are 1 to 128 letters, digits and ``._:=@+/-``: it is shown in headers and logs. Else it is
    the id of the response, which is always made here, since workers must never see one twice. It
    names the gateway (by the beginning of its incarnation), so that others know where it runs.
    """
    drawn = (gateway[:GATEWAY_DIGITS] + uuid.uuid4().hex)[:32]
    prefix = _DIALECT_PREFIXES.get(path) or _PREFIXES.get(OPERATIONS.get(path, ""), "req-")
    response_id = prefix + drawn
    request_id = response_id
    if given_id is not None and _SAFE_ID.fullmatch(given_id):
        request_id = given_id.decode("ascii")
    return RequestRecord(request_id, began_s, path=path, response_id=response_id)


def gateway_of(response_id: str) -> str | None:
    """The beginning of the incarnation of the gateway that made the id; None if none did."""
    found = _MADE_ID.fullmatch(response_id)
    return found.group(1) if found is not None else None


def record_of(scope: Mapping[str, Any]) -> RequestRecord:
    """The record of the request of an ASGI scope."""
    record = scope[SCOPE_KEY]
    assert isinstance(record, RequestRecord)
    return record


ABANDONED = "abandoned"
"""The outcome of a stream whose client has gone."""


class StreamRecord:
    """Notes in the event log what clients get, for audits; without a log nothing is noted."""

    def __init__(self, log: EventLog | None) -> None:
        self._log = log

    @contextmanager
    def stream(
        self, request: Request, segments: Sequence[WorkerSegment]
    ) -> Iterator[Callable[[FinishReason | None], None]]:
        """Note the beginning of a request and its end, whatever that is, with its `segments` by then.

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
            segments = [SegmentRead(name, s.first_index, s.worker_id, s.moved) for s in segments]
            self._log.append(FACT, [*segments, StreamEnded(monotonic_s(), name, outcome)])

    def forwarded(self, request_id: str, first_index: int, token_ids: Sequence[int]) -> None:
        """Note tokens that are sent to the client now."""
        if self._log is not None and token_ids:
            fact = TokensForwarded(request_id, first_index, tuple(token_ids))
            self._log.append(FACT, [fact])
