"""Trace ids and sampling."""

import asyncio
import logging
import re
import socket
from collections.abc import Mapping

import pytest

from services.common.errors import ConfigError
from services.common.service_config import ServiceConfig
from services.common.span_export import QUEUE_SPANS, OtlpSink
from services.common.tracing import (
    CALLERS_PER_S,
    ERRORS_PER_S,
    Span,
    TraceContext,
    Tracer,
    endpoint_of,
    parse_traceparent,
    tracing,
)
from tests.support.kept_traces import KeptTraces
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.python import run_python
from tests.support.waiting import eventually
from tideserve.cli.local_cluster import python_environment

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONFIG = ServiceConfig(etcd_url="http://none:1")


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f" 00-{TRACE}-{SPAN}-03 ", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
    ],
)
def test_valid_traceparents_are_parsed(header: str, sampled: bool) -> None:
    assert parse_traceparent(header) == TraceContext(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\n00-{TRACE}-{SPAN}-01",
    ],
)
def test_an_invalid_traceparent_is_ignored(header: str) -> None:
    assert parse_traceparent(header) is None


def test_sampling_follows_the_caller_or_the_ratio() -> None:
    always, never = Tracer(1.0, KeptTraces()), Tracer(0.0, KeptTraces())
    for flag in (True, False):
        begun = (never if flag else always).begin(TraceContext(TRACE, SPAN, flag))
        assert (begun.trace_id, begun.parent_id, begun.sampled) == (TRACE, SPAN, flag)
        assert begun.span_id != SPAN
    assert always.begin().sampled and never.begin(always=True).sampled
    begun = [Tracer(0.25, KeptTraces()).begin() for _ in range(2000)]
    assert 350 < sum(trace.sampled for trace in begun) < 650
    assert len({trace.trace_id for trace in begun}) == 2000
    assert all(parse_traceparent(trace.traceparent) is not None for trace in begun)


def test_unsampled_failures_are_exported_at_a_limited_rate() -> None:
    tracer = Tracer(0.0, KeptTraces())
    wanted = [tracer.wants(tracer.begin(), failed=True) for _ in range(10 * ERRORS_PER_S)]
    # All within a second, or within two where the machine is slow.
    assert ERRORS_PER_S <= sum(wanted) <= 3 * ERRORS_PER_S
    assert not tracer.wants(tracer.begin(), failed=False)
    caller = TraceContext(TRACE, SPAN, sampled=False)
    other = Tracer(0.0, KeptTraces())
    assert other.wants(other.begin(caller), failed=True), "no client hides a failure"
    assert not other.wants(other.begin(caller), failed=False)


def test_traces_sampled_by_callers_are_rate_limited() -> None:
    tracer, caller = Tracer(0.0, KeptTraces()), TraceContext(TRACE, SPAN, sampled=True)
    begun = [tracer.begin(caller) for _ in range(10 * CALLERS_PER_S)]
    # All within a second, or within two where the machine is slow.
    assert CALLERS_PER_S <= sum(trace.sampled for trace in begun) <= 3 * CALLERS_PER_S
    assert {trace.trace_id for trace in begun} == {TRACE}


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}, "http://a:1"),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:1",
            },
            "http://b:1",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_the_endpoint_is_read_from_opentelemetry_variables(
    environment: Mapping[str, str], endpoint: str | None
) -> None:
    assert endpoint_of(CONFIG, environment) == endpoint


def test_an_invalid_endpoint_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="'collector:4317' is not an OTLP endpoint; give a URL"):
        OtlpSink("collector:4317", "gateway", "i")


async def test_tracing_is_off_without_an_endpoint() -> None:
    async with tracing(CONFIG, "gateway", "i") as tracer:
        assert tracer is None


PROGRAM = """
import sys, threading
from services.{name} import app
from services.common.tracing import tracing
import asyncio
from services.common.service_config import ServiceConfig

async def run():
    async with tracing(ServiceConfig(etcd_url="http://none:1"), "{name}", "i"):
        pass

asyncio.run(run())
unwanted = ("opentelemetry.sdk", "opentelemetry.exporter")
found = [name for name in sys.modules if name.startswith(unwanted)]
print(found, threading.active_count())
"""


@pytest.mark.parametrize("name", ["gateway", "memmgr"])
def test_with_tracing_off_the_sdk_is_not_imported(name: str) -> None:
    environment = {k: v for k, v in python_environment().items() if not k.startswith("OTEL_")}
    done = run_python("-c", PROGRAM.format(name=name), env=environment)
    assert (done.stdout, done.returncode) == ("[] 1\n", 0), done.stderr


async def test_a_trace_arrives_with_its_ids_times_and_tree() -> None:
    caller = TraceContext(TRACE, SPAN, sampled=True)
    with OtlpReceiver() as receiver:
        sink = OtlpSink(receiver.endpoint, "gateway", "i-1")
        context = Tracer(0.0, sink).begin(caller)
        child = Span("queue", 10.5, 11.0, {"n": 1})
        sink.export(context, Span("chat m", 10.0, 12.0, {"a": "b"}, [child], error="it broke"))
        sink.close()
        root, queue = receiver.spans("chat m", "queue")
    assert (root.trace_id.hex(), root.span_id.hex()) == (TRACE, context.span_id)
    assert (root.parent_span_id.hex(), queue.parent_span_id.hex()) == (SPAN, context.span_id)
    assert root.end_time_unix_nano - root.start_time_unix_nano == 2_000_000_000
    assert queue.start_time_unix_nano - root.start_time_unix_nano == 500_000_000
    assert root.status.message == "it broke"
    names = {"service.name": "tideserve-gateway", "service.instance.id": "i-1"}
    assert names.items() <= receiver.resource.items()


async def test_an_unreachable_collector_is_a_single_warning_without_a_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with OtlpReceiver() as receiver:
        endpoint = receiver.endpoint
    with caplog.at_level(logging.INFO):
        sink = OtlpSink(endpoint, "gateway", "i")
        tracer = Tracer(1.0, sink)
        for _ in range(3):
            for _ in range(6000):
                sink.export(tracer.begin(), Span("chat m", 0.0, 1.0))
        await eventually(lambda: bool(caplog.records))
        sink.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert re.match(r"cannot export traces to http://127.0.0.1:\d+, dropping them; ", warnings[0])


async def test_a_silent_collector_does_not_delay_shutdown() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        sink = OtlpSink(f"http://127.0.0.1:{silent.getsockname()[1]}", "gateway", "i")
        tracer = Tracer(1.0, sink)
        for _ in range(2 * QUEUE_SPANS):
            sink.export(tracer.begin(), Span("chat m", 0.0, 1.0))
        # The exporter's own patience is 30 s for each of many batches.
        async with asyncio.timeout(20):
            await asyncio.to_thread(sink.close)
