"""The metrics of one gateway: its requests from their clients' side, and itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.common import vllm_names
from services.core.service import ServiceClass
from services.gateway.bounds.line import Line
from services.gateway.keys.quotas import QuotaMetrics
from services.gateway.records.class_metrics import MetricsByClass
from services.gateway.vocabulary.errors import (
    Expired,
    GatewayError,
    QueueFull,
    ServiceUnavailable,
    ShuttingDown,
)

_DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
FINISHED_REASONS = ("stop", "length", "abort", "error")
# Errors of requests that could have been served at another time.
REFUSALS: tuple[type[GatewayError], ...] = (QueueFull, ServiceUnavailable, Expired, ShuttingDown)
# The class of requests that are refused before their body is read.
UNREAD = "unknown"
# The last bucket of token counts.
TOKENS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class EndpointTotals:
    """Output tokens, first tokens among them, and the seconds that those took together."""

    output_tokens: int
    first_tokens: int
    first_tokens_s: float


class Metrics:
    """Counters of one gateway.

    Those that vLLM has, too, bear its names: they count each choice of a request as one request.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        """The metrics are added to `registry`."""
        self.registry = registry
        self._model_name = model_name
        self.requests = RequestHistograms(model_name, registry)
        counter = partial(Counter, registry=registry)
        self._http_requests = counter(
            "tideserve_gateway_requests",
            "Requests answered, over HTTP and gRPC; 499: the client hung up or cancelled it.",
            ["endpoint", "status"],
        )
        self._duration = Histogram(
            "tideserve_gateway_request_duration_seconds",
            "From the request's arrival to the end of its response.",
            ["endpoint"],
            buckets=_DURATION_BUCKETS,
            registry=registry,
        )
        self._rejections = counter(
            "vllm:admission_rejections",
            "Requests refused for want of room: queue_full, expired, unavailable, shutting_down; of"
            " class unknown before their body was read.",
            ["model_name", "reason", "class"],
        )
        for refusal in REFUSALS:
            for service_class in (*ServiceClass, UNREAD):
                self._rejections.labels(model_name, refusal.code, str(service_class))
        self._prompt_tokens = counter("tideserve_gateway_prompt_tokens", "Prompt tokens sent on.")
        self._stream_errors = counter(
            "tideserve_gateway_stream_errors",
            "Streams that ended with an error after they had begun; client_gone: it hung up.",
            ["code"],
        )
        self._moved_streams = counter(
            "tideserve_gateway_moved_streams",
            "Times that a running stream went over to another worker.",
        )
        self._resumed_streams = counter(
            "tideserve_gateway_resumed_streams",
            "Times that a request whose worker was lost after a token was started again after it.",
        )
        self._replayed_requests = counter(
            "tideserve_gateway_replayed_requests",
            "Requests whose Idempotency-Key had come before, and that got the answer of that time.",
        )
        self.quotas = QuotaMetrics(registry)
        self._add_states(partial(Gauge, registry=registry))
        self._add_loads(partial(Gauge, registry=registry))

    def _add_states(self, gauge: Callable[..., Gauge]) -> None:
        """Whether quotas, keys and the cluster are as they should be."""
        self.quota_sharing = gauge(
            "tideserve_gateway_quota_sharing",
            "1 while gateways report their demand to each other; 0: they keep their last parts"
            " of each quota.",
        )
        self.keys_refused = gauge(
            "tideserve_gateway_keys_file_refused",
            "1 while the file of keys has changed into something that is not usable, and the former"
            " keys are in force.",
        )
        self.keys_digest = gauge(
            "tideserve_gateway_keys_digest",
            "The first 48 bits of a SHA-256 of the keys of the file that are in force, as a number;"
            " it differs between gateways while they have different keys. 0: there is no file.",
        )
        self.ready = gauge(
            "tideserve_gateway_ready",
            "1 while /ready says yes: a request can be placed, and `expected_workers` were there"
            " once, or have been waited for.",
        )
        self.groups_serving = gauge(
            "tideserve_gateway_groups_serving",
            "Groups of the gateway's model that can take requests, as /ready counts them.",
            ["model_name"],
        ).labels(self._model_name)

    def _add_loads(self, gauge: Callable[..., Gauge]) -> None:
        """How much is under way."""
        self._calls = gauge(
            "tideserve_gateway_grpc_calls",
            "gRPC calls beside requests that run: waiting for their message, streams of requests,"
            " parked because their client takes nothing.",
            ["state"],
        )
        self.inflight = gauge(
            "tideserve_gateway_requests_inflight", "Generation requests inside the gateway."
        )
        self.admitting = gauge(
            "tideserve_gateway_requests_admitting", "Requests that wait for the scheduler's answer."
        )
        self.running = gauge("tideserve_gateway_requests_running", "Requests that are at a worker.")
        self.body_bytes = gauge(
            "tideserve_gateway_body_bytes",
            "Bytes of large request bodies that are being read, parsed or tokenised.",
        )
        self.answer_bytes = gauge(
            "tideserve_gateway_answer_bytes",
            "Bytes of answers to requests with an Idempotency-Key, running and kept.",
        )

    def count_calls(self, lines: Mapping[str, Line]) -> None:
        """Tell how many calls there are in each line of a door, by what they do."""
        for state, line in lines.items():
            self._calls.labels(state).set_function(partial(getattr, line, "total"))

    def request_done(self, endpoint: str, status: int, duration_s: float) -> None:
        """Count a finished request; `status` is that of HTTP, or what it would be there."""
        self._http_requests.labels(endpoint, str(status)).inc()
        self._duration.labels(endpoint).observe(duration_s)

    def refused(self, error: GatewayError, service_class: ServiceClass | None) -> None:
        """Count a request that was refused for want of room, before its response began.

        Its class is None if its body was not read.
        """
        if type(error) in REFUSALS:
            told = UNREAD if service_class is None else service_class.value
            self._rejections.labels(self._model_name, error.code, told).inc()

    def prompt_in(self, tokens: int) -> None:
        """Count a prompt."""
        self._prompt_tokens.inc(tokens)

    def stream_failed(self, code: str) -> None:
        """Count a stream that broke after it had begun."""
        self._stream_errors.labels(code).inc()

    def stream_moved(self) -> None:
        """Count a stream that goes over to another worker."""
        self._moved_streams.inc()

    def stream_resumed(self) -> None:
        """Count a request that goes on after the tokens which came from a lost worker."""
        self._resumed_streams.inc()

    def replayed(self) -> None:
        """Count a request that gets the answer of an earlier one."""
        self._replayed_requests.inc()

    def totals(self) -> EndpointTotals:
        """What has been counted so far, for rates."""
        by_class = self.requests.by_class
        return EndpointTotals(by_class.tokens.total, *by_class.first_tokens())

    def render(self) -> bytes:
        """Everything in Prometheus' text form."""
        return generate_latest(self.registry)


MakeHistogram = Callable[[str, str, tuple[float, ...]], Histogram]
"""Makes a histogram of a name, a help text and upper bounds of its buckets."""


class RequestHistograms:
    """What is observed of each choice, with its labels filled in."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, ["model_name"], buckets=buckets, registry=registry)
            return made.labels(model_name)

        self.by_class = MetricsByClass(model_name, registry)
        self.latency = histogram(
            "vllm:e2e_request_latency_seconds",
            "From the end of reading the request's body to its last token.",
            vllm_names.REQUEST_BUCKETS_S,
        )
        self._add_phases(histogram)
        self._add_sizes(histogram)
        finished = Counter(
            "vllm:request_success",
            "Requests that ended; stop and length finished, abort: the client went, error: failed.",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self.finished = {reason: finished.labels(model_name, reason) for reason in FINISHED_REASONS}

    def _add_phases(self, histogram: MakeHistogram) -> None:
        """Histograms of the times of a request's phases."""
        self.queue = histogram(
            "vllm:request_queue_time_seconds",
            "Time that a request waited: in the scheduler's queue, and ready to run at workers.",
            vllm_names.REQUEST_BUCKETS_S,
        )
        self.prefill = histogram(
            "vllm:request_prefill_time_seconds",
            "Time from a request's first microbatch to its first token, as its workers tell it.",
            vllm_names.REQUEST_BUCKETS_S,
        )
        self.decode = histogram(
            "vllm:request_decode_time_seconds",
            "Time from a request's first token to its last, as its workers tell it.",
            vllm_names.REQUEST_BUCKETS_S,
        )
        self.inference = histogram(
            "vllm:request_inference_time_seconds",
            "Prefill and decode time of a request together.",
            vllm_names.REQUEST_BUCKETS_S,
        )

    def _add_sizes(self, histogram: MakeHistogram) -> None:
        """Histograms of numbers of tokens and choices."""
        counts = vllm_names.token_count_buckets(TOKENS_MAX)
        self.prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", counts
        )
        self.generation_tokens = histogram(
            "vllm:request_generation_tokens", "Output tokens of a request that finished.", counts
        )
        self.max_generation_tokens = histogram(
            "vllm:request_max_num_generation_tokens",
            "Output tokens of the longest choice of a request; each choice counts for itself.",
            counts,
        )
        self.params_n = histogram(
            "vllm:request_params_n",
            "Parameter n of a request; each choice counts for itself.",
            vllm_names.CHOICE_BUCKETS,
        )
        self.params_max_tokens = histogram(
            "vllm:request_params_max_tokens", "Most output tokens that a request may have.", counts
        )
