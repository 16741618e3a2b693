"""Runs all checks in dependency order and prints their findings."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from services.common.address import host_of, is_loopback
from services.common.config import from_mapping
from services.common.errors import ConfigError, StoreError
from services.common.service_config import ServiceConfig
from services.common.settings import load_settings
from services.common.tls import CertificateFiles
from services.common.transport import transport_of
from services.gateway.config import GatewayConfig
from tideserve.cli.cluster_folder import ClusterFolder
from tideserve.cli.default import DEFAULT_PORT
from tideserve.cli.doctor.adapters import check_adapters
from tideserve.cli.doctor.addresses import check_addresses
from tideserve.cli.doctor.certificates import check_files
from tideserve.cli.doctor.etcd import check_members, open_connected
from tideserve.cli.doctor.finding import Check, Finding, Level
from tideserve.cli.doctor.front import check_admin, check_gateway
from tideserve.cli.doctor.keys import check_keys
from tideserve.cli.doctor.machine import check_free_port, check_limits, read_limits
from tideserve.cli.doctor.records import RegisteredRecords, check_records, read_records
from tideserve.cli.errors import EXIT_FAILED, CommandError, unusable
from tideserve.cli.processes import process_faults

PARTS = ("ca", "cert", "key")
GATEWAY_ONLY = (
    "only the gateway was checked; for the whole cluster, pass its etcd with --etcd, or the port"
    " of a local cluster with --port"
)
SIGNS = {Level.OK: "[green]✓[/]", Level.WARNING: "[yellow]![/]", Level.FAILURE: "[red]✗[/]"}


@dataclass(frozen=True, slots=True)
class DoctorTarget:
    """The cluster to check: etcd and TLS options of a service, and the gateway's ports.

    `services` None: only the gateway's ports are known. `here`: the cluster runs on this machine.
    """

    services: ServiceConfig | None = None
    url: str | None = None
    api_key: str | None = None
    admin_url: str | None = None
    admin_key: str | None = None
    here: bool = False
    # Contents of cluster.json, for a local cluster.
    state: Mapping[str, Any] = field(default_factory=dict)
    # The file of API keys.
    api_keys: Path | None = None
    front: CertificateFiles = field(default_factory=lambda: CertificateFiles("http_tls"))


def target_of_folder(
    folder: ClusterFolder, api_key: str | None = None, admin_key: str | None = None
) -> DoctorTarget | None:
    """The cluster that runs from a folder, or None; the keys override its configured keys.

    Raises:
        CommandError: if its configuration is invalid.
    """
    state = folder.read_state()
    if state is None:
        return None
    with unusable(ConfigError):
        config = load_settings(GatewayConfig, folder.gateway_config, {}).config
    front = CertificateFiles(
        "http_tls", cert=config.http_tls_cert_file, key=config.http_tls_key_file
    )
    return DoctorTarget(
        services=config,
        url=str(state["url"]),
        api_key=api_key or config.api_key,
        admin_url=state.get("admin_url"),
        admin_key=admin_key or config.admin_key,
        here=True,
        state=state,
        front=front,
        api_keys=config.api_keys_file,
    )


def target_of_options(options: Mapping[str, Any], ports: Mapping[str, Any]) -> DoctorTarget:
    """A cluster on any machine; `options`: keys of a service, `ports`: fields of a DoctorTarget.

    Raises:
        CommandError: if an option is invalid.
    """
    given = {key: value for key, value in options.items() if value is not None}
    with unusable(ConfigError):
        config = from_mapping(ServiceConfig, given, "the command line") if given else None
    return DoctorTarget(services=config, **ports)


def run_doctor(target: DoctorTarget | None, folder: Path, port: int | None, as_json: bool) -> None:
    """Print the findings of all checks; `target` None: no cluster runs from `folder`.

    Raises:
        CommandError: if a check failed.
    """
    if target is None:
        findings = [
            *check_limits(read_limits()),
            check_free_port("127.0.0.1", port or DEFAULT_PORT),
            Check("cluster").failure(
                f"no cluster runs from {folder}; start a cluster with `tideserve up`"
            ),
        ]
    else:
        findings = asyncio.run(examine(target))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        show(findings)
    failures = sum(finding.level is Level.FAILURE for finding in findings)
    if failures:
        raise CommandError(f"{failures} check{'s' * (failures > 1)} failed", EXIT_FAILED)


async def examine(target: DoctorTarget) -> list[Finding]:
    """The findings of all checks; skips checks that depend on a failed check."""
    findings: list[Finding] = check_limits(read_limits()) if target.here else []
    config = target.services
    records = None
    if config is not None:
        findings += _certificates(config, target.front)
        if not any(finding.level is Level.FAILURE for finding in findings):
            cluster_findings, records = await _cluster(config)
            findings += cluster_findings
    if target.state:
        findings += _processes(target.state, records)
    if target.api_keys is not None:
        wants_admin = target.admin_url is not None and target.admin_key is None
        findings += await asyncio.to_thread(check_keys, target.api_keys.expanduser(), wants_admin)
    if target.url is not None:
        findings += await asyncio.to_thread(check_gateway, target.url, target.api_key)
        if config is None:
            findings.append(Check("scope").warning(GATEWAY_ONLY))
    status = None
    if target.admin_url is not None:
        admin, status = await asyncio.to_thread(check_admin, target.admin_url, target.admin_key)
        findings.append(admin)
    if records is not None:
        findings += await asyncio.to_thread(
            partial(check_adapters, records.adapters, records.workers, status, here=target.here)
        )
    return findings


def _certificates(config: ServiceConfig, front: CertificateFiles) -> list[Finding]:
    pairs = [
        CertificateFiles(kind, *(getattr(config, f"{kind}_{part}_file") for part in PARTS))
        for kind in ("etcd", "tls")
    ]
    return [finding for files in (*pairs, front) for finding in check_files(files, time.time())]


def _processes(state: Mapping[str, Any], records: RegisteredRecords | None) -> list[Finding]:
    """Check that processes of `tideserve up` run and that its workers are registered."""
    check = Check("processes")
    registered = None if records is None else {worker.worker_id for worker in records.workers}
    faults = [check.failure(fault) for fault in process_faults(state, registered)]
    return faults or [check.fine(f"{len(state['pids'])} processes of `tideserve up` are running")]


async def _cluster(config: ServiceConfig) -> tuple[list[Finding], RegisteredRecords | None]:
    """Findings, and the records of the cluster (None if unknown)."""
    store = await open_connected(config)
    if isinstance(store, Finding):
        return [store], None
    try:
        findings = await check_members(config)
        records = await read_records(store)
    except StoreError as error:
        return [Check("etcd").failure(str(error))], None
    finally:
        await store.close()
    urls = [part.strip().partition("://")[2] or part.strip() for part in config.etcd_url.split(",")]
    local = all(is_loopback(host_of(url)) for url in urls)
    findings += check_records(records, config.etcd_prefix, local)
    findings += await check_addresses(records, transport_of(config))
    return findings, records


def show(findings: list[Finding]) -> None:
    """Print a line per finding."""
    console = Console(highlight=False)
    for finding in findings:
        line = f"{SIGNS[finding.level]} [dim]{finding.check}:[/] {escape(finding.sentence)}"
        console.print(line, soft_wrap=True)
