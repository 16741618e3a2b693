"""Scripted tours of clients that nobody here wrote, against real weights.

`python scripts/client_tours.py [CLIENT…]` starts a cluster of one worker with the default model, or
takes the one at --url, and lets each client make its calls from an environment of its own. Prints
each call and a table, writes build/client-tours.json, and ends with 1 when a call failed. With
--docs the rows of docs/clients.md are written anew for the clients that made their tour. A tour may
be made in slices: --seconds begins no call after so long, and --continue leaves out what passed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import yaml
from tour_environments import CLIENTS, Client, EnvironmentFailed, ensure
from tour_results import PAGE, with_rows
from tours.tour import KINDS, REQUIRED_KINDS, UNFINISHED

from tideserve.cli.cache import cache_root
from tideserve.cli.local_cluster import (
    ServerProcess,
    answers,
    free_port,
    python_environment,
    up_command,
)
from tideserve.cli.model_store import resolve_model

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "build" / "client-tours.json"
CALLS_MIN = 10
READY_TIMEOUT_S = 300.0
TOUR_TIMEOUT_S = 900.0
Line = dict[str, Any]


@dataclass(frozen=True)
class Server:
    """Where the doors are, and the folder of the model, whose tokenizer load generators need."""

    url: str
    grpc: str
    api_key: str
    model_dir: Path


@contextmanager
def cluster(more: Mapping[str, Any] | None = None) -> Iterator[Server]:
    """A cluster of one worker with the default model, and `more` options, while it is held."""
    port, grpc_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="tideserve-tours-") as name:
        folder = Path(name)
        options = {
            "port": port,
            "workers": 1,
            "threads": 1,  # the clients, and whatever else runs here, need processors, too
            "memory": "1GiB",
            "worker": {"profile_when_idle": False},
            "grpc_port": grpc_port,
            **(more or {}),
        }
        config = folder / "cluster.yaml"
        config.write_text(yaml.safe_dump(options))
        command = up_command(config, folder / "cluster")
        url = f"http://127.0.0.1:{port}"
        process = ServerProcess(command, folder / "up.log", python_environment())
        try:
            process.wait_until(lambda: answers(f"{url}/ready"), READY_TIMEOUT_S)
            yield Server(url, f"127.0.0.1:{grpc_port}", "", default_model())
        finally:
            process.stop()


def default_model() -> Path:
    """The folder of the default model; converted now if need be."""
    return resolve_model(None, cache_root(), _say, "auto")


@dataclass(frozen=True)
class Slice:
    """What is left of tours: `done` are lines of calls that passed; none begins after `seconds`."""

    done: Sequence[Line] = ()
    seconds: float = inf


class Unfinished(Exception):
    """The time of a tour is over before its last call; carries the lines so far."""

    def __init__(self, lines: Sequence[Line]) -> None:
        super().__init__("the time is over; --continue makes the other calls")
        self.lines = lines


def tour(client: Client, server: Server, part: Slice) -> list[Line]:
    """Everything that the client did, a line each. Raises Unfinished."""
    if client.grpc and not server.grpc:
        return [_failure(client, "environment", "no gRPC door to go through; name it by --grpc")]
    try:
        python = ensure(client, _say)
    except EnvironmentFailed as error:
        return [_failure(client, "environment", str(error))]
    began_s = time.monotonic()
    lines = [line for line in part.done if line["client"] == client.name]
    with (
        tempfile.TemporaryDirectory(prefix="tideserve-tour-") as folder,
        Path(folder, "stderr").open("wb") as errors,
    ):
        process = subprocess.Popen(
            [str(python), "-m", f"tours.{client.tour}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env={
                **_environment(client, server, python, folder),
                "TOUR_DONE": json.dumps([(line["kind"], line["call"]) for line in lines]),
                "TOUR_SECONDS": str(part.seconds),
            },
        )
        limit = threading.Timer(TOUR_TIMEOUT_S, process.kill)
        limit.start()
        try:
            assert process.stdout is not None
            for text in process.stdout:
                if (line := parse(text)) is not None:
                    lines.append(line)
                    _say(_told(line))
            status = process.wait()
        finally:
            limit.cancel()
            process.kill()
            process.wait()
        if status == UNFINISHED:
            raise Unfinished(lines)
        if status:
            last = Path(folder, "stderr").read_text(errors="replace").strip()[-800:]
            lines.append(_failure(client, "tour", f"it ended with {status}: {last}"))
            _say(_told(lines[-1]))
    _say(f"{client.name}: {time.monotonic() - began_s:.0f} s")
    return lines + missing(client, lines)


def missing(client: Client, lines: Sequence[Line]) -> list[Line]:
    """A failure for each thing that a tour has to have and this one has not."""
    found = {line["kind"] for line in lines}
    missing = [
        _failure(client, "tour", f"no call of kind '{kind}', and no reason why")
        for kind in REQUIRED_KINDS
        if kind not in found
    ]
    calls = sum(line["ok"] is not None for line in lines)
    if calls < CALLS_MIN:
        missing.append(_failure(client, "tour", f"{calls} calls, not {CALLS_MIN}"))
    for line in missing:
        _say(_told(line))
    return missing


def _environment(client: Client, server: Server, python: Path, folder: str) -> Mapping[str, str]:
    """Nothing of ours but what is needed; no hub, no telemetry, files in `folder`."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TZ") if name in os.environ}
    kept["PATH"] = f"{python.parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {
        **kept,
        "HOME": folder,
        "PYTHONPATH": str(ROOT / "scripts"),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "TOUR_CLIENT": client.name,
        "TOUR_URL": server.url,
        "TOUR_GRPC": server.grpc,
        "TOUR_API_KEY": server.api_key,
        "TOUR_MODEL_DIR": str(server.model_dir),
    }


def parse(text: str) -> Line | None:
    """A line of a tour; None for what a client prints on its own."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"call", "kind", "ok"} <= line.keys() else None


def _failure(client: Client, call: str, detail: str) -> Line:
    return {
        "client": client.name,
        "call": call,
        "kind": "about",
        "ok": False,
        "seconds": 0.0,
        "detail": detail,
    }


def _told(line: Line) -> str:
    state = {True: "ok    ", False: "FAILED", None: "cannot"}[line["ok"]]
    detail = f": {line['detail']}" if line["detail"] else ""
    return f"{state} {line['client']} {line['kind']}: {line['call']} {line['seconds']} s{detail}"


def table(lines: Sequence[Line]) -> str:
    """Clients by kinds of call: how many succeeded of how many, – for what a client cannot."""
    rows = [["client", *KINDS, "calls", "failed"]]
    for client in dict.fromkeys(line["client"] for line in lines):
        own = [line for line in lines if line["client"] == client]
        cells = [_cell([line["ok"] for line in own if line["kind"] == kind]) for kind in KINDS]
        made = [line["ok"] for line in own if line["ok"] is not None]
        rows.append([client, *cells, str(len(made)), str(made.count(False))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    drawn = [_row(row, widths) for row in rows]
    return "\n".join([drawn[0], _row(["-" * width for width in widths], widths), *drawn[1:]])


def _cell(states: Sequence[bool | None]) -> str:
    made = [state for state in states if state is not None]
    if not made:
        return "–" if states else ""
    return f"{made.count(True)}/{len(made)}"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """0 when every call of every client succeeded, else 1."""
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(description="Let clients tour a cluster.")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(names)}")
    parser.add_argument("--url", help="a running gateway, such as http://127.0.0.1:8000")
    parser.add_argument("--grpc", default="", help="its gRPC door, such as 127.0.0.1:50051")
    parser.add_argument("--docs", action="store_true", help="write the rows of docs/clients.md")
    parser.add_argument("--seconds", type=float, default=inf, help="begin no call after so long")
    parser.add_argument(
        "--continue", dest="done", action="store_true", help="leave out what passed, by --output"
    )
    parser.add_argument("--output", type=Path, default=RESULT, help="file of the result")
    chosen = parser.parse_args()
    if unknown := set(chosen.clients) - set(names):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    clients = [one for one in CLIENTS if not chosen.clients or one.name in chosen.clients]
    if chosen.url:
        key = os.environ.get("TIDESERVE_API_KEY", "")
        lines = _tour_all(clients, Server(chosen.url, chosen.grpc, key, default_model()), chosen)
    else:
        with cluster() as server:
            lines = _tour_all(clients, server, chosen)
    failed = sum(line["ok"] is False for line in lines)
    print(f"\n{table(lines)}\n\n{len(lines)} lines, {failed} failed: {chosen.output}")
    return 1 if failed else 0


def _tour_all(clients: Sequence[Client], server: Server, chosen: argparse.Namespace) -> list[Line]:
    """All lines; what is known is written after each client, since a slice may be cut."""
    done = json.loads(chosen.output.read_text()) if chosen.done else []
    part = Slice([line for line in done if line["ok"] is not False], chosen.seconds)
    lines: list[Line] = []
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    for client in clients:
        try:
            made = tour(client, server, part)
        except Unfinished as error:
            made = [*error.lines, _failure(client, "tour", str(error))]
            _say(_told(made[-1]))
        else:
            if chosen.docs:
                PAGE.write_text(with_rows(PAGE.read_text(), made))
        lines += made
        chosen.output.write_text(json.dumps(lines, indent=1) + "\n")
    return lines


if __name__ == "__main__":
    sys.exit(main())
