"""The options of `tideserve doctor`. Everything heavy is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from tideserve.cli.default import DEFAULT_PORT
from tideserve.cli.option_types import AdminKey, AdminUrl, ApiKey, ClusterDir

EXAMPLES = (
    "Examples:\n\n"
    "  tideserve doctor\n\n"
    "  tideserve doctor --json | jq '.[] | select(.level != \"ok\")'\n\n"
    "  tideserve doctor --url http://gateway:8000 --etcd http://etcd:2379"
)
ETCD, TLS = "etcd", "TLS between services"


def doctor(
    context: typer.Context,
    port: Annotated[
        int | None,
        typer.Option(
            help="HTTP port of a cluster on this machine; goes before TIDESERVE_URL.",
            show_default=str(DEFAULT_PORT),
        ),
    ] = None,
    cluster_dir: ClusterDir = None,
    url: Annotated[
        str | None,
        typer.Option(envvar="TIDESERVE_URL", help="The gateway of a cluster, here or anywhere."),
    ] = None,
    api_key: ApiKey = None,
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="The file of keys of a cluster anywhere.",
            show_default="that of the cluster on this machine",
        ),
    ] = None,
    etcd: Annotated[
        str | None,
        typer.Option(
            help="etcd of a cluster anywhere, as its services are told it.", rich_help_panel=ETCD
        ),
    ] = None,
    etcd_prefix: Annotated[
        str | None,
        typer.Option(
            help="Prefix of the cluster's keys.", show_default="/tideserve/", rich_help_panel=ETCD
        ),
    ] = None,
    etcd_user: Annotated[
        str | None, typer.Option(help="User name at etcd.", rich_help_panel=ETCD)
    ] = None,
    etcd_password: Annotated[
        str | None,
        typer.Option(
            envvar="TIDESERVE_ETCD_PASSWORD", help="Password of that user.", rich_help_panel=ETCD
        ),
    ] = None,
    etcd_ca_file: Annotated[
        Path | None, typer.Option(help="CA of etcd's certificate.", rich_help_panel=ETCD)
    ] = None,
    etcd_cert_file: Annotated[
        Path | None, typer.Option(help="Certificate to show to etcd.", rich_help_panel=ETCD)
    ] = None,
    etcd_key_file: Annotated[
        Path | None, typer.Option(help="Its private key.", rich_help_panel=ETCD)
    ] = None,
    tls_ca_file: Annotated[
        Path | None, typer.Option(help="CA of the cluster.", rich_help_panel=TLS)
    ] = None,
    tls_cert_file: Annotated[
        Path | None, typer.Option(help="Certificate to show to services.", rich_help_panel=TLS)
    ] = None,
    tls_key_file: Annotated[
        Path | None, typer.Option(help="Its private key.", rich_help_panel=TLS)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Find what is wrong with a cluster: each thing in a sentence, with its remedy.

    Looks at the cluster on this machine, or at any other by --etcd and --url. Ends with 1 if
    anything is wrong.
    """
    from dataclasses import replace

    from tideserve.cli.admin import local_folder
    from tideserve.cli.cluster_folder import ClusterFolder, default_folder
    from tideserve.cli.doctor.run import run_doctor, target_of_folder, target_of_options

    source = context.get_parameter_source("url")
    if (port or cluster_dir) and source is not None and source.name == "ENVIRONMENT":
        url = None
    folder = ClusterFolder(cluster_dir or default_folder(port or DEFAULT_PORT))
    if etcd is None and api_keys is None:
        here = folder if url is None else local_folder(url)
        target = target_of_folder(here, api_key, admin_key) if here is not None else None
        if target is not None and url is not None and admin_url is not None:
            target = replace(target, admin_url=admin_url)
        if target is not None or url is None:
            run_doctor(target, folder.root, port, json)
            return
    options = {
        "etcd_url": etcd,
        "etcd_prefix": etcd_prefix,
        "etcd_user": etcd_user,
        "etcd_password": etcd_password,
        "etcd_ca_file": etcd_ca_file,
        "etcd_cert_file": etcd_cert_file,
        "etcd_key_file": etcd_key_file,
        "tls_ca_file": tls_ca_file,
        "tls_cert_file": tls_cert_file,
        "tls_key_file": tls_key_file,
    }
    doors = {
        "url": url,
        "api_key": api_key,
        "admin_url": admin_url,
        "admin_key": admin_key,
        "api_keys": api_keys,
    }
    run_doctor(target_of_options(options, doors), folder.root, None, json)
