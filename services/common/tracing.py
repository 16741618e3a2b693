"""Traces: their ids, what a finished one consists of, and whether it is told.

Spans are made when the work is over and all of its times are known: nothing that serves waits for
them, and what is not sampled costs two random numbers. Without an endpoint there is no tracer, and
OpenTelemetry's SDK is never imported.
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
    """Allows so many events in each second of the clock that `take` is told."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._began_s = float("-inf")
        self._taken = 0

    def take(self, now_s: float) -> bool:
        """Whether one more may happen now; it then counts."""
        if now_s - self._began_s >= 1.0:
            self._began_s, self._taken = now_s, 0
        if self._taken >= self._per_second:
            return False
        self._taken += 1
        return True


ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
ERRORS_PER_S = 10
"""Failed requests that are told in a second although they were not sampled."""
CALLERS_PER_S = 100
"""Traces in a second that are told because the caller wants it."""

Value = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Value]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Ids of a trace and of its span that is the parent of others; hexadecimal digits.

    `parent_id` is the caller's span, "" if the trace begins here.
    """

    trace_id: str
    span_id: str
    sampled: bool
    parent_id: str = ""

    @property
    def traceparent(self) -> str:
        """As W3C's header has it."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at one moment."""

    name: str
    at_s: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanLink:
    """Another trace that has to do with this one."""

    context: TraceContext
    attributes: Attributes = field(default_factory=dict)


@dataclass(slots=True)
class Span:
    """A piece of work from `start_s` to `end_s` on this process's monotonic clock.

    `error` is why it failed, "" if it did not. `server`: it answers somebody outside.
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
    """Where finished traces go; see `span_export`."""

    def export(self, context: TraceContext, root: Span) -> None:
        """Take a trace without waiting; drops it when too many wait already."""

    def close(self) -> None:
        """Send what waits, for a few seconds at most; blocks."""


class Tracer:
    """Decides at the beginning of a trace whether it is told, and tells it at the end."""

    def __init__(self, sample_ratio: float, sink: Sink) -> None:
        self._ratio = sample_ratio
        self._sink = sink
        self._errors = RateLimit(ERRORS_PER_S)
        self._callers = RateLimit(CALLERS_PER_S)

    def begin(self, caller: TraceContext | None = None, always: bool = False) -> TraceContext:
        """Ids of a new piece of work; `always` decides for this, a caller for its whole trace.

        Of the callers that ask for traces of theirs, only some are followed each second.
        """
        span_id = _random_hex(64)
        if caller is not None:
            sampled = caller.sampled and self._callers.take(monotonic_s())
            return TraceContext(caller.trace_id, span_id, sampled, caller.span_id)
        sampled = always or random.random() < self._ratio
        return TraceContext(_random_hex(128), span_id, sampled)

    def wants(self, context: TraceContext, failed: bool) -> bool:
        """Whether the trace is to be told, now that it is known how it ended; asked once.

        Failures are told though not sampled, also by the caller; some in every second.
        """
        if context.sampled or not failed:
            return context.sampled
        return self._errors.take(monotonic_s())

    def end(self, context: TraceContext, root: Span) -> None:
        """Tell a trace that is wanted; `root` gets the span id of `context`."""
        self._sink.export(context, root)


def parse_traceparent(header: str) -> TraceContext | None:
    """The caller's span in a W3C traceparent header; None for one that is not valid."""
    found = _TRACEPARENT.fullmatch(header.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def endpoint_of(config: ServiceConfig, environment: Mapping[str, str]) -> str | None:
    """Where traces go: the configured endpoint, else that of OpenTelemetry's own variables."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    named = [environment.get(name) for name in ENDPOINT_VARIABLES]
    return next((one for one in (config.otlp_endpoint, *named) if one), None)


@asynccontextmanager
async def tracing(
    config: ServiceConfig, service: str, instance: str
) -> AsyncIterator[Tracer | None]:
    """A tracer meanwhile, None while traces are off; what waits is sent at the end.

    Raises:
        ConfigError: if the endpoint is no URL.
    """
    endpoint = endpoint_of(config, os.environ)
    if endpoint is None:
        yield None
        return
    from services.common.span_export import OtlpSink

    sink = OtlpSink(endpoint, service, instance)
    try:
        yield Tracer(config.trace_sample_ratio, sink)
    finally:
        await asyncio.to_thread(sink.close)


def _random_hex(bits: int) -> str:
    """Digits of a random number other than 0."""
    return f"{random.getrandbits(bits) or 1:0{bits // 4}x}"
