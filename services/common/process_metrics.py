"""Metrics that every service has: its process, its calls to etcd, its certificates."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from services.common.certificate_expiry import expiry_unix_s
from services.common.etcd_calls import UPPER_BOUNDS_S, EtcdCalls

_CERTIFICATE_KEY = "_cert_file"


class _Common(Collector):
    def __init__(self, service: str, config: Any, calls: EtcdCalls) -> None:
        self._service = service
        self._calls = calls
        self._certificates: dict[str, Path] = {
            item.name.removesuffix(_CERTIFICATE_KEY): getattr(config, item.name)
            for item in fields(config)
            if item.name.endswith(_CERTIFICATE_KEY) and getattr(config, item.name) is not None
        }

    def collect(self) -> Iterable[Metric]:
        """The families."""
        build = InfoMetricFamily("tideserve_build", "Which service and version this process is.")
        build.add_metric([], {"service": self._service, "version": _version()})
        yield build
        calls = self._calls
        duration = HistogramMetricFamily(
            "tideserve_etcd_call_duration_seconds", "Time of a call to etcd, failed ones included."
        )
        duration.add_metric([], cumulative(UPPER_BOUNDS_S, calls.counts), calls.total_s)
        yield duration
        yield CounterMetricFamily(
            "tideserve_etcd_call_failures",
            "Calls to etcd without an answer in time, or that it refused.",
            value=calls.failed,
        )
        expiry = GaugeMetricFamily(
            "tideserve_tls_certificate_expiry_seconds",
            "When the certificate of this purpose expires, in seconds since 1970; NaN: unreadable.",
            labels=["purpose"],
        )
        for purpose, path in self._certificates.items():
            at_s = expiry_unix_s(path)
            expiry.add_metric([purpose], float("nan") if at_s is None else at_s)
        yield expiry


def service_registry(service: str, config: Any, calls: EtcdCalls) -> CollectorRegistry:
    """A registry with what every service has; `config` is its ServiceConfig."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Common(service, config, calls))
    return registry


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """The buckets of a histogram as the exposition wants them, from a count of each bucket."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


def _version() -> str:
    try:
        return version("tideserve")
    except PackageNotFoundError:
        return "unknown"
