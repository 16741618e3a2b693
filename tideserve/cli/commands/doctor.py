"""The options of `tideserve doctor`. Slow imports happen when the command runs."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tideserve.cli.default import DEFAULT_PORT
from tideserve.cli.option_types import AdminKey, AdminUrl, ApiKey, ClusterDir

EXAMPLES = (
    "Examples:\n\n"
    "  tideserve doctor\n\n"
    "  tideserve doctor --json | jq '.[] | select(.level != \"ok\")'\n\n"
    "  tideserve doctor --url http://gateway:8000 --etcd http://etcd:2379"
)
_etcd = partial(typer.Option, rich_help_panel="etcd")
_tls = partial(typer.Option, rich_help_panel="TLS between services")


Port = Annotated[
    int | None,
    typer.Option(
        help="HTTP port of a cluster on this machine; overrides TIDESERVE_URL.",
        show_default=str(DEFAULT_PORT),
    ),
]
GatewayUrl = Annotated[
    str | None,
    typer.Option(envvar="TIDESERVE_URL", help="URL of the gateway of a cluster on any machine."),
]
ApiKeys = Annotated[
    Path | None,
    typer.Option(
        help="File of API keys; needed only for a cluster on other machines.",
        show_default="the file of the cluster on this machine",
    ),
]
EtcdUrl = Annotated[
    str | None,
    _etcd(help="URL of etcd; needed only for a cluster on other machines."),
]
EtcdPrefix = Annotated[
    str | None,
    _etcd(help="Prefix of the cluster's keys.", show_default="/tideserve/"),
]
EtcdUser = Annotated[str | None, _etcd(help="User name for etcd.")]
EtcdPassword = Annotated[
    str | None,
    _etcd(envvar="TIDESERVE_ETCD_PASSWORD", help="Password of that user."),
]
EtcdCa = Annotated[Path | None, _etcd(help="CA of etcd's certificate.")]
EtcdCertificate = Annotated[Path | None, _etcd(help="Certificate to show to etcd.")]
EtcdKey = Annotated[Path | None, _etcd(help="Private key of that certificate.")]
TlsCa = Annotated[Path | None, _tls(help="CA of the cluster.")]
TlsCertificate = Annotated[Path | None, _tls(help="Certificate to show to services.")]
TlsKey = Annotated[Path | None, _tls(help="Private key of that certificate.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def doctor(
    context: typer.Context,
    port: Port = None,
    cluster_dir: ClusterDir = None,
    url: GatewayUrl = None,
    api_key: ApiKey = None,
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
    api_keys: ApiKeys = None,
    etcd: EtcdUrl = None,
    etcd_prefix: EtcdPrefix = None,
    etcd_user: EtcdUser = None,
    etcd_password: EtcdPassword = None,
    etcd_ca_file: EtcdCa = None,
    etcd_cert_file: EtcdCertificate = None,
    etcd_key_file: EtcdKey = None,
    tls_ca_file: TlsCa = None,
    tls_cert_file: TlsCertificate = None,
    tls_key_file: TlsKey = None,
    json: Json = False,
) -> None:
    """Diagnose a cluster: print each fault as a sentence with its remedy.

    Checks the cluster on this machine, or the cluster of --etcd and --url. The exit code is 1 if a
    check fails.
    """
    given = dict(context.params)
    source = context.get_parameter_source("url")
    if (port or cluster_dir) and source is not None and source.name == "ENVIRONMENT":
        given["url"] = None
    _examine(given)


def _examine(given: Mapping[str, Any]) -> None:
    """Check the cluster that the options select. Raises CommandError."""
    from dataclasses import replace

    from tideserve.cli.cluster_folder import ClusterFolder, default_folder, local_folder
    from tideserve.cli.doctor.run import run_doctor, target_of_folder, target_of_options

    url, port, json = given["url"], given["port"], given["json"]
    folder = ClusterFolder(given["cluster_dir"] or default_folder(port or DEFAULT_PORT))
    if given["etcd"] is None and given["api_keys"] is None:
        here = folder if url is None else local_folder(url)
        target = None
        if here is not None:
            target = target_of_folder(here, given["api_key"], given["admin_key"])
        if target is not None and url is not None and given["admin_url"] is not None:
            target = replace(target, admin_url=given["admin_url"])
        if target is not None or url is None:
            run_doctor(target, folder.root, port, json)
            return
    options = {key: value for key, value in given.items() if key.startswith(("etcd_", "tls_"))}
    ports = {key: given[key] for key in ("url", "api_key", "admin_url", "admin_key", "api_keys")}
    target = target_of_options(options | {"etcd_url": given["etcd"]}, ports)
    run_doctor(target, folder.root, None, json)
