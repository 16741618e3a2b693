"""What is observed at each token.

The library's own metrics take a lock three times for one number and look through its buckets in a
row, which was a tenth of what a token cost the gateway. Here one event loop observes and is asked.
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.common import vllm_names
from services.core.service import ServiceClass

_BOUNDS_S = (*vllm_names.TOKEN_BUCKETS_S, float("inf"))


class TokenGaps:
    """Times between tokens, in seconds: how many are in each bucket, and their sum."""

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
