"""Configuration that all services share."""

from dataclasses import dataclass
from pathlib import Path

from services.common import failpoint
from services.common.errors import ConfigError
from services.common.etcd_url import refuse_user
from services.core.setting import choice, number, option, tcp_port

DEFAULT_PREFIX = "/tideserve/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """What every service is told at its start, whatever it serves."""

    etcd_url: str = option(help="URLs of etcd, separated by commas; https:// for TLS.")
    etcd_prefix: str = option(
        DEFAULT_PREFIX,
        "Prefix of every key; clusters that share an etcd differ in it, and none begins with"
        " another's.",
    )
    etcd_user: str | None = option(None, "User name at etcd.")
    etcd_password: str | None = option(None, "Password of that user.", secret=True)
    etcd_ca_file: Path | None = option(None, "Certificates that etcd's own is checked against.")
    etcd_cert_file: Path | None = option(None, "Certificate that this service shows to etcd.")
    etcd_key_file: Path | None = option(None, "Private key of that certificate.")
    advertise: str = option(
        "auto",
        "Host, or host:port, at which others reach this service's gRPC port and lanes; auto: the"
        " local address from which etcd is reached, or the listening address if that is one.",
    )
    lease_ttl_s: int = number(
        10, "Seconds after which a silent service counts as gone.", minimum=2, maximum=600
    )
    tls_ca_file: Path | None = option(
        None, "CA of the cluster: with it services speak only mutual TLS to each other."
    )
    tls_cert_file: Path | None = option(
        None, "Certificate of this service; read again when the file changes."
    )
    tls_key_file: Path | None = option(None, "Private key of that certificate.")
    metrics_port: int | None = tcp_port(
        None, "Port of /metrics, on the address of gRPC; none by default, 0: any free one."
    )
    log_level: str = choice("info", ("debug", "info", "warning", "error"), "Least level to log.")
    log_format: str = choice("json", ("json", "text"), "One JSON object a line, or plain text.")
    otlp_endpoint: str | None = option(
        None, "OTLP gRPC endpoint for traces, such as http://collector:4317; none: no tracing."
    )
    trace_sample_ratio: float = number(
        0.01, "Share of the requests that are traced.", minimum=0, maximum=1
    )
    event_log: Path | None = option(
        None, "Folder for a log of all events, tokens included; a debugging aid."
    )
    failpoints: tuple[str, ...] = option(
        (), "Faults for tests, such as engine.merge.switch.leader=kill; see docs/faults.md."
    )
    failpoint_file: Path | None = option(
        None, "File that gets a line for each failpoint that was hit; `failpoints` need one."
    )

    def __post_init__(self) -> None:
        if not self.etcd_prefix.endswith("/"):
            raise ConfigError(
                f"'etcd_prefix' is '{self.etcd_prefix}', but must end in '/': one that is the"
                " beginning of another would see the other's keys"
            )
        refuse_user(self.etcd_url)
        if self.otlp_endpoint is not None and "@" in self.otlp_endpoint:
            raise ConfigError(
                "'otlp_endpoint' holds a user or a password; give them as a header in the"
                " environment variable OTEL_EXPORTER_OTLP_HEADERS"
            )
        if self.etcd_password is not None and self.etcd_user is None:
            raise ConfigError("'etcd_password' is given without 'etcd_user'; add the user")
        failpoint.check(self.failpoints, self.failpoint_file)
        given = [part for part in ("ca", "cert", "key") if getattr(self, f"tls_{part}_file")]
        if len(given) in (1, 2):
            raise ConfigError(
                f"'tls_{given[0]}_file' is given without all of 'tls_ca_file', 'tls_cert_file' and"
                " 'tls_key_file'; mutual TLS needs the three"
            )
        if (self.etcd_cert_file is None) != (self.etcd_key_file is None):
            raise ConfigError("'etcd_cert_file' and 'etcd_key_file' go together; give both or none")
