"""Sentences of `tideserve status` about what workers lack."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]


def lack_lines(status: Mapping[str, Any]) -> list[str]:
    """A sentence for each reason why workers have no cost model, or cannot drop layers."""
    return [
        *_lines(status, _no_cost_model, "has no cost model", "have no cost model"),
        *_lines(status, _no_drops, "cannot drop layers", "cannot drop layers"),
    ]


def _no_cost_model(row: Row) -> str:
    origin, _, reason = str(row.get("cost_model") or "").partition(": ")
    return reason if origin == "none" else ""


def _no_drops(row: Row) -> str:
    return str(row.get("no_drops") or "")


def _lines(
    status: Mapping[str, Any], reason_of: Callable[[Row], str], singular: str, plural: str
) -> Iterator[str]:
    """A sentence for each reason, with the names of its workers."""
    workers: dict[str, list[str]] = {}
    for row in status.get("workers", []):
        if reason := reason_of(row):
            workers.setdefault(reason, []).append(row["id"])
    for reason, names in workers.items():
        yield f"{', '.join(names)} {singular if len(names) == 1 else plural}: {reason}"
