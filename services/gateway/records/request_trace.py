"""Builds the trace of a request from its record, with a span per phase.

Workers report only durations. Their spans are laid end to end from the time at which this gateway
sent the request, so they are early by the network delay.
"""

from collections.abc import Iterable

from services.common import genai
from services.common.tracing import Event, Span, Tracer, Value
from services.gateway.records.request_record import ChoiceRecord, RequestRecord, WorkerSegment

PROVIDER = "tideserve"


def export_trace(tracer: Tracer, record: RequestRecord) -> None:
    """Export the trace of a finished request if it is sampled."""
    if record.context is None or record.operation is None:
        return
    if tracer.wants(record.context, failed=record.status >= 500):
        tracer.end(record.context, request_span(record))


def request_span(record: RequestRecord) -> Span:
    """The root span of the request with its child spans."""
    assert record.operation is not None
    end_s = record.ended_s
    root = Span(
        f"{record.operation} {record.model}" if record.model else record.operation,
        record.began_s,
        end_s,
        _attributes(record),
        server=True,
    )
    parsed_s = record.parsed_s if record.parsed_s is not None else end_s
    root.children.append(Span("parse", record.began_s, parsed_s))
    if record.parsed_s is not None:
        tokenised_s = record.tokenised_s if record.tokenised_s is not None else end_s
        root.children.append(Span("tokenise", parsed_s, tokenised_s))
    for choice in record.choices:
        root.children += _choice_spans(choice, end_s)
        root.events += _events(choice)
        root.links += [move.link for move in choice.moves if move.link is not None]
    if record.status >= 500:
        # Only the code: an error message may quote the client's text.
        root.error = record.code or "failed"
    return root


def _attributes(record: RequestRecord) -> dict[str, Value]:
    values: dict[str, Value | None] = {
        genai.OPERATION_NAME: record.operation,
        genai.PROVIDER_NAME: PROVIDER,
        genai.OUTPUT_TYPE: "text",
        genai.REQUEST_MODEL: record.model,
        **record.settings,
        genai.RESPONSE_ID: record.response_id,
        genai.RESPONSE_MODEL: record.model,
        genai.RESPONSE_FINISH_REASONS: tuple(record.finish_reasons) or None,
        genai.USAGE_INPUT_TOKENS: record.prompt_tokens or None,
        genai.USAGE_OUTPUT_TOKENS: record.output_tokens if record.prompt_tokens else None,
        genai.LATENCY_E2E: record.ended_s - record.began_s,
        genai.LATENCY_TIME_TO_FIRST_TOKEN: (
            record.first_token_s - record.began_s if record.first_token_s is not None else None
        ),
        genai.REQUEST_ID: record.client_request_id,
        genai.OWNER: record.principal.owner or None,
        genai.ERROR_TYPE: record.code,
        **_protocol_attributes(record),
    }
    phases = record.phases
    if record.choices:
        values[genai.LATENCY_TIME_IN_QUEUE] = phases.queue_s
    if phases.reported:
        values[genai.LATENCY_TIME_IN_MODEL_PREFILL] = phases.prefill_s
        values[genai.LATENCY_TIME_IN_MODEL_DECODE] = phases.decode_s
    return {name: value for name, value in values.items() if value is not None}


def _protocol_attributes(record: RequestRecord) -> dict[str, Value | None]:
    """HTTP or gRPC attributes of the request."""
    if record.grpc_code is None:
        return {genai.HTTP_ROUTE: record.endpoint, genai.HTTP_STATUS: record.status}
    return {
        genai.RPC_SYSTEM: "grpc",
        genai.RPC_METHOD: record.endpoint.removeprefix("/"),
        genai.RPC_STATUS: record.grpc_code,
    }


def _choice_spans(choice: ChoiceRecord, end_s: float) -> Iterable[Span]:
    for queued_s, assigned_s in choice.queued_s:
        yield Span("queue", queued_s, assigned_s)
    for segment in choice.segments:
        yield from _segment_spans(segment, end_s)


def _segment_spans(segment: WorkerSegment, end_s: float) -> Iterable[Span]:
    """Spans of the part at one worker, from the worker's times, else as the gateway saw it."""
    reported = segment.times is not None
    attributes: dict[str, Value] = {
        genai.WORKER: segment.worker_id,
        genai.GROUP: segment.group_id,
        genai.EPOCH: segment.epoch,
        genai.TIMES_FROM: "worker" if reported else "gateway",
    }
    at_s = segment.began_s
    for name, length_s in _phase_lengths(segment, end_s):
        yield Span(name, at_s, at_s + length_s, attributes)
        at_s += length_s


def _phase_lengths(segment: WorkerSegment, end_s: float) -> Iterable[tuple[str, float]]:
    ended_s = segment.ended_s if segment.ended_s is not None else end_s
    if (times := segment.times) is not None:
        yield "wait", times.wait_s
        if times.prefill_s > 0 or times.decode_s == 0:
            yield "prefill", times.prefill_s
        if times.decode_s > 0 or segment.first_token_s is not None:
            yield "decode", times.decode_s
    elif segment.first_token_s is not None:
        yield "prefill", segment.first_token_s - segment.began_s
        yield "decode", ended_s - segment.first_token_s
    else:
        yield "wait", ended_s - segment.began_s


def _events(choice: ChoiceRecord) -> Iterable[Event]:
    for move in choice.moves:
        yield Event(
            "moved",
            move.at_s,
            {
                genai.FROM_WORKER: move.from_worker,
                genai.TO_WORKER: move.to.worker_id,
                genai.GROUP: move.to.group_id,
                genai.EPOCH: move.to.epoch,
            },
        )
    for segment in choice.segments:
        for after_s in segment.times.preempted_s if segment.times is not None else ():
            yield Event("preempted", segment.began_s + after_s, {genai.WORKER: segment.worker_id})
