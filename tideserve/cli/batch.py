"""`tideserve batch`: submits files of requests, follows batches and writes their results."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.table import Table

from tideserve.cli.client import HttpClient
from tideserve.cli.errors import CommandError, Unreachable, unusable

BATCHES, FILES = "/v1/batches", "/v1/files"
ENDED = frozenset({"completed", "failed", "cancelled", "expired"})
POLL_S = 2.0
POLL_TIMEOUT_S = 30.0
# An upload is answered once the file is on disk.
UPLOAD_TIMEOUT_S = 300.0
UNREACHABLE_MAX_S = 300.0
LISTED = 20
FIRST_LINE_BYTES_MAX = 8 * 2**20

Batch = Mapping[str, Any]


def submit(
    url: str, api_key: str | None, file: Path, window: str, wait: bool, output: Path | None
) -> None:
    """Upload `file`, create a batch, and perhaps wait for its results. Raises CommandError."""
    endpoint = endpoint_of(file)
    with HttpClient(url, api_key, UPLOAD_TIMEOUT_S) as client:
        with unusable(OSError), file.open("rb") as content:
            uploaded = client.upload(FILES, {"purpose": "batch"}, file.name, content)
        batch = client.post_json(
            BATCHES,
            {
                "input_file_id": uploaded["id"],
                "endpoint": endpoint,
                "completion_window": window,
            },
        )
    print(batch["id"])
    if not wait:
        return
    with HttpClient(url, api_key, POLL_TIMEOUT_S) as client:
        batch = follow(client, str(batch["id"]))
        if output is not None and batch["status"] != "failed":
            _write(client, batch, output)
    _check_outcome(batch)


def endpoint_of(file: Path) -> str:
    """The endpoint of the first request in `file`. Raises CommandError."""
    if not file.is_file():
        raise CommandError(f"{file} is not a file; name a file with a request per line")
    with unusable(OSError), file.open("rb") as content:
        first = content.readline(FIRST_LINE_BYTES_MAX)
    if not first.strip():
        raise CommandError(f"{file} does not begin with a request; write a request per line")
    try:
        return str(json.loads(first)["url"])
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"the first line of {file} is not a request with 'url'; see `tideserve batch --help`"
        ) from error


def follow(client: HttpClient, batch_id: str) -> Batch:
    """Show the progress of a batch until its end; returns it. Raises CommandError."""
    console = Console(stderr=True, highlight=False)
    reached_s = time.monotonic()
    with console.status("waiting") as spinner:
        while True:
            try:
                batch: Batch = client.get_json(f"{BATCHES}/{batch_id}")
            except Unreachable:
                # Batches survive restarts of the gateway.
                if time.monotonic() - reached_s > UNREACHABLE_MAX_S:
                    raise
            else:
                reached_s = time.monotonic()
                if batch["status"] in ENDED:
                    return batch
                spinner.update(progress_line(batch))
            time.sleep(POLL_S)


def progress_line(batch: Batch) -> str:
    """State, counts, rate and time left of a batch."""
    counts, progress = batch["request_counts"], batch.get("progress") or {}
    ended = counts["completed"] + counts["failed"]
    parts = [f"{batch['status']}: {ended:,} of {counts['total']:,} lines"]
    if counts["failed"]:
        parts.append(f"{counts['failed']:,} failed")
    if (rate := progress.get("tokens_per_s")) is not None:
        parts.append(f"{rate:,.0f} tokens/s")
    if (left_s := progress.get("left_s")) is not None:
        parts.append(f"{duration(left_s)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """A duration with two units at most, such as 2 h 5 min."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minute} min"
    return f"{minute} min {second} s" if minute else f"{second} s"


def show_status(url: str, api_key: str | None, batch_id: str | None, as_json: bool) -> None:
    """Print a batch, or a table of the latest batches. Raises CommandError."""
    with HttpClient(url, api_key) as client:
        if batch_id is not None:
            shown = client.get_json(f"{BATCHES}/{batch_id}")
            batches = [shown]
        else:
            shown = client.get_json(f"{BATCHES}?limit={LISTED}")
            batches = shown["data"]
    if as_json:
        print(json.dumps(shown, indent=2))
        return
    table = Table("batch", "state", "lines", "failed", "tokens/s", "left", box=None)
    for batch in batches:
        table.add_row(*_cells(batch))
    Console(highlight=False).print(table)
    for error in _errors(batches[0]) if batch_id is not None else ():
        print(error)


def _cells(batch: Batch) -> list[str]:
    counts, progress = batch["request_counts"], batch.get("progress") or {}
    rate, left_s = progress.get("tokens_per_s"), progress.get("left_s")
    return [
        str(batch["id"]),
        str(batch["status"]),
        f"{counts['completed'] + counts['failed']:,} of {counts['total']:,}",
        f"{counts['failed']:,}",
        "" if rate is None else f"{rate:,.0f}",
        "" if left_s is None else duration(left_s),
    ]


def write_results(url: str, api_key: str | None, batch_id: str, output: Path | None) -> None:
    """Write the results of an ended batch to `output` or standard output. Raises CommandError."""
    with HttpClient(url, api_key, POLL_TIMEOUT_S) as client:
        batch = client.get_json(f"{BATCHES}/{batch_id}")
        if batch["status"] not in ENDED:
            raise CommandError(f"the batch has not ended ({progress_line(batch)}); wait for it")
        if batch["status"] == "failed":
            _check_outcome(batch)
        if output is not None:
            _write(client, batch, output)
        else:
            _copy(client, batch, sys.stdout.buffer)


def cancel(url: str, api_key: str | None, batch_id: str) -> None:
    """Cancel a batch. Raises CommandError."""
    with HttpClient(url, api_key) as client:
        batch = client.post_json(f"{BATCHES}/{batch_id}/cancel", {})
    print(f"{batch_id}: {batch['status']}")


def _write(client: HttpClient, batch: Batch, output: Path) -> None:
    partial = output.with_name(output.name + ".part")
    with unusable(OSError):
        with partial.open("wb") as file:
            _copy(client, batch, file)
        partial.replace(output)


def _copy(client: HttpClient, batch: Batch, target: BinaryIO) -> None:
    for key in ("output_file_id", "error_file_id"):
        if (file_id := batch.get(key)) is not None:
            client.download(f"{FILES}/{file_id}/content", target)


def _check_outcome(batch: Batch) -> None:
    """Raise CommandError unless each line has an answer."""
    counts = batch["request_counts"]
    if batch["status"] == "completed" and not counts["failed"]:
        return
    errors = _errors(batch)
    more = f": {'; '.join(errors)}" if errors else ""
    if batch["status"] == "failed":
        raise CommandError(f"the file is invalid, and no line ran{more}")
    missing = counts["total"] - counts["completed"]
    raise CommandError(
        f"the batch is {batch['status']}, {missing} of {counts['total']} lines have no answer{more}"
    )


def _errors(batch: Batch) -> list[str]:
    """The errors of the validation."""
    listed = (batch.get("errors") or {}).get("data", ())
    return [
        f"line {error['line']}: {error['message']}" if error.get("line") else str(error["message"])
        for error in listed
    ]
