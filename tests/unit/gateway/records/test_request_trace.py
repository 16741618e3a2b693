"""Spans and attributes of a request's trace."""

import pytest

from services.common import genai
from services.common.tracing import Span, SpanLink, TraceContext, Tracer
from services.gateway.records.request_record import (
    RequestMove,
    RequestRecord,
    WorkerSegment,
    new_record,
)
from services.gateway.records.request_trace import export_trace, request_span
from services.gateway.vocabulary.errors import BadRequest, EngineFailed
from services.gateway.vocabulary.message import Moved, WorkerTimes
from tests.support.kept_traces import KeptTraces

CHANGE = TraceContext("c" * 32, "d" * 16, sampled=True)


def chat() -> RequestRecord:
    """Placed after a stale assignment, run on w0, moved to w1 in the middle of its output."""
    record = new_record("/v1/chat/completions", b"mine", 10.0)
    record.endpoint, record.status, record.model = record.path, 200, "m"
    record.settings = {genai.REQUEST_MAX_TOKENS: 9}
    record.parsed_s, record.tokenised_s = 10.01, 10.02
    record.prompt_tokens, record.output_tokens = 5, 7
    record.first_token_s, record.ended_s = 10.9, 13.0
    record.finish_reasons.append("length")
    choice = record.add_choice()
    choice.queued_s.append((10.02, 10.5))
    first = WorkerSegment("w0", "g0", 1, 10.5, 11.5, 10.9, WorkerTimes(0.1, 0.3, 0.6, (0.7,)))
    second = WorkerSegment("w1", "g1", 2, 11.5, 13.0, None, WorkerTimes(0.5, 0.0, 1.0))
    choice.segments += [first, second]
    link = SpanLink(CHANGE, {genai.GROUP: "g1", genai.EPOCH: 2})
    choice.moves.append(RequestMove(11.5, "w0", Moved("w1", "w1:1", "g1", 2), link))
    return record


def times(span: Span) -> list[tuple[str, float, float]]:
    return [(child.name, round(child.start_s, 6), round(child.end_s, 6)) for child in span.children]


def test_spans_are_consecutive_and_use_worker_times() -> None:
    root = request_span(chat())
    assert (root.name, root.start_s, root.end_s, root.server) == ("chat m", 10.0, 13.0, True)
    assert times(root) == [
        ("parse", 10.0, 10.01),
        ("tokenise", 10.01, 10.02),
        ("queue", 10.02, 10.5),
        ("wait", 10.5, 10.6),
        ("prefill", 10.6, 10.9),
        ("decode", 10.9, 11.5),
        ("wait", 11.5, 12.0),
        ("decode", 12.0, 13.0),
    ]
    assert [span.attributes.get(genai.WORKER) for span in root.children[3:]] == [
        *["w0"] * 3,
        *["w1"] * 2,
    ]
    assert root.error == ""


def test_attributes_follow_semantic_conventions() -> None:
    attributes = request_span(chat()).attributes
    latencies = {
        name: round(float(str(attributes[name])), 6) for name in attributes if "late" in name
    }
    assert latencies == {
        "gen_ai.latency.e2e": 3.0,
        "gen_ai.latency.time_to_first_token": 0.9,
        "gen_ai.latency.time_in_queue": 0.48 + 0.6,
        "gen_ai.latency.time_in_model_prefill": 0.3,
        "gen_ai.latency.time_in_model_decode": 1.6,
    }
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tideserve",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 7,
        "tideserve.request.id": "mine",
        "http.response.status_code": 200,
    }
    assert expected.items() <= attributes.items()


def test_events_and_link_record_preemption_and_move() -> None:
    root = request_span(chat())
    moved, preempted = root.events
    assert (moved.name, moved.at_s) == ("moved", 11.5)
    assert moved.attributes == {
        "tideserve.from_worker": "w0",
        "tideserve.to_worker": "w1",
        "tideserve.group": "g1",
        "tideserve.epoch": 2,
    }
    assert (preempted.name, round(preempted.at_s, 6)) == ("preempted", 11.2)
    assert [link.context for link in root.links] == [CHANGE]


def test_gateway_times_replace_missing_worker_times() -> None:
    record = chat()
    for segment in record.choices[0].segments:
        segment.times = None
    root = request_span(record)
    assert times(root)[3:] == [
        ("prefill", 10.5, 10.9),
        ("decode", 10.9, 11.5),
        ("wait", 11.5, 13.0),
    ]
    assert {span.attributes[genai.TIMES_FROM] for span in root.children[3:]} == {"gateway"}


def test_a_single_token_has_all_spans() -> None:
    record = chat()
    choice = record.choices[0]
    choice.segments = [WorkerSegment("w0", "g0", 1, 10.5, 10.9, 10.9, WorkerTimes(0.1, 0.3, 0.0))]
    assert [name for name, _, _ in times(request_span(record))][2:] == [
        "queue",
        "wait",
        "prefill",
        "decode",
    ]


@pytest.mark.parametrize(
    ("path", "failure", "exported"),
    [
        ("/v1/chat/completions", None, False),
        ("/v1/chat/completions", BadRequest("no"), False),
        ("/v1/chat/completions", EngineFailed("broke"), True),
        ("/metrics", EngineFailed("broke"), False),
    ],
)
def test_unsampled_failures_are_exported(
    path: str, failure: EngineFailed | None, exported: bool
) -> None:
    sink = KeptTraces()
    tracer = Tracer(0.0, sink)
    record = new_record(path, None, 1.0)
    record.context, record.status = tracer.begin(), 200
    if failure is not None:
        record.fail(failure)
    export_trace(tracer, record)
    assert bool(sink.traces) == exported


def test_a_failure_before_parsing_is_a_span_and_an_error() -> None:
    record = new_record("/v1/completions", None, 1.0)
    record.ended_s = 2.0
    record.fail(EngineFailed("it broke at what its client said; try again"))
    root = request_span(record)
    assert (root.name, root.error, times(root)) == (
        "text_completion",
        "engine_failed",
        [("parse", 1.0, 2.0)],
    )
