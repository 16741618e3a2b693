"""A sink that keeps the traces that would have been sent."""

from services.common.tracing import Span, TraceContext


class KeptTraces:
    def __init__(self) -> None:
        self.traces: list[tuple[TraceContext, Span]] = []

    def export(self, context: TraceContext, root: Span) -> None:
        self.traces.append((context, root))

    def close(self) -> None: ...
