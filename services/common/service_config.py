"""Configuration keys that all services have."""

from dataclasses import dataclass
from pathlib import Path

from services.common import failpoint
from services.common.errors import ConfigError
from services.common.etcd_url import refuse_user
from services.core.setting import choice, number, option, tcp_port

DEFAULT_PREFIX = "/tideserve/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """The common configuration of all services."""

    etcd_url: str = option(help="URLs of etcd, comma-separated; https:// for TLS.")
    etcd_prefix: str = option(
        DEFAULT_PREFIX,
        "Prefix of all keys. Clusters that share an etcd need different prefixes, none of which is"
        " a prefix of another.",
    )
    etcd_user: str | None = option(None, "User name for etcd.")
    etcd_password: str | None = option(None, "Password for etcd.", secret=True)
    etcd_ca_file: Path | None = option(None, "CA certificates that verify etcd's certificate.")
    etcd_cert_file: Path | None = option(None, "Client certificate for etcd.")
    etcd_key_file: Path | None = option(None, "Private key of that certificate.")
    advertise: str = option(
        "auto",
        "Host, or host:port, at which others reach this service's gRPC port and lanes; auto: the"
        " listening address, or if that is a wildcard the local address used to reach etcd.",
    )
    lease_ttl_s: int = number(
        10, "Seconds after which a silent service counts as dead.", minimum=2, maximum=600
    )
    tls_ca_file: Path | None = option(
        None, "CA of the cluster; if set, services use mutual TLS with each other."
    )
    tls_cert_file: Path | None = option(
        None, "Certificate of this service; reloaded when the file changes."
    )
    tls_key_file: Path | None = option(None, "Private key of that certificate.")
    metrics_port: int | None = tcp_port(
        None, "Port of /metrics, on gRPC's address; disabled by default, 0: any free port."
    )
    log_level: str = choice("info", ("debug", "info", "warning", "error"), "Minimum log level.")
    log_format: str = choice("json", ("json", "text"), "A JSON object per line, or plain text.")
    otlp_endpoint: str | None = option(
        None,
        "OTLP gRPC endpoint for traces, such as http://collector:4317; none: no tracing.",
    )
    trace_sample_ratio: float = number(
        0.01, "Fraction of requests that are traced.", minimum=0, maximum=1
    )
    event_log: Path | None = option(
        None, "Folder for a log of all events, including token ids; a debugging aid."
    )
    failpoints: tuple[str, ...] = option(
        (),
        "Injected faults for tests, such as engine.merge.switch.leader=kill; see docs/faults.md.",
    )
    failpoint_file: Path | None = option(
        None, "File to which failpoints append their hits; required by `failpoints`."
    )

    def __post_init__(self) -> None:
        if not self.etcd_prefix.endswith("/"):
            raise ConfigError(
                f"'etcd_prefix' is '{self.etcd_prefix}', but must end in '/': a prefix of another"
                " cluster's prefix would match its keys"
            )
        refuse_user(self.etcd_url)
        # Failures log the endpoint, so it must not contain credentials.
        if self.otlp_endpoint is not None and "@" in self.otlp_endpoint:
            raise ConfigError(
                "'otlp_endpoint' contains credentials; set them as a header in the environment"
                " variable OTEL_EXPORTER_OTLP_HEADERS"
            )
        if self.etcd_password is not None and self.etcd_user is None:
            raise ConfigError("'etcd_password' is set without 'etcd_user'; add the user")
        failpoint.check(self.failpoints, self.failpoint_file)
        given = [part for part in ("ca", "cert", "key") if getattr(self, f"tls_{part}_file")]
        if len(given) in (1, 2):
            raise ConfigError(
                f"'tls_{given[0]}_file' is set without all of 'tls_ca_file', 'tls_cert_file' and"
                " 'tls_key_file'; mutual TLS needs all three"
            )
        if (self.etcd_cert_file is None) != (self.etcd_key_file is None):
            raise ConfigError("set both or neither of 'etcd_cert_file' and 'etcd_key_file'")
