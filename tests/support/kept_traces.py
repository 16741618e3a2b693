"""A trace sink that stores traces instead of exporting them."""

from services.common.tracing import Span, TraceContext


class KeptTraces:
    def __init__(self) -> None:
        self.traces: list[tuple[TraceContext, Span]] = []

    def export(self, context: TraceContext, root: Span) -> None:
        self.traces.append((context, root))

    def close(self) -> None: ...
