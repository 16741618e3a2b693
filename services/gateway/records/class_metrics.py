"""What a gateway observes of the requests of each class, and whether promises were kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.common import vllm_names
from services.core.service import ServiceClass

SLO_METRICS = ("ttft", "tpot")


@dataclass(frozen=True, slots=True)
class SloCount:
    """Choices that kept a target of their promise, and that did not."""

    attained: Counter
    missed: Counter

    def note(self, seconds: float, target_s: float) -> None:
        """Count a time that was promised to be at most `target_s`."""
        (self.attained if seconds <= target_s else self.missed).inc()


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """What is observed of each choice of one class, with its labels filled in."""

    ttft: Histogram
    inter_token: Histogram
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
        inter_token = histogram(
            "vllm:inter_token_latency_seconds",
            "Time between one token and the next, as they reach the gateway.",
            vllm_names.TOKEN_BUCKETS_S,
        )
        per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of a request that finished.",
            vllm_names.TOKEN_BUCKETS_S,
        )
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
                inter_token.labels(model_name, one.value),
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
        "Choices that kept a target: ttft, from the request's arrival; tpot, the mean time"
        " between the tokens of one that finished.",
        ["class", "metric"],
        registry=registry,
    )
    missed = Counter(
        "tideserve_gateway_slo_missed",
        "Choices that did not keep a target; one that fails before a token misses ttft.",
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
