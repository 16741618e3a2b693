"""The gateway's metrics, and the workers' relayed so that one endpoint shows the cluster."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.worker_times import WORKER_TIMES
from services.gateway.message import ClusterState

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one gateway, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tideserve_gateway_requests",
            "HTTP requests answered; 499 is a client that hung up.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self._duration = Histogram(
            "tideserve_gateway_request_duration_seconds",
            "From the request's arrival to the end of its response.",
            ["endpoint"],
            buckets=_DURATION_BUCKETS,
            registry=self.registry,
        )
        self._ttft = Histogram(
            "tideserve_gateway_time_to_first_token_seconds",
            "From the end of tokenisation to the first token.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self._tpot = Histogram(
            "tideserve_gateway_time_per_output_token_seconds",
            "Time between tokens after the first.",
            buckets=_TPOT_BUCKETS,
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "tideserve_gateway_prompt_tokens", "Prompt tokens sent on.", registry=self.registry
        )
        self._output_tokens = Counter(
            "tideserve_gateway_output_tokens", "Tokens received.", registry=self.registry
        )
        self._stream_errors = Counter(
            "tideserve_gateway_stream_errors",
            "Streams that ended with an error after they had begun.",
            ["code"],
            registry=self.registry,
        )
        self._moved_streams = Counter(
            "tideserve_gateway_moved_streams",
            "Times that a running stream went over to another worker.",
            registry=self.registry,
        )
        self.inflight = Gauge(
            "tideserve_gateway_requests_inflight",
            "Generation requests inside the gateway.",
            registry=self.registry,
        )
        self.admitting = Gauge(
            "tideserve_gateway_requests_admitting",
            "Requests that wait for the scheduler's answer.",
            registry=self.registry,
        )
        self.running = Gauge(
            "tideserve_gateway_requests_running",
            "Requests that are at a worker.",
            registry=self.registry,
        )
        self.body_bytes = Gauge(
            "tideserve_gateway_body_bytes",
            "Bytes of large request bodies that are being read, parsed or tokenised.",
            registry=self.registry,
        )
        self.scheduler_queue_length = Gauge(
            "tideserve_gateway_scheduler_queue_length",
            "Requests of all gateways in the scheduler's queue; NaN while no scheduler answers.",
            registry=self.registry,
        )

    def request_done(self, endpoint: str, status: int, duration_s: float) -> None:
        """Count a finished HTTP request."""
        self._requests.labels(endpoint, str(status)).inc()
        self._duration.labels(endpoint).observe(duration_s)

    def prompt_in(self, tokens: int) -> None:
        """Count a prompt."""
        self._prompt_tokens.inc(tokens)

    def tokens_out(self, tokens: int, elapsed_s: float, first: bool) -> None:
        """Count `tokens` that came together, `elapsed_s` after the previous ones."""
        self._output_tokens.inc(tokens)
        if first:
            self._ttft.observe(elapsed_s)
        else:
            self._tpot.observe(elapsed_s / tokens)

    def stream_failed(self, code: str) -> None:
        """Count a stream that broke after it had begun."""
        self._stream_errors.labels(code).inc()

    def stream_moved(self) -> None:
        """Count a stream that goes over to another worker."""
        self._moved_streams.inc()

    def render(self, cluster: ClusterState | None) -> bytes:
        """Everything in Prometheus' text form; without workers while `cluster` is None."""
        text: bytes = generate_latest(self.registry)
        if cluster is not None:
            workers = CollectorRegistry()
            workers.register(_ClusterCollector(self._model_name, cluster))
            text += generate_latest(workers)
        return text


class _ClusterCollector(Collector):
    """What the memory manager knows: one sample per worker, and of all groups."""

    def __init__(self, model_name: str, cluster: ClusterState) -> None:
        self._model_name = model_name
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        """The families; names are those that vLLM's dashboards read, where there is one."""
        labels = ["worker", "model_name"]
        running = GaugeMetricFamily("vllm:num_requests_running", "In the batch.", labels=labels)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Waiting.", labels=labels)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "1 is full.", labels=labels)
        preempted = CounterMetricFamily("vllm:num_preemptions", "Preemptions.", labels=labels)
        free = GaugeMetricFamily(
            "tideserve_worker_kv_blocks_free", "KV blocks that are free.", labels=labels
        )
        total = GaugeMetricFamily(
            "tideserve_worker_kv_blocks_total", "KV blocks in all.", labels=labels
        )
        times = {
            field: CounterMetricFamily(f"tideserve_worker_{name}", text, labels=labels)
            for field, (name, text) in WORKER_TIMES.items()
        }
        usable = GaugeMetricFamily(
            "tideserve_kv_blocks",
            "KV blocks that requests can fill: a group has those of its smallest member.",
            labels=["model_name"],
        )
        usable.add_metric([self._model_name], usable_blocks(self._cluster))
        for worker in self._cluster.workers:
            values = [worker.worker_id, self._model_name]
            blocks = worker.kv_blocks_total
            running.add_metric(values, worker.running)
            waiting.add_metric(values, worker.waiting)
            usage.add_metric(values, 1 - worker.kv_blocks_free / blocks if blocks else 0)
            preempted.add_metric(values, worker.preemptions_total)
            free.add_metric(values, worker.kv_blocks_free)
            total.add_metric(values, blocks)
            for field, counter in times.items():
                counter.add_metric(values, getattr(worker, field))
        return [running, waiting, usage, preempted, free, total, usable, *times.values()]


def usable_blocks(cluster: ClusterState) -> int:
    """KV blocks of all groups; a request has each of its blocks at every stage."""
    blocks = {worker.worker_id: worker.kv_blocks_total for worker in cluster.workers}
    members = ([blocks.get(name, 0) for name in group.members] for group in cluster.groups)
    return sum(map(min, filter(None, members)))
