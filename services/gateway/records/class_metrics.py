"""What a gateway observes of the requests of each class, and whether promises were kept."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.common import vllm_names
from services.core.service import Service, ServiceClass

_BOUNDS_S = (*vllm_names.TOKEN_BUCKETS_S, float("inf"))


class TokenGaps:
    """Times between tokens, in seconds: how many are in each bucket, and their sum.

    The library's histogram takes a lock three times for one number and searches its buckets
    linearly, which was a tenth of what a token cost the gateway. Here one event loop observes.
    """

    def __init__(self) -> None:
        self.counts = [0] * len(_BOUNDS_S)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one time."""
        self.counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class TokenMetrics(Collector):
    """Output tokens, and the times between them by class."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self._times = {one: TokenGaps() for one in ServiceClass}
        self.total = 0
        """Output tokens that have come."""
        registry.register(self)

    def times_of(self, service_class: ServiceClass) -> TokenGaps:
        """The times of a class."""
        return self._times[service_class]

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        yield CounterMetricFamily(
            "tideserve_gateway_output_tokens", "Tokens received.", value=self.total
        )
        between = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds",
            "Time between one token and the next, as they reach the gateway.",
            labels=["model_name", "class"],
        )
        for service_class, times in self._times.items():
            buckets = zip(map(floatToGoString, _BOUNDS_S), accumulate(times.counts), strict=True)
            labels = [self._model_name, service_class.value]
            between.add_metric(labels, list(buckets), times.sum_s)
        yield between


SLO_METRICS = ("ttft", "tpot")


@dataclass(frozen=True, slots=True)
class SloCount:
    """How often a target of promises was kept, and how often it was not."""

    attained: Counter
    missed: Counter

    def note(self, seconds: float, target_s: float) -> None:
        """Count a time that was promised to be at most `target_s`."""
        (self.attained if seconds <= target_s else self.missed).inc()


@dataclass(slots=True)
class TokenGroup:
    """The tokens after the first of one choice, in groups as its promise has them.

    `tpot_s` holds on average over each group of `token_group` tokens, so each counts once.
    """

    service: Service
    count: SloCount
    _tokens: int = 0
    _seconds: float = 0.0

    def tokens(self, count: int, per_token_s: float) -> None:
        """`count` tokens have come, each after `per_token_s`."""
        if self.service.tpot_s is None:
            return
        while count:
            more = min(count, self.service.token_group - self._tokens)
            self._tokens += more
            self._seconds += more * per_token_s
            count -= more
            if self._tokens == self.service.token_group:
                self.end()

    def end(self) -> None:
        """Count the group that has begun, however few its tokens are."""
        if self._tokens and self.service.tpot_s is not None:
            self.count.note(self._seconds / self._tokens, self.service.tpot_s)
        self._tokens, self._seconds = 0, 0.0


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """What is observed of each choice of one class, with its labels filled in."""

    ttft: Histogram
    inter_token: TokenGaps
    per_token: Histogram
    inflight: Gauge
    slo: Mapping[str, SloCount]


class MetricsByClass:
    """The metrics that have the label `class`; `of` gives those of one."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            labels = ["model_name", "class"]
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        ttft = histogram(
            "vllm:time_to_first_token_seconds",
            "From the end of reading the request's body to its first token.",
            vllm_names.TTFT_BUCKETS_S,
        )
        per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of a request that finished.",
            vllm_names.TOKEN_BUCKETS_S,
        )
        self.tokens = TokenMetrics(model_name, registry)
        slo = _slo_counts(registry)
        inflight = Gauge(
            "tideserve_gateway_choices_inflight",
            "Choices of requests that wait for a place or run.",
            ["class"],
            registry=registry,
        )
        self._of = {
            one: ClassMetrics(
                ttft.labels(model_name, one.value),
                self.tokens.times_of(one),
                per_token.labels(model_name, one.value),
                inflight.labels(one.value),
                slo[one],
            )
            for one in ServiceClass
        }
        self._ttft = ttft

    def of(self, service_class: ServiceClass) -> ClassMetrics:
        """The metrics of a class."""
        return self._of[service_class]

    def first_tokens(self) -> tuple[int, float]:
        """First tokens of all classes, and the seconds that they took together."""
        (family,) = self._ttft.collect()
        return int(_total(family, "_count")), _total(family, "_sum")


def _slo_counts(registry: CollectorRegistry) -> dict[ServiceClass, Mapping[str, SloCount]]:
    """A count for each class and metric of `SLO_METRICS`."""
    attained = Counter(
        "tideserve_gateway_slo_attained",
        "Targets that were kept: ttft, once a choice, from the request's arrival; tpot, once a"
        " group of tokens, the mean time between them.",
        ["class", "metric"],
        registry=registry,
    )
    missed = Counter(
        "tideserve_gateway_slo_missed",
        "Targets that were not kept, counted alike; a choice that fails before a token misses"
        " ttft.",
        ["class", "metric"],
        registry=registry,
    )
    return {
        one: {
            metric: SloCount(attained.labels(one.value, metric), missed.labels(one.value, metric))
            for metric in SLO_METRICS
        }
        for one in ServiceClass
    }


def _total(family: Any, suffix: str) -> float:
    return sum(sample.value for sample in family.samples if sample.name.endswith(suffix))
