"""Gateway metrics per model and class: latencies, and SLO targets (TTFT, TPOT) met or missed."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.common import vllm_names
from services.core.service import Service, ServiceClass

_BOUNDS_S = (*vllm_names.TOKEN_BUCKETS_S, float("inf"))


class TokenTimeHistogram:
    """Histogram of times between tokens, in seconds, for use by a single event loop.

    Replaces prometheus_client's histogram, which takes three locks per observation and searches
    its buckets linearly: a tenth of the gateway's CPU time per token.
    """

    def __init__(self) -> None:
        self.counts = [0] * len(_BOUNDS_S)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Add an observation."""
        self.counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class ModelTokens:
    """Counts the output tokens of a model, and the times between them by class."""

    def __init__(self) -> None:
        self.total = 0
        """Output tokens received."""
        self.times = {service_class: TokenTimeHistogram() for service_class in ServiceClass}


class TokenMetrics(Collector):
    """Collects the output tokens of all models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._of: dict[str, ModelTokens] = {}
        registry.register(self)

    def of(self, model_name: str) -> ModelTokens:
        """The counts of a model."""
        return self._of.setdefault(model_name, ModelTokens())

    def collect(self) -> Iterable[Metric]:
        """Return the metrics; see prometheus_client."""
        total = CounterMetricFamily(
            "tideserve_gateway_output_tokens", "Output tokens received.", labels=["model_name"]
        )
        for model_name, tokens in self._of.items():
            total.add_metric([model_name], tokens.total)
        yield total
        histogram = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds",
            "Time between consecutive tokens, as received by the gateway.",
            labels=["model_name", "class"],
        )
        for model_name, tokens in self._of.items():
            for service_class, times in tokens.times.items():
                counts = accumulate(times.counts)
                buckets = zip(map(floatToGoString, _BOUNDS_S), counts, strict=True)
                labels = [model_name, service_class.value]
                histogram.add_metric(labels, list(buckets), times.sum_s)
        yield histogram


M = TypeVar("M", Counter, Gauge, Histogram)


class MetricFamilies:
    """Creates each metric family once, so that the metrics of several models share it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._created: dict[str, Counter | Gauge | Histogram] = {}
        self.tokens = TokenMetrics(registry)

    def get(self, kind: type[M], name: str, text: str, labels: Sequence[str], **more: Any) -> M:
        """The family `name`, created with the other arguments at the first call."""
        if name not in self._created:
            self._created[name] = kind(name, text, labels, registry=self._registry, **more)
        return cast(M, self._created[name])


SLO_METRICS = ("ttft", "tpot")


@dataclass(frozen=True, slots=True)
class SloCount:
    """Counters of met and missed targets of an SLO metric."""

    attained: Counter
    missed: Counter

    def observe(self, seconds: float, target_s: float) -> None:
        """Count a latency whose target is at most `target_s`."""
        (self.attained if seconds <= target_s else self.missed).inc()


@dataclass(slots=True)
class TokenGroup:
    """Counts met and missed TPOT targets of a choice, per group of tokens after the first token.

    The target `service.tpot_s` applies to the mean over each group of `service.token_group` tokens.
    """

    service: Service
    count: SloCount
    _tokens: int = 0
    _seconds: float = 0.0

    def add_tokens(self, count: int, per_token_s: float) -> None:
        """Add `count` tokens with `per_token_s` seconds between them."""
        if self.service.tpot_s is None:
            return
        while count:
            added = min(count, self.service.token_group - self._tokens)
            self._tokens += added
            self._seconds += added * per_token_s
            count -= added
            if self._tokens == self.service.token_group:
                self.end()

    def end(self) -> None:
        """Count the current group, full or not, and begin another."""
        if self._tokens and self.service.tpot_s is not None:
            self.count.observe(self._seconds / self._tokens, self.service.tpot_s)
        self._tokens, self._seconds = 0, 0.0


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """The labelled metrics of a class, observed for each choice."""

    ttft: Histogram
    inter_token: TokenTimeHistogram
    per_token: Histogram
    inflight: Gauge
    slo: Mapping[str, SloCount]


class MetricsByClass:
    """A model's metrics that have the label `class`; `of` returns the metrics of a class."""

    def __init__(self, model_name: str, families: MetricFamilies) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return families.get(Histogram, name, text, ["model_name", "class"], buckets=buckets)

        ttft = histogram(
            "vllm:time_to_first_token_seconds",
            "Time from the end of reading the request's body to its first token.",
            vllm_names.TTFT_BUCKETS_S,
        )
        per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of a request that finished.",
            vllm_names.TOKEN_BUCKETS_S,
        )
        self.tokens = families.tokens.of(model_name)
        slo = _slo_counts(model_name, families)
        inflight = families.get(
            Gauge,
            "tideserve_gateway_choices_inflight",
            "Choices that are queued or running.",
            ["model_name", "class"],
        )
        self._of = {
            service_class: ClassMetrics(
                ttft.labels(model_name, service_class.value),
                self.tokens.times[service_class],
                per_token.labels(model_name, service_class.value),
                inflight.labels(model_name, service_class.value),
                slo[service_class],
            )
            for service_class in ServiceClass
        }
        self._model_name, self._ttft = model_name, ttft

    def of(self, service_class: ServiceClass) -> ClassMetrics:
        """The metrics of a class."""
        return self._of[service_class]

    def first_tokens(self) -> tuple[int, float]:
        """Number of first tokens of all classes, and the sum of their TTFT in seconds."""
        (family,) = self._ttft.collect()
        count, total_s = (_total(family, self._model_name, end) for end in ("_count", "_sum"))
        return int(count), total_s


def _slo_counts(
    model_name: str, families: MetricFamilies
) -> dict[ServiceClass, Mapping[str, SloCount]]:
    """A model's counters for each class and metric of `SLO_METRICS`."""
    labels = ["model_name", "class", "metric"]
    attained = families.get(
        Counter,
        "tideserve_gateway_slo_attained",
        "SLO targets that were met. ttft: once per choice, from the request's arrival; tpot: once"
        " per group of tokens, for the mean time between them.",
        labels,
    )
    missed = families.get(
        Counter,
        "tideserve_gateway_slo_missed",
        "SLO targets that were missed, counted alike. A choice that fails before its first token"
        " misses ttft.",
        labels,
    )
    return {
        service_class: {
            metric: SloCount(
                attained.labels(model_name, service_class.value, metric),
                missed.labels(model_name, service_class.value, metric),
            )
            for metric in SLO_METRICS
        }
        for service_class in ServiceClass
    }


def _total(family: Any, model_name: str, suffix: str) -> float:
    return sum(
        sample.value
        for sample in family.samples
        if sample.name.endswith(suffix) and sample.labels["model_name"] == model_name
    )
