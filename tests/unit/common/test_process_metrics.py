"""Metrics of every service: its process, its etcd calls and its certificates."""

import math
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from services.common.certificate_expiry import expiry_unix_s
from services.common.errors import StoreError
from services.common.etcd_calls import EtcdCalls
from services.common.logging import stats
from services.common.process_metrics import cumulative, service_registry
from services.common.service_config import ServiceConfig
from tests.support.exposition import samples, value
from tideserve.cli.certificates import Authority, write_pair


def make_certificate(folder: Path) -> Path:
    """A self-signed certificate with this lifetime."""
    path = folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-subj", "/CN=test", "-keyout", str(folder / "key.pem")),
            *("-out", str(path), "-days", "30"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return path


def test_the_certificate_expiry_equals_that_of_openssl(tmp_path: Path) -> None:
    path = make_certificate(tmp_path)
    output = subprocess.run(
        ["openssl", "x509", "-in", str(path), "-noout", "-enddate", "-dateopt", "iso_8601"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    output = output.strip().removeprefix("notAfter=")
    expected = datetime.strptime(output, "%Y-%m-%d %H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    assert expiry_unix_s(path) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no certificate",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\n====\n-----END CERTIFICATE-----\n",
    ],
)
def test_an_invalid_certificate_has_no_expiry(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text(text)
    assert expiry_unix_s(path) is None
    assert expiry_unix_s(tmp_path / "missing.pem") is None


def test_every_service_exports_process_metrics(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    missing = tmp_path / "missing.pem"
    config = ServiceConfig(
        etcd_url="h:1",
        tls_ca_file=certificate,
        tls_cert_file=certificate,
        tls_key_file=tmp_path / "key.pem",
        etcd_cert_file=missing,
        etcd_key_file=missing,
    )
    calls = EtcdCalls()
    with calls.timed((StoreError,)):
        pass
    with pytest.raises(StoreError), calls.timed((StoreError,)):
        raise StoreError("no answer")
    with pytest.raises(KeyError), calls.timed((StoreError,)):
        raise KeyError("neither an answer nor a failure of etcd")
    calls.rollbacks = 2
    families = samples(generate_latest(service_registry("memmgr", config, calls)).decode())
    assert value(families, "tideserve_etcd_call_failures_total") == 1
    assert value(families, "tideserve_etcd_rollbacks_total") == 2
    assert value(families, "tideserve_etcd_call_duration_seconds_count") == 2
    assert value(families, "tideserve_log_lines_lost_total") == stats.lost_lines
    name = "tideserve_tls_certificate_expiry_seconds"
    assert value(families, name, purpose="tls") == expiry_unix_s(certificate)
    unreadable = value(families, name, purpose="etcd")
    assert unreadable is not None and math.isnan(unreadable)
    builds = [dict(labels) for name, labels in families if name == "tideserve_build_info"]
    assert [build["service"] for build in builds] == ["memmgr"]


def test_the_exported_expiry_follows_the_loaded_certificate(tmp_path: Path) -> None:
    authority = Authority.create("test")
    first, second = (authority.issue("gateway", ("g",), timedelta(days=days)) for days in (1, 30))
    write_pair(tmp_path, "gateway", first)
    (tmp_path / "ca.pem").write_bytes(authority.files.cert)
    certificate = tmp_path / "gateway.pem"
    config = ServiceConfig(
        etcd_url="h:1",
        tls_ca_file=tmp_path / "ca.pem",
        tls_cert_file=certificate,
        tls_key_file=tmp_path / "gateway-key.pem",
    )
    registry = service_registry("gateway", config, EtcdCalls())

    def exported_expiry() -> float | None:
        name = "tideserve_tls_certificate_expiry_seconds"
        return value(samples(generate_latest(registry).decode()), name, purpose="tls")

    before = expiry_unix_s(certificate)
    assert exported_expiry() == before
    certificate.write_bytes(second.cert)
    assert exported_expiry() == before, "a certificate without its key is not used"
    write_pair(tmp_path, "gateway", second)
    after = expiry_unix_s(certificate)
    assert after is not None and before is not None and after > before
    assert exported_expiry() == after


def test_histogram_buckets_are_cumulative() -> None:
    assert cumulative((1, 2.5), [3, 0, 4]) == [("1.0", 3.0), ("2.5", 3.0), ("+Inf", 7.0)]
    with pytest.raises(ValueError):
        cumulative((1, 2), [0, 0])
