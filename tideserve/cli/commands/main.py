"""The `tideserve` command. Everything heavy is imported by the command that needs it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tideserve.cli.cache import keep_bytecode
from tideserve.cli.commands import checkout, doctor, engine, key, profile, serve, simulate, up
from tideserve.cli.default import DEFAULT_PORT, DEFAULT_URL
from tideserve.cli.errors import CommandError
from tideserve.cli.option_command import option_command
from tideserve.cli.option_types import AdminKey, AdminUrl, ApiKey, ClusterDir, Url

app = typer.Typer(
    name="tideserve",
    help="Serve a large language model from a cluster of workers on this machine.\n\n"
    "Start with [bold]tideserve serve[/], then try [bold]tideserve chat[/] in another terminal.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.command(cls=option_command(serve.FLAGS), epilog=serve.EXAMPLES)(serve.serve)
app.command(cls=option_command(up.FLAGS), epilog=up.EXAMPLES)(up.up)


@app.command(
    epilog="Examples:\n\n"
    "  tideserve status\n\n"
    "  tideserve status --why\n\n"
    "  tideserve status --json | jq .workers"
)
def status(
    url: Url = DEFAULT_URL,
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
    cluster_dir: ClusterDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    why: Annotated[
        bool,
        typer.Option("--why", help="Also the latest decisions about memory and the last losses."),
    ] = False,
) -> None:
    """Show services, workers and groups of a running cluster."""
    from tideserve.cli.cluster_folder import find_admin_url, find_folder
    from tideserve.cli.status import show_status

    folder = find_folder(url, cluster_dir) if admin_url is None or cluster_dir else None
    show_status(find_admin_url(admin_url, url, cluster_dir), admin_key, json, why, folder)


@app.command(
    epilog="Examples:\n\n"
    "  tideserve plan --demand 400MiB\n\n"
    "  tideserve plan --demand 20TiB --instances 10000"
)
def plan(
    demand: Annotated[
        str, typer.Option(help="KV that is needed beyond what is free, such as 4GiB.")
    ],
    url: Url = DEFAULT_URL,
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
    cluster_dir: ClusterDir = None,
    instances: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="Plan for so many made-up instances of a 14B model, without a cluster.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show which groups would merge to free that much memory; nothing is changed."""
    from tideserve.cli.cluster_folder import find_admin_url
    from tideserve.cli.plan import show_plan

    # A made-up cluster is nowhere.
    place = "" if instances is not None else find_admin_url(admin_url, url, cluster_dir)
    show_plan(demand, place, admin_key, instances, json)


@app.command(
    epilog="Examples:\n\n  tideserve drop\n\n  tideserve drop group-worker-0 group-worker-1"
)
def drop(
    groups: Annotated[
        list[str] | None,
        typer.Argument(help="Groups as `tideserve status` shows them.", show_default="all"),
    ] = None,
    url: Url = DEFAULT_URL,
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
    cluster_dir: ClusterDir = None,
) -> None:
    """Merge groups by hand: each worker drops layers that another one runs, and gets KV cache.

    Requests go on. Waits until the merged group serves, or says why it does not.
    """
    from tideserve.cli.cluster_folder import find_admin_url
    from tideserve.cli.groups import drop as run

    run(find_admin_url(admin_url, url, cluster_dir), admin_key, groups or [])


@app.command(epilog="Examples:\n\n  tideserve restore\n\n  tideserve restore group-worker-0")
def restore(
    group: Annotated[
        str | None,
        typer.Argument(
            help="Merged group as `tideserve status` shows it.", show_default="the only one"
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
    cluster_dir: ClusterDir = None,
) -> None:
    """Split a merged group by hand: each worker takes its layers back.

    Requests go on. Waits until all workers serve alone, or says why they do not.
    """
    from tideserve.cli.cluster_folder import find_admin_url
    from tideserve.cli.groups import restore as run

    run(find_admin_url(admin_url, url, cluster_dir), admin_key, group)


@app.command(
    epilog="Examples:\n\n"
    "  tideserve chat\n\n"
    "  tideserve chat 'What is the capital of France?' --temperature 0\n\n"
    "  git diff | tideserve chat --system 'Summarise this change.'"
)
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask; without it, standard input.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask.", show_default="the one that is served")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the likeliest token.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
) -> None:
    """Talk to the served model; answers are shown as they are made."""
    from tideserve.cli.chat import chat as run

    run(url, api_key, prompt, model, system, temperature, max_tokens)


@app.command(
    epilog="Examples:\n\n"
    "  tideserve logs\n\n"
    "  tideserve logs worker-0 --follow\n\n"
    "  tideserve logs gateway --lines 500 --raw | jq ."
)
def logs(
    service: Annotated[
        str | None,
        typer.Argument(
            help="gateway, scheduler, memmgr, worker-0, …, etcd.", show_default="all, merged"
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="HTTP port of the cluster.")] = DEFAULT_PORT,
    cluster_dir: ClusterDir = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as lines are written.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Lines of each service to begin with.")
    ] = 50,
    raw: Annotated[bool, typer.Option("--raw", help="Lines as they were written.")] = False,
) -> None:
    """Show what the services of a cluster on this machine wrote."""
    from tideserve.cli.cluster_folder import ClusterFolder, default_folder
    from tideserve.cli.logs import show_logs

    folder = ClusterFolder(cluster_dir or default_folder(port))
    show_logs(folder.logs, service, lines, follow, raw)


checkout.add_bench(app)


@app.command(
    epilog="Examples:\n\n"
    "  tideserve certs certs\n\n"
    "  tideserve certs certs --host llm.example.com --days 30"
)
def certs(
    folder: Annotated[Path, typer.Argument(help="Where the files go; a CA there is used again.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Another host name or address of etcd and the gateway; repeatable."),
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, max=3650, help="Days until the certificates expire.")
    ] = 90,
) -> None:
    """Make a development CA and a certificate for each service, etcd and HTTP.

    Run it again to renew them: services read changed files without a restart.
    """
    from tideserve.cli.certificates import write_certificates

    names = write_certificates(folder, host or (), days)
    print(f"{folder}: ca.pem, and NAME.pem with NAME-key.pem for {', '.join(names)}")
    print("ca-key.pem signs for every role: keep it away from the services.")


app.add_typer(key.key, name="key")
app.add_typer(engine.engine, name="engine")


@app.command()
def demo() -> None:
    """Watch memory change its purpose: a flood of requests under two overload policies.

    Starts a small cluster for each policy and ends by itself.
    """
    from tideserve.cli.demo import run_demo

    run_demo()


app.command(epilog=doctor.EXAMPLES)(doctor.doctor)
app.command(epilog=simulate.EXAMPLES)(simulate.simulate)
app.command(cls=option_command(profile.FLAGS), epilog=profile.EXAMPLES)(profile.profile)


@app.command()
def version() -> None:
    """Print the version."""
    from services.common.version import SOURCE, installed_version

    found = installed_version()
    print(f"tideserve ({found})" if found == SOURCE else f"tideserve {found}")


def main() -> None:
    """Entry point: errors are one sentence on standard error and an exit code."""
    keep_bytecode()
    try:
        app()
    except CommandError as error:
        print(f"tideserve: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output has had enough, as in `tideserve logs | head`.
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
