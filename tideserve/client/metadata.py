"""What a call carries beside its request."""

from collections.abc import Callable

Metadata = tuple[tuple[str, str], ...]


def metadata_of(api_key: str | None, request_id: str) -> Metadata:
    """Key, request id if there is one, and the trace that the caller is in if it traces."""
    pairs = []
    if api_key is not None:
        pairs.append(("authorization", f"Bearer {api_key}"))
    if request_id:
        pairs.append(("x-request-id", request_id))
    if traceparent := _traceparent():
        pairs.append(("traceparent", traceparent))
    return tuple(pairs)


def _no_trace() -> str:
    return ""


def _trace_reader() -> Callable[[], str]:
    """What tells the W3C traceparent of the moment; "" where OpenTelemetry is not installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        return _no_trace

    def read() -> str:
        span = trace.get_current_span().get_span_context()
        if not span.is_valid:
            return ""
        return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"

    return read


_traceparent = _trace_reader()
