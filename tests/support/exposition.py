"""Reading metrics in Prometheus' text form."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    """Values by name and sorted labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Samples, name: str, **labels: str) -> float | None:
    """The value of a sample; None if missing."""
    return metrics.get((name, tuple(sorted(labels.items()))))


def collected(collector: Collector) -> Samples:
    """The current samples of a collector."""
    registry = CollectorRegistry()
    registry.register(collector)
    return samples(generate_latest(registry).decode())


def families(collectors: Iterable[Collector]) -> dict[str, Metric]:
    """The families of collectors by name."""
    return {family.name: family for collector in collectors for family in collector.collect()}
