"""Sentences of `tideserve status` about workers in front of upstream servers."""

from collections.abc import Mapping
from typing import Any

TEXT_ONLY = (
    "; without token ids, responses do not survive its loss, and there are no log probabilities and"
    " grammars"
)


def upstream_lines(status: Mapping[str, Any]) -> list[str]:
    """A sentence for each worker with an upstream server: what it serves and cannot promise."""
    return [
        f"{row['id']} is in front of {row['upstream']}{_limits(row['upstream'])}"
        for row in status.get("workers", [])
        if row.get("upstream")
    ]


def _limits(upstream: str) -> str:
    return TEXT_ONLY if "output as text" in upstream else ""


def outage_lines(status: Mapping[str, Any]) -> list[str]:
    """A sentence for each worker whose upstream server computes nothing at present."""
    return [
        f"{row['id']} gets no requests: {row['outage']}"
        for row in status.get("workers", [])
        if row.get("outage")
    ]
