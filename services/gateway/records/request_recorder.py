"""Creates the record of each request, and writes its log line, metrics and trace at the end."""

from services.common.clock import monotonic_s
from services.common.tracing import Tracer, parse_traceparent
from services.gateway.keys.quotas import Quotas
from services.gateway.records.metrics import Metrics
from services.gateway.records.request_log import RequestLog
from services.gateway.records.request_record import RequestRecord, new_record
from services.gateway.records.request_trace import export_trace


class RequestRecorder:
    """Opens and closes request records. All APIs share it and its rate limits for log lines."""

    def __init__(
        self,
        metrics: Metrics,
        tracer: Tracer | None,
        gateway: str = "",
        quotas: Quotas | None = None,
    ) -> None:
        """`gateway`: this gateway's incarnation, whose first digits are part of response ids."""
        self._metrics = metrics
        self._tracer = tracer
        self._gateway = gateway
        self._quotas = quotas
        self._log = RequestLog()

    def open(self, path: str, given_id: bytes | None) -> RequestRecord:
        """Create the record of a request to `path`; `given_id` is the client's id, if any."""
        record = new_record(path, given_id, monotonic_s(), self._gateway)
        record.quotas = self._quotas
        return record

    def trace(self, record: RequestRecord, traceparent: bytes | None, admitted: bool) -> None:
        """Begin the trace of a request; `admitted` False: only note the id of the caller's trace.

        A request is not `admitted` if it was refused before its body was read.
        """
        caller = parse_traceparent(traceparent.decode("latin-1")) if traceparent else None
        if self._tracer is not None and admitted:
            record.context = self._tracer.begin(caller)
        known = record.context or caller
        if known is not None:
            record.trace_id = known.trace_id

    def close(self, record: RequestRecord, endpoint: str) -> None:
        """Log, count and trace a finished request.

        `endpoint` must come from a fixed set, because it is a metric label.
        """
        record.endpoint, record.ended_s = endpoint, monotonic_s()
        self._metrics.count_request(endpoint, record.status, record.ended_s - record.began_s)
        self._log.write(record)
        if self._tracer is not None:
            export_trace(self._tracer, record)
