"""Exports finished traces to an OTLP collector. Imported only if tracing is enabled.

A thread of OpenTelemetry's SDK sends them; a full queue discards the oldest spans, so serving never
waits.
"""

import logging
from collections.abc import Sequence
from urllib.parse import urlparse

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from services.common.clock import monotonic_s, unix_ns
from services.common.errors import ConfigError
from services.common.tracing import Span, TraceContext

QUEUE_SPANS = 4096
BATCH_SPANS = 512
SEND_EVERY_MS = 1000
# Timeout of an export, including the last export at the end.
EXPORT_TIMEOUT_S = 3

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_NS = 10**9

log = logging.getLogger(__name__)


class OtlpSink:
    """Exports to a collector over gRPC; see `tracing.Sink`."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        """`instance` distinguishes processes of the same service. Raises ConfigError."""
        parsed = urlparse(endpoint)
        if parsed.scheme not in ("http", "https") or not parsed.netloc:
            raise ConfigError(
                f"'{endpoint}' is not an OTLP endpoint; give a URL such as http://collector:4317"
            )
        # OpenTelemetry would log every failed attempt; `_OneWarning` logs once per outage instead.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        resource = Resource.create(
            {
                "service.namespace": "tideserve",
                "service.name": f"tideserve-{service}",
                "service.instance.id": instance,
            }
        )
        self._ids = _PresetIds()
        # The Tracer has sampled already: export every span that arrives here.
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        sender = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._exporter = _OneWarning(sender, endpoint)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=QUEUE_SPANS,
                max_export_batch_size=BATCH_SPANS,
                schedule_delay_millis=SEND_EVERY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("tideserve")

    def export(self, context: TraceContext, root: Span) -> None:
        # Spans have monotonic times; OTLP needs wall-clock times.
        epoch_ns = unix_ns() - round(monotonic_s() * _NS)
        self._ids.trace_id, self._ids.span_id = int(context.trace_id, 16), int(context.span_id, 16)
        parent = Context()
        if context.parent_id:
            parent = _context_of(_remote(context.trace_id, context.parent_id))
        self._write(root, parent, epoch_ns)

    def close(self) -> None:
        self._exporter.closing = True
        self._provider.shutdown()

    def _write(self, span: Span, parent: Context, epoch_ns: int) -> None:
        otel_span = self._tracer.start_span(
            span.name,
            context=parent,
            kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
            attributes=dict(span.attributes),
            links=[
                Link(_remote(link.context.trace_id, link.context.span_id), dict(link.attributes))
                for link in span.links
            ],
            start_time=epoch_ns + round(span.start_s * _NS),
        )
        for event in span.events:
            otel_span.add_event(
                event.name, dict(event.attributes), epoch_ns + round(event.at_s * _NS)
            )
        if span.error:
            otel_span.set_status(Status(StatusCode.ERROR, span.error))
        child_context = _context_of(otel_span.get_span_context())
        for child in span.children:
            self._write(child, child_context, epoch_ns)
        otel_span.end(epoch_ns + round(span.end_s * _NS))


class _PresetIds(IdGenerator):
    """Random ids, except for a trace and its root span, whose ids the Tracer has chosen."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.trace_id = 0
        self.span_id = 0

    def generate_trace_id(self) -> int:
        """The id of the current trace."""
        return self.trace_id

    def generate_span_id(self) -> int:
        """The preset id for the root span, random ids for its children."""
        preset, self.span_id = self.span_id, 0
        return preset or self._random.generate_span_id()


class _OneWarning(SpanExporter):
    """Sends spans; logs once when the collector becomes unreachable, and once when it is back."""

    def __init__(self, sender: SpanExporter, endpoint: str) -> None:
        self._sender = sender
        self._endpoint = endpoint
        self._lost = 0
        self.closing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; while closing, give up after the first failure."""
        if self.closing and self._lost:
            return SpanExportResult.FAILURE
        result = self._sender.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                log.info("traces reach %s again; %d spans were lost", self._endpoint, self._lost)
            self._lost = 0
            return result
        if not self._lost:
            log.warning(
                "cannot export traces to %s, dropping them; start a collector there, or unset"
                " 'otlp_endpoint'",
                self._endpoint,
            )
        self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Close the exporter."""
        self._sender.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """No effect: there is no buffer here."""
        return True


def _remote(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=_SAMPLED)


def _context_of(parent: SpanContext) -> Context:
    return set_span_in_context(NonRecordingSpan(parent), Context())
