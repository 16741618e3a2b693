"""`tideserve key`: who may use a cluster. Everything heavy is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

key = typer.Typer(
    help="Make, list and revoke the keys in a file for `tideserve up --api-keys FILE`.\n\n"
    "Gateways read the file again when it changes. To change the limits of an owner, edit them in"
    " every line of that owner: requests_per_minute, tokens_per_minute, concurrent.",
    no_args_is_help=True,
)
KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="The file of keys.")]


@key.command(
    epilog="Examples:\n\n"
    "  tideserve key new --owner alice --requests-per-minute 600 keys.jsonl\n\n"
    "  tideserve key new --owner ops --admin keys.jsonl"
)
def new(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file of keys; made if there is none.")
    ],
    owner: Annotated[
        str, typer.Option(help="The owner of the key; keys of one owner share limits.")
    ],
    admin: Annotated[
        bool,
        typer.Option("--admin", help="The key also opens the admin port, for merges and splits."),
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model that the key may use; repeatable.", show_default="all"),
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Requests of the owner in a minute.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompts and outputs in a minute.")
    ] = None,
    concurrent: Annotated[
        int | None, typer.Option(min=1, help="Requests of the owner at once.")
    ] = None,
) -> None:
    """Make a key, append its hash to FILE and print the key. It cannot be shown again.

    Without limits the key has those of the owner's other keys.
    """
    from services.core.quota.limits import QuotaLimits
    from tideserve.cli.keys import add_key

    limits = QuotaLimits(requests_per_minute, tokens_per_minute, concurrent)
    print(add_key(file, owner, admin, model or None, limits))


@key.command("list", epilog="Examples:\n\n  tideserve key list keys.jsonl")
def show(
    file: KeyFile,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show whose keys are in FILE, and what they allow."""
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
        typer.Argument(metavar="[ID]...", help="Keys as `tideserve key list` shows them."),
    ] = None,
    owner: Annotated[str | None, typer.Option(help="All keys of this owner.")] = None,
) -> None:
    """Take keys out of FILE; gateways refuse them within seconds."""
    from tideserve.cli.keys import revoke_keys

    count = revoke_keys(file, key_id or [], owner)
    print(f"{file}: {count} key{'s' if count != 1 else ''} revoked")
