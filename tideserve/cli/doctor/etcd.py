"""Checks the version, health, free quota and clock of etcd."""

import ssl
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime

import httpx

from services.common.errors import ConfigError, StoreError
from services.common.etcd import Store, open_store
from services.common.service_config import ServiceConfig
from tideserve.cli.doctor.finding import Check, Finding

CHECK = Check("etcd")
CONNECT_TIMEOUT_S = 4.0
HTTP_TIMEOUT_S = 3.0
# Generous, because the Date header has whole seconds.
SKEW_MAX_S = 5.0
FULL_SHARE = 0.8
SIZE = "etcd_mvcc_db_total_size_in_bytes"
QUOTA = "etcd_server_quota_backend_bytes"
# Members of these versions may diverge without noticing.
INCONSISTENT = ("3.5.0", "3.5.1", "3.5.2")


async def open_connected(config: ServiceConfig) -> Store | Finding:
    """A connected store, or a finding with the reason why there is none."""
    try:
        store = open_store(config)
        await store.connect(CONNECT_TIMEOUT_S)
    except (ConfigError, StoreError) as error:
        return CHECK.failure(str(error))
    return store


async def check_members(config: ServiceConfig) -> list[Finding]:
    """Check every member in the URL."""
    findings: list[Finding] = []
    for url in filter(None, (part.strip().rstrip("/") for part in config.etcd_url.split(","))):
        whole = url if "://" in url else f"http://{url}"
        try:
            async with _http(config, whole) as http:
                findings += await _member(http, whole)
        except (httpx.HTTPError, OSError, ValueError) as error:
            findings.append(
                CHECK.warning(
                    f"{whole} does not report its version and size over HTTP"
                    f" ({error or type(error).__name__}); check it with etcdctl endpoint status"
                )
            )
    return findings


async def _member(http: httpx.AsyncClient, url: str) -> list[Finding]:
    answer = await http.get("/version")
    now_unix_s = time.time()
    version = str(answer.json().get("etcdserver", "unknown"))
    health = (await http.get("/health")).json()
    numbers = metrics_of((await http.get("/metrics")).text)
    skew_s = now_unix_s - parsedate_to_datetime(answer.headers["date"]).timestamp()
    faults = list(judge(url, version, health, numbers, skew_s))
    return faults or [CHECK.fine(f"{url} is healthy: version {version}, quota not exhausted")]


def judge(
    url: str,
    version: str,
    health: Mapping[str, str],
    numbers: Mapping[str, float],
    skew_s: float,
) -> Iterator[Finding]:
    """Faults of a member; `skew_s`: how far this machine's clock is ahead of the member's."""
    if health.get("health") != "true":
        reason = health.get("reason", "no reason reported")
        yield CHECK.failure(
            f"{url} is not healthy ({reason}); for NOSPACE compact, defragment and disarm the"
            " alarm with etcdctl, else see its log"
        )
    if version in INCONSISTENT:
        yield CHECK.warning(
            f"{url} is version {version}, whose members may diverge after a"
            " crash; upgrade it to 3.5.3 or later"
        )
    size, quota = numbers.get(SIZE, 0.0), numbers.get(QUOTA, 0.0)
    if quota and size > FULL_SHARE * quota:
        yield CHECK.warning(
            f"{url} uses {size / quota:.0%} of its quota of {quota / 2**20:.0f} MiB and"
            " will refuse writes when the quota is used up; compact and defragment it, or raise"
            " --quota-backend-bytes"
        )
    if abs(skew_s) > SKEW_MAX_S:
        yield CHECK.warning(
            f"the clock of this machine differs from that of {url} by {abs(skew_s):.0f} s, which"
            " breaks certificates and log times; synchronise both with NTP"
        )


def metrics_of(text: str) -> dict[str, float]:
    """Unlabelled samples of SIZE and QUOTA in Prometheus' text format."""
    pairs = (line.split() for line in text.splitlines() if line.startswith((SIZE, QUOTA)))
    return {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2}


def _http(config: ServiceConfig, url: str) -> httpx.AsyncClient:
    verify: ssl.SSLContext | bool = True
    if url.startswith("https"):
        verify = ssl.create_default_context(cafile=config.etcd_ca_file)
        if config.etcd_cert_file is not None and config.etcd_key_file is not None:
            verify.load_cert_chain(config.etcd_cert_file, config.etcd_key_file)
    return httpx.AsyncClient(base_url=url, timeout=HTTP_TIMEOUT_S, verify=verify, trust_env=False)
