"""Prometheus metrics of every service: its process, calls to etcd, and certificates."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
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

from services.common.certificate_expiry import expiry_of
from services.common.errors import ConfigError
from services.common.etcd_calls import UPPER_BOUNDS_S, EtcdCalls
from services.common.logging import stats as log_stats
from services.common.tls import CertificateFiles, CertificateSource

_CERTIFICATE_KEY = "_cert_file"


class _Common(Collector):
    def __init__(self, service: str, config: Any, calls: EtcdCalls) -> None:
        self._service = service
        self._calls = calls
        self._certificates = [
            _Certificate(_files(config, item.name.removesuffix(_CERTIFICATE_KEY)))
            for item in fields(config)
            if item.name.endswith(_CERTIFICATE_KEY) and getattr(config, item.name) is not None
        ]

    def collect(self) -> Iterable[Metric]:
        """All metric families."""
        build = InfoMetricFamily("tideserve_build", "Name and version of the service.")
        build.add_metric([], {"service": self._service, "version": _version()})
        yield build
        calls = self._calls
        duration = HistogramMetricFamily(
            "tideserve_etcd_call_duration_seconds", "Duration of calls to etcd, including failures."
        )
        duration.add_metric([], cumulative(UPPER_BOUNDS_S, calls.counts), calls.total_s)
        yield duration
        yield CounterMetricFamily(
            "tideserve_etcd_call_failures",
            "Calls to etcd that were refused or not answered in time.",
            value=calls.failed,
        )
        yield CounterMetricFamily(
            "tideserve_etcd_rollbacks",
            "Detected losses of writes that etcd had confirmed.",
            value=calls.rollbacks,
        )
        yield CounterMetricFamily(
            "tideserve_log_lines_lost",
            "Log lines that could not be written, for example because the disk is full.",
            value=log_stats.lost_lines,
        )
        expiry = GaugeMetricFamily(
            "tideserve_tls_certificate_expiry_seconds",
            "Expiry of the certificate in use for this purpose, in seconds since 1970; NaN:"
            " unreadable.",
            labels=["purpose"],
        )
        for certificate in self._certificates:
            expiry.add_metric([certificate.purpose], certificate.expiry_unix_s())
        yield expiry


class _Certificate:
    """The certificate that the next connection of the service uses.

    This may differ from the file: a certificate that does not match its key is never used.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self.purpose = files.owner
        self._files = files
        self._source: CertificateSource | None = None
        # Load the certificate now, because later invalid files do not replace it.
        self.expiry_unix_s()

    def expiry_unix_s(self) -> float:
        """Expiry in seconds since 1970; NaN before the first usable certificate."""
        try:
            if self._source is None:
                self._source = CertificateSource(self._files)
        except ConfigError:
            return math.nan
        at_s = expiry_of(self._source.current().cert or b"")
        return math.nan if at_s is None else at_s


def _files(config: Any, purpose: str) -> CertificateFiles:
    paths = (getattr(config, f"{purpose}_{part}_file", None) for part in ("ca", "cert", "key"))
    return CertificateFiles(purpose, *paths)


def service_registry(service: str, config: Any, calls: EtcdCalls) -> CollectorRegistry:
    """A registry with the metrics of every service; `config` is its ServiceConfig."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Common(service, config, calls))
    return registry


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Prometheus's cumulative buckets, from the counts of separate buckets."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


def _version() -> str:
    try:
        return version("tideserve")
    except PackageNotFoundError:
        return "unknown"
