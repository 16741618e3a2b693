"""A collector that receives traces over real gRPC and stores their spans."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free port from `__enter__` to `__exit__`."""

    def __init__(self) -> None:
        self.all_spans: list[trace_pb2.Span] = []
        self.resource: dict[str, str] = {}
        self._server = grpc.server(ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def Export(self, request: Any, context: object) -> Any:
        """See trace_service.proto."""
        for resource_spans in request.resource_spans:
            attributes = resource_spans.resource.attributes
            self.resource |= {
                attribute.key: attribute.value.string_value for attribute in attributes
            }
            for scope in resource_spans.scope_spans:
                self.all_spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, *names: str) -> list[trace_pb2.Span]:
        """The spans of these names, each of which must exist exactly once."""
        by_name = [[span for span in self.all_spans if span.name == name] for name in names]
        assert all(len(spans) == 1 for spans in by_name), [span.name for span in self.all_spans]
        return [spans[0] for spans in by_name]

    def trace(self, trace_id: str) -> dict[str, list[trace_pb2.Span]]:
        """The spans of a trace by name."""
        by_name: dict[str, list[trace_pb2.Span]] = {}
        for span in self.all_spans:
            if span.trace_id.hex() == trace_id:
                by_name.setdefault(span.name, []).append(span)
        return by_name


def attributes_of(
    node: trace_pb2.Span | trace_pb2.Span.Event | trace_pb2.Span.Link,
) -> dict[str, Any]:
    """Attributes as plain values."""
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value"))
        for attribute in node.attributes
    }
