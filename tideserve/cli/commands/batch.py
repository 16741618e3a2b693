"""`tideserve batch`: requests in a file. Slow imports happen when the command runs."""

from pathlib import Path
from typing import Annotated

import typer

from tideserve.cli.default import DEFAULT_URL
from tideserve.cli.option_types import ApiKey, Url

batch = typer.Typer(
    help="Run a file of requests in the background, each answered exactly once.\n\n"
    'Each line is an object: {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",'
    ' "body": {…}}.',
    no_args_is_help=True,
)
BatchId = Annotated[str, typer.Argument(metavar="ID", help="Id of the batch.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="File for the answers, then the errors.")
]


@batch.command(
    epilog="Examples:\n\n"
    "  tideserve batch submit requests.jsonl\n\n"
    "  tideserve batch submit requests.jsonl --wait -o answers.jsonl"
)
def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File with a request per line.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    window: Annotated[
        str, typer.Option(help="Time in which the batch should complete: 1h to 7d.")
    ] = "24h",
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end, and show the progress.")
    ] = False,
    output: Output = None,
) -> None:
    """Upload FILE and create a batch of its lines; print the batch's id.

    With --output it also waits.
    """
    from tideserve.cli.batch import submit as run

    run(url, api_key, file, window, wait or output is not None, output)


@batch.command(
    epilog="Examples:\n\n  tideserve batch status\n\n  tideserve batch status batch_5f0c3ab1 --json"
)
def status(
    batch_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Id of the batch.", show_default="the latest batches"),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show state, progress and time left of batches."""
    from tideserve.cli.batch import show_status

    show_status(url, api_key, batch_id, json)


@batch.command(epilog="Examples:\n\n  tideserve batch results batch_5f0c3ab1 -o answers.jsonl")
def results(
    batch_id: BatchId, url: Url = DEFAULT_URL, api_key: ApiKey = None, output: Output = None
) -> None:
    """Write the answers of an ended batch, then its errors, to standard output or a file."""
    from tideserve.cli.batch import write_results

    write_results(url, api_key, batch_id, output)


@batch.command(epilog="Examples:\n\n  tideserve batch cancel batch_5f0c3ab1")
def cancel(batch_id: BatchId, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Cancel a batch; lines that have ended keep their answers."""
    from tideserve.cli.batch import cancel as run

    run(url, api_key, batch_id)
