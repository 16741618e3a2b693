"""The table of docs/clients.md: what came of the tours, a row for each client.

Only the rows of clients that made their tour are written anew, so that tours can be made in slices.
A test compares the versions in the table with those that are installed.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tour_environments import CLIENTS, VLLM, Client

from benchmarks.systems.client_environment import LISTS
from tideserve.cli.vllm_install import VLLM_VERSION

PAGE = Path(__file__).resolve().parent.parent / "docs" / "clients.md"
HEAD = "| client | version | calls | passed | what is not there, and why |\n|---|---|---|---|---|\n"
Line = Mapping[str, Any]


def version(client: Client) -> str:
    """The version of the client that its tour runs on, as its list pins it."""
    if client.name == VLLM:
        return VLLM_VERSION
    if client.own:
        return "of this tree"
    package = canonicalize_name(client.package or client.name)
    for text in (LISTS / f"{client.name}.txt").read_text().splitlines():
        if text and text[0] != "#" and canonicalize_name(Requirement(text).name) == package:
            return text.partition("==")[2]
    raise LookupError(f"{client.name}.txt does not pin {package}; add it to the list")


def row(client: Client, lines: Sequence[Line]) -> str:
    """The client's row: how many calls it made, how many passed, and what there is not."""
    made = [line for line in lines if line["ok"] is not None]
    passed = sum(line["ok"] for line in made)
    cells = (client.name, version(client), str(len(made)), str(passed), _absent(lines) or "–")
    return f"| {' | '.join(cells)} |\n"


def _absent(lines: Sequence[Line]) -> str:
    """What the client cannot do, and what the server refuses by decision."""
    told = [f"{line['kind']}: {_cell(line['detail'])}" for line in lines if line["ok"] is None]
    told += [
        f"{_cell(line['call'])}: refused, see [{line['detail']}]({line['detail']})"
        for line in lines
        if line["kind"] == "limit" and line["ok"]
    ]
    return "; ".join(told)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def rows_in(page: str) -> dict[str, str]:
    """The rows of the page's table, by client."""
    body = page.partition(HEAD)[2]
    table = re.match(r"(?:\|.*\n)*", body)
    assert table is not None  # it matches nothing, too
    return {text.split("|")[1].strip(): text for text in table[0].splitlines(keepends=True)}


def with_rows(page: str, lines: Sequence[Line]) -> str:
    """The page with new rows for the clients that the lines are of.

    Raises:
        ValueError: if the page has no such table.
    """
    before, head, after = page.partition(HEAD)
    if not head:
        raise ValueError("the page has no table of results; begin one with tour_results.HEAD")
    rows = rows_in(page)
    rest = after.removeprefix("".join(rows.values()))
    for client in CLIENTS:
        if own := [line for line in lines if line["client"] == client.name]:
            rows[client.name] = row(client, own)
    return before + head + "".join(rows[one.name] for one in CLIENTS if one.name in rows) + rest
