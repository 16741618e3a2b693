"""Prometheus metrics of a gateway: requests as its clients see them, and the gateway's state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.common import vllm_names
from services.core.service import ServiceClass
from services.gateway.bounds.concurrency_limit import ConcurrencyLimit
from services.gateway.keys.quotas import QuotaMetrics
from services.gateway.records.class_metrics import MetricFamilies, MetricsByClass
from services.gateway.vocabulary.errors import (
    Expired,
    GatewayError,
    QueueFull,
    ServiceUnavailable,
    ShuttingDown,
    TooLate,
)

_DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
FINISHED_REASONS = ("stop", "length", "abort", "error")
# Errors of requests that were refused for lack of capacity and may be retried.
REFUSALS: tuple[type[GatewayError], ...] = (
    QueueFull,
    TooLate,
    ServiceUnavailable,
    Expired,
    ShuttingDown,
)
# Value of the labels `class` and `model_name` for requests that are refused before their body is
# read.
UNREAD = "unknown"
# Upper bound of the last bucket of token counts.
TOKENS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class EndpointTotals:
    """Numbers of output tokens and first tokens, and the sum of TTFT in seconds."""

    output_tokens: int
    first_tokens: int
    first_tokens_s: float

    def __add__(self, other: "EndpointTotals") -> "EndpointTotals":
        return EndpointTotals(
            self.output_tokens + other.output_tokens,
            self.first_tokens + other.first_tokens,
            self.first_tokens_s + other.first_tokens_s,
        )


class Metrics:
    """Metrics of a gateway.

    Metrics that vLLM also has use vLLM's names and count each choice as a request.
    """

    def __init__(self, model_names: Sequence[str], registry: CollectorRegistry) -> None:
        """Add all metrics to `registry`, with those of each model."""
        self.registry = registry
        families = MetricFamilies(registry)
        self._of = {name: RequestHistograms(name, families) for name in model_names}
        # With a single model, requests whose body was not read are its requests, too.
        self._unread_model = model_names[0] if len(self._of) == 1 else UNREAD
        counter = partial(Counter, registry=registry)
        self._http_requests = counter(
            "tideserve_gateway_requests",
            "Requests answered over HTTP and gRPC; 499: the client disconnected or cancelled.",
            ["endpoint", "status"],
        )
        self._duration = Histogram(
            "tideserve_gateway_request_duration_seconds",
            "Time from the request's arrival to the end of its response.",
            ["endpoint"],
            buckets=_DURATION_BUCKETS,
            registry=registry,
        )
        self._add_tokens_and_rejections(counter)
        self._stream_errors = counter(
            "tideserve_gateway_stream_errors",
            "Streams that failed after they had begun; client_gone: the client disconnected.",
            ["code"],
        )
        self._moved_streams = counter(
            "tideserve_gateway_moved_streams",
            "Moves of a running stream to another worker.",
        )
        self._resumed_streams = counter(
            "tideserve_gateway_resumed_streams",
            "Resumptions of a request on another worker after its worker was lost or shut down"
            " mid-stream.",
        )
        self._replayed_requests = counter(
            "tideserve_gateway_replayed_requests",
            "Requests with a repeated Idempotency-Key that got the response of the first request.",
        )
        self.quotas = QuotaMetrics(registry)
        self._add_states(partial(Gauge, registry=registry))
        self._add_loads(partial(Gauge, registry=registry))
        self._add_connections(registry)

    def _add_tokens_and_rejections(self, counter: Callable[..., Counter]) -> None:
        """Add the counters of prompt tokens and refusals, with a series per model."""
        self._rejections = counter(
            "vllm:admission_rejections",
            "Requests refused for lack of capacity, by reason: queue_full, too_late, expired,"
            " unavailable, shutting_down. The class is unknown if the body was not read.",
            ["model_name", "reason", "class"],
        )
        for name in {*self._of, self._unread_model}:
            for refusal in REFUSALS:
                for service_class in (*ServiceClass, UNREAD):
                    self._rejections.labels(name, refusal.code, str(service_class))
        self._prompt_tokens = counter(
            "tideserve_gateway_prompt_tokens", "Accepted prompt tokens.", ["model_name"]
        )
        for name in self._of:
            self._prompt_tokens.labels(name)

    def _add_states(self, gauge: Callable[..., Gauge]) -> None:
        """Add gauges about the health of quotas, keys and the cluster."""
        self.quota_sharing = gauge(
            "tideserve_gateway_quota_sharing",
            "1 while gateways exchange their quota demand; 0: each gateway keeps its last share of"
            " each quota.",
        )
        self.keys_refused = gauge(
            "tideserve_gateway_keys_file_refused",
            "1 while the key file is invalid, so that the previous keys stay in use.",
        )
        self.keys_digest = gauge(
            "tideserve_gateway_keys_digest",
            "First 48 bits of the SHA-256 of the file's keys in use, as a number; differs between"
            " gateways that use different keys. 0: no key file.",
        )
        self.ready = gauge(
            "tideserve_gateway_ready",
            "1 while /ready succeeds: a request can be scheduled, and `expected_workers` have been"
            " seen or the wait for them is over.",
        )
        self._groups_serving = gauge(
            "tideserve_gateway_groups_serving",
            "Groups that serve the model, as counted by /ready.",
            ["model_name"],
        )
        self._model_ready = gauge(
            "tideserve_gateway_model_ready",
            "1 while /ready?model=NAME succeeds: a request for the model can be scheduled.",
            ["model_name"],
        )

    def _add_loads(self, gauge: Callable[..., Gauge]) -> None:
        """Add gauges of requests and bytes in flight."""
        self._calls = gauge(
            "tideserve_gateway_grpc_calls",
            "gRPC calls that are not running requests, by state: waiting for a message, streams of"
            " requests, parked because the client reads nothing.",
            ["state"],
        )
        self.inflight = gauge(
            "tideserve_gateway_requests_inflight", "Generation requests inside the gateway."
        )
        self.admitting = gauge(
            "tideserve_gateway_requests_admitting", "Requests waiting for the scheduler."
        )
        self.running = gauge("tideserve_gateway_requests_running", "Requests at a worker.")
        self.body_bytes = gauge(
            "tideserve_gateway_body_bytes",
            "Bytes of large request bodies being read, parsed or tokenized.",
        )
        self.answer_bytes = gauge(
            "tideserve_gateway_answer_bytes",
            "Bytes of responses kept for requests with an Idempotency-Key, running or finished.",
        )

    def _add_connections(self, registry: CollectorRegistry) -> None:
        """Add metrics of clients' connections."""
        self._connections = Gauge(
            "tideserve_gateway_connections",
            "Connections of clients, by port.",
            ["port"],
            registry=registry,
        )
        self._closed_connections = Counter(
            "tideserve_gateway_connections_closed",
            "Connections that the gateway closed, by port (http, grpc, admin) and reason."
            " handshake: TLS failed or took too long; invalid: not the protocol, or no preface of"
            " HTTP/2 in time; headers: a header block of gRPC is too large or too slow; idle: the"
            " longest idle connection made room for a new one; limit: no connection was idle.",
            ["port", "reason"],
            registry=registry,
        )

    def of(self, model_name: str) -> "RequestHistograms":
        """The metrics of a model."""
        return self._of[model_name]

    def export_readiness(
        self, model_name: str, ready: Callable[[], bool], groups: Callable[[], int]
    ) -> None:
        """Export whether a model is ready, and the number of groups that serve it."""
        self._model_ready.labels(model_name).set_function(ready)
        self._groups_serving.labels(model_name).set_function(groups)

    def export_calls(self, limits: Mapping[str, ConcurrencyLimit]) -> None:
        """Export the number of gRPC calls that each limit counts; keys are the call states."""
        for state, limit in limits.items():
            self._calls.labels(state).set_function(partial(getattr, limit, "total"))

    def export_connections(self, count: Callable[[str], int]) -> None:
        """Export the number of connections of each port, as `count` returns it."""
        for port in ("http", "grpc"):
            self._connections.labels(port).set_function(partial(count, port))

    def count_closed_connection(self, port: str, reason: str) -> None:
        """Count a connection that the gateway closed."""
        self._closed_connections.labels(port, reason).inc()

    def count_request(self, endpoint: str, status: int, duration_s: float) -> None:
        """Count a finished request; `status` is its HTTP status, or the equivalent for gRPC."""
        self._http_requests.labels(endpoint, str(status)).inc()
        self._duration.labels(endpoint).observe(duration_s)

    def count_refusal(
        self, error: GatewayError, service_class: ServiceClass | None, model_name: str | None
    ) -> None:
        """Count a request that was refused for lack of capacity before its response began.

        `service_class` and `model_name` are None if its body was not read.
        """
        if type(error) in REFUSALS:
            label = UNREAD if service_class is None else service_class.value
            self._rejections.labels(model_name or self._unread_model, error.code, label).inc()

    def count_prompt_tokens(self, model_name: str, tokens: int) -> None:
        """Count the prompt tokens of a request."""
        self._prompt_tokens.labels(model_name).inc(tokens)

    def count_failed_stream(self, code: str) -> None:
        """Count a stream that failed after it had begun."""
        self._stream_errors.labels(code).inc()

    def count_moved_stream(self) -> None:
        """Count a stream that moves to another worker."""
        self._moved_streams.inc()

    def count_resumed_request(self) -> None:
        """Count a request that resumes after its worker was lost or shut down."""
        self._resumed_streams.inc()

    def count_replay(self) -> None:
        """Count a request that received the cached response of an earlier request."""
        self._replayed_requests.inc()

    def totals(self) -> dict[str, EndpointTotals]:
        """Current totals by model, for computing rates."""
        return {
            name: EndpointTotals(of.by_class.tokens.total, *of.by_class.first_tokens())
            for name, of in self._of.items()
        }

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self.registry)


MakeHistogram = Callable[[str, str, tuple[float, ...]], Histogram]
"""Creates a histogram from a name, a help text and the upper bounds of its buckets."""


class RequestHistograms:
    """A model's labelled metrics that are observed for each choice."""

    def __init__(self, model_name: str, families: MetricFamilies) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = families.get(Histogram, name, text, ["model_name"], buckets=buckets)
            return family.labels(model_name)

        self.by_class = MetricsByClass(model_name, families)
        self.latency = histogram(
            "vllm:e2e_request_latency_seconds",
            "Time from the end of reading the request's body to its last token.",
            vllm_names.REQUEST_BUCKETS_S,
        )
        self._add_phases(histogram)
        self._add_sizes(histogram)
        finished = families.get(
            Counter,
            "vllm:request_success",
            "Ended requests by reason: stop and length: finished; abort: the client left; error:"
            " failed.",
            ["model_name", "finished_reason"],
        )
        self.finished = {reason: finished.labels(model_name, reason) for reason in FINISHED_REASONS}

    def _add_phases(self, histogram: MakeHistogram) -> None:
        """Add histograms of the times of a request's phases."""
        self.queue = histogram(
            "vllm:request_queue_time_seconds",
            "Queueing time of a request, at the scheduler and at workers.",
            vllm_names.REQUEST_BUCKETS_S,
        )
        self.prefill = histogram(
            "vllm:request_prefill_time_seconds",
            "Time from a request's first microbatch to its first token, as reported by workers.",
            vllm_names.REQUEST_BUCKETS_S,
        )
        self.decode = histogram(
            "vllm:request_decode_time_seconds",
            "Time from a request's first token to its last, as reported by workers.",
            vllm_names.REQUEST_BUCKETS_S,
        )
        self.inference = histogram(
            "vllm:request_inference_time_seconds",
            "Prefill plus decode time of a request.",
            vllm_names.REQUEST_BUCKETS_S,
        )

    def _add_sizes(self, histogram: MakeHistogram) -> None:
        """Add histograms of token and choice counts."""
        counts = vllm_names.token_count_buckets(TOKENS_MAX)
        self.prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", counts
        )
        self.generation_tokens = histogram(
            "vllm:request_generation_tokens", "Output tokens of a finished request.", counts
        )
        self.max_generation_tokens = histogram(
            "vllm:request_max_num_generation_tokens",
            "Most output tokens of a request's choices; each choice counts separately.",
            counts,
        )
        self.params_n = histogram(
            "vllm:request_params_n",
            "Parameter n of a request; each choice counts separately.",
            vllm_names.CHOICE_BUCKETS,
        )
        self.params_max_tokens = histogram(
            "vllm:request_params_max_tokens", "Limit on the output tokens of a request.", counts
        )
