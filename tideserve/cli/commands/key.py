"""`tideserve key`: API keys of a cluster. Slow imports happen when the command runs."""

from pathlib import Path
from typing import Annotated

import typer

key = typer.Typer(
    help="Create, list and revoke API keys in a file for `tideserve up --api-keys FILE`.\n\n"
    "Gateways reload the file when it changes. To change the limits of an owner, edit them in"
    " every line of that owner: requests_per_minute, tokens_per_minute, concurrent,"
    " batch_tokens_queued, batch_counts.",
    no_args_is_help=True,
)
KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="File of API keys.")]


@key.command(
    epilog="Examples:\n\n"
    "  tideserve key new --owner alice --requests-per-minute 600 keys.jsonl\n\n"
    "  tideserve key new --owner ops --admin keys.jsonl"
)
def new(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File of API keys; created if missing.")
    ],
    owner: Annotated[
        str, typer.Option(help="Owner of the key; all keys of an owner share limits.")
    ],
    admin: Annotated[
        bool,
        typer.Option(
            "--admin", help="The key also authorises status, merges and splits on the admin port."
        ),
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model that the key may use; repeatable.", show_default="all"),
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Requests per minute of the owner.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of prompts and outputs per minute of the owner."),
    ] = None,
    concurrent: Annotated[
        int | None, typer.Option(min=1, help="Concurrent requests of the owner.")
    ] = None,
    batch_tokens_queued: Annotated[
        int | None,
        typer.Option(min=1, help="Estimated tokens of the owner's batches that have not ended."),
    ] = None,
    batch_counts: Annotated[
        bool, typer.Option("--batch-counts", help="Lines of batches count towards the limits.")
    ] = False,
) -> None:
    """Create a key, append its hash to FILE and print the key, which cannot be shown again.

    Without limits, the key gets the limits of the owner's other keys.
    """
    from services.core.quota.limits import QuotaLimits
    from tideserve.cli.keys import add_key

    limits = QuotaLimits(
        requests_per_minute, tokens_per_minute, concurrent, batch_tokens_queued, batch_counts
    )
    print(add_key(file, owner, admin, model or None, limits))


@key.command("list", epilog="Examples:\n\n  tideserve key list keys.jsonl")
def show(
    file: KeyFile,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the owners and limits of the keys in FILE."""
    from tideserve.cli.keys import show_keys

    show_keys(file, json)


@key.command(
    epilog="Examples:\n\n"
    "  tideserve key revoke keys.jsonl 5f0c3ab1d2e4\n\n"
    "  tideserve key revoke keys.jsonl --owner alice"
)
def revoke(
    file: KeyFile,
    key_id: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]", help="Ids of keys, from `tideserve key list`."),
    ] = None,
    owner: Annotated[str | None, typer.Option(help="All keys of this owner.")] = None,
) -> None:
    """Revoke keys in FILE; gateways reject them within seconds."""
    from tideserve.cli.keys import revoke_keys

    count = revoke_keys(file, key_id or [], owner)
    print(f"{file}: {count} key{'s' if count != 1 else ''} revoked")
