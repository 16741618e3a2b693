"""Traces of requests and group changes: ids, spans, and sampling.

Spans are created after the work, when all times are known, so serving never waits for them and an
unsampled request costs two random numbers. Without an endpoint there is no tracer, and
OpenTelemetry's SDK is not imported.
"""

import asyncio
import os
import random
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from services.common.clock import monotonic_s
from services.common.service_config import ServiceConfig


class RateLimit:
    """Allows `per_second` events in each second of the caller's clock."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._began_s = float("-inf")
        self._taken = 0

    def take(self, now_s: float) -> bool:
        """Count an event and return True, or return False if the limit is reached."""
        if now_s - self._began_s >= 1.0:
            self._began_s, self._taken = now_s, 0
        if self._taken >= self._per_second:
            return False
        self._taken += 1
        return True


ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
ERRORS_PER_S = 10
"""Maximum number of unsampled failed requests exported per second."""
CALLERS_PER_S = 100
"""Maximum number of traces per second that are exported because the caller samples them."""

Value = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Value]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Ids of a trace and of its root span in this process, as hexadecimal digits.

    `parent_id` is the caller's span; "" if the trace starts in this process.
    """

    trace_id: str
    span_id: str
    sampled: bool
    parent_id: str = ""

    @property
    def traceparent(self) -> str:
        """The ids as the value of a W3C traceparent header."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"


@dataclass(frozen=True, slots=True)
class Event:
    """A timestamped event within a span."""

    name: str
    at_s: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanLink:
    """A link to a span of a related trace."""

    context: TraceContext
    attributes: Attributes = field(default_factory=dict)


@dataclass(slots=True)
class Span:
    """Work from `start_s` to `end_s` on this process's monotonic clock.

    `error`: why the work failed, "" on success. `server`: it serves a request of another process.
    """

    name: str
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    children: list["Span"] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    links: list[SpanLink] = field(default_factory=list)
    error: str = ""
    server: bool = False


class Sink(Protocol):
    """Receives finished traces; see `span_export`."""

    def export(self, context: TraceContext, root: Span) -> None:
        """Enqueue a trace without blocking; a full queue discards spans."""

    def close(self) -> None:
        """Flush the queue, blocking for a few seconds at most."""


class Tracer:
    """Samples traces at their start, or at their end if they failed, and exports them."""

    def __init__(self, sample_ratio: float, sink: Sink) -> None:
        self._ratio = sample_ratio
        self._sink = sink
        self._errors = RateLimit(ERRORS_PER_S)
        self._callers = RateLimit(CALLERS_PER_S)

    def begin(self, caller: TraceContext | None = None, always: bool = False) -> TraceContext:
        """Create the ids of new work, and decide whether it is sampled.

        A caller's decision takes precedence over `always` and the configured ratio; callers that
        sample are rate-limited to `CALLERS_PER_S`.
        """
        span_id = _random_hex(64)
        if caller is not None:
            # A caller that samples everything must not flood the collector.
            sampled = caller.sampled and self._callers.take(monotonic_s())
            return TraceContext(caller.trace_id, span_id, sampled, caller.span_id)
        sampled = always or random.random() < self._ratio
        return TraceContext(_random_hex(128), span_id, sampled)

    def wants(self, context: TraceContext, failed: bool) -> bool:
        """Whether to export a trace that has ended; call once per trace.

        Failed requests are exported even if unsampled, rate-limited to `ERRORS_PER_S`.
        """
        if context.sampled or not failed:
            return context.sampled
        return self._errors.take(monotonic_s())

    def end(self, context: TraceContext, root: Span) -> None:
        """Export a trace for which `wants` returned True; `root` gets the span id of `context`."""
        self._sink.export(context, root)


def parse_traceparent(header: str) -> TraceContext | None:
    """The caller's span in a W3C traceparent header; None if the header is invalid."""
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    # Version 00 has exactly four fields; later versions may add fields (W3C Trace Context).
    if version == "ff" or (version == "00" and more):
        return None
    # Ids of zeros are invalid.
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def endpoint_of(config: ServiceConfig, environment: Mapping[str, str]) -> str | None:
    """The configured trace endpoint, else that of OpenTelemetry's environment variables."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    named = [environment.get(name) for name in ENDPOINT_VARIABLES]
    return next((url for url in (config.otlp_endpoint, *named) if url), None)


@asynccontextmanager
async def tracing(
    config: ServiceConfig, service: str, instance: str
) -> AsyncIterator[Tracer | None]:
    """A tracer for the body, None if tracing is off; queued traces are sent at the end.

    Raises:
        ConfigError: if the endpoint is not a URL.
    """
    endpoint = endpoint_of(config, os.environ)
    if endpoint is None:
        yield None
        return
    # Imported only here: the SDK takes noticeable time and memory to load.
    from services.common.span_export import OtlpSink

    sink = OtlpSink(endpoint, service, instance)
    try:
        yield Tracer(config.trace_sample_ratio, sink)
    finally:
        await asyncio.to_thread(sink.close)


def _random_hex(bits: int) -> str:
    """A random number other than 0 in hexadecimal."""
    return f"{random.getrandbits(bits) or 1:0{bits // 4}x}"
