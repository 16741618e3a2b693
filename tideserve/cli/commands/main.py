"""The `tideserve` command. Each command imports slow modules when it runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tideserve.cli.cache import keep_bytecode
from tideserve.cli.commands import (
    batch,
    checkout,
    doctor,
    engine,
    key,
    profile,
    serve,
    simulate,
    up,
)
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
        typer.Option(
            "--why",
            help="Also show memory decisions, why groups are as they are, the last losses, and the"
            " last refusals for lateness.",
        ),
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
        str, typer.Option(help="KV cache needed beyond the free blocks, such as 4GiB.")
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
            help="Plan for this many example instances of a 14B model, without a cluster.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the merges that would free --demand of memory, without merging."""
    from tideserve.cli.cluster_folder import find_admin_url
    from tideserve.cli.plan import show_plan

    # An example cluster has no URL.
    place = "" if instances is not None else find_admin_url(admin_url, url, cluster_dir)
    show_plan(demand, place, admin_key, instances, json)


@app.command(
    epilog="Examples:\n\n  tideserve drop\n\n  tideserve drop group-worker-0 group-worker-1"
)
def drop(
    groups: Annotated[
        list[str] | None,
        typer.Argument(help="Groups to merge, from `tideserve status`.", show_default="all"),
    ] = None,
    url: Url = DEFAULT_URL,
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
    cluster_dir: ClusterDir = None,
) -> None:
    """Merge groups: each worker drops the layers that other members run and gains KV cache.

    Requests continue. Waits until the merged group serves, or prints why the merge failed.
    """
    from tideserve.cli.cluster_folder import find_admin_url
    from tideserve.cli.groups import drop as run

    run(find_admin_url(admin_url, url, cluster_dir), admin_key, groups or [])


@app.command(
    epilog="Examples:\n\n  tideserve restore\n\n  tideserve restore group-worker-0 --parts 2"
)
def restore(
    group: Annotated[
        str | None,
        typer.Argument(
            help="Merged group, from `tideserve status`.", show_default="the only merged group"
        ),
    ] = None,
    parts: Annotated[
        int | None,
        typer.Option(help="Number of new groups.", min=2, show_default="one for each worker"),
    ] = None,
    url: Url = DEFAULT_URL,
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
    cluster_dir: ClusterDir = None,
) -> None:
    """Split a merged group: its workers restore the layers of their new groups.

    Requests go on. Waits until the new groups serve, or says why they do not.
    """
    from tideserve.cli.cluster_folder import find_admin_url
    from tideserve.cli.groups import restore as run

    run(find_admin_url(admin_url, url, cluster_dir), admin_key, group, parts)


@app.command(
    epilog="Examples:\n\n"
    "  tideserve move --from worker-0\n\n"
    "  tideserve move --from worker-0 --to worker-1 --requests 3"
)
def move(
    source: Annotated[str, typer.Option("--from", help="Worker that the requests leave.")],
    target: Annotated[
        str | None,
        typer.Option("--to", help="Worker that gets them.", show_default="that with most free KV"),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Number of requests.", show_default="all that can move"),
    ] = None,
    url: Url = DEFAULT_URL,
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
    cluster_dir: ClusterDir = None,
) -> None:
    """Move running requests to another worker, with their KV; their streams continue.

    Both workers must be alone in their groups and run the same model and code. Requests move from
    their first output token on.
    """
    from tideserve.cli.cluster_folder import find_admin_url
    from tideserve.cli.move import move as run

    run(find_admin_url(admin_url, url, cluster_dir), admin_key, source, target, requests)


@app.command(
    epilog="Examples:\n\n"
    "  tideserve chat\n\n"
    "  tideserve chat 'What is the capital of France?' --temperature 0\n\n"
    "  git diff | tideserve chat --system 'Summarise this change.'"
)
def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; default: all of standard input, as one message."),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model.", show_default="the served model")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of an answer.")] = None,
) -> None:
    """Chat with the served model; answers are streamed."""
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
        bool, typer.Option("--follow", "-f", help="Continue with new lines.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of last lines per service.")
    ] = 50,
    raw: Annotated[bool, typer.Option("--raw", help="Print lines without formatting.")] = False,
) -> None:
    """Show the logs of a cluster on this machine."""
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
    folder: Annotated[Path, typer.Argument(help="Folder of the files; an existing CA is kept.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Additional host name or address of etcd and the gateway; repeatable."),
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, max=3650, help="Days until the certificates expire.")
    ] = 90,
) -> None:
    """Create a development CA and certificates for each service, etcd and HTTP.

    Repeat the command to renew them: services reload changed files without a restart.
    """
    from tideserve.cli.certificates import write_certificates

    names = write_certificates(folder, host or (), days)
    print(f"{folder}: ca.pem, and NAME.pem with NAME-key.pem for {', '.join(names)}")
    print("ca-key.pem signs for every role: keep it away from the services.")


app.add_typer(batch.batch, name="batch")
app.add_typer(key.key, name="key")
app.add_typer(engine.engine, name="engine")


@app.command()
def demo() -> None:
    """Watch parameter memory become KV cache in a burst of requests, under two overload policies.

    Starts a small cluster for each policy and stops at the end.
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

    number = installed_version()
    print(f"tideserve ({number})" if number == SOURCE else f"tideserve {number}")


def main() -> None:
    """Entry point: prints an error as a sentence and returns an exit code."""
    keep_bytecode()
    try:
        app()
    except CommandError as error:
        print(f"tideserve: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of the output has closed the pipe, as in `tideserve logs | head`.
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
