"""Decisions about memory, as a person reads them: what, why, what became of it; and losses."""

import time
from collections.abc import Mapping
from typing import Any

INDENT = " " * 10


def decision_lines(status: Mapping[str, Any]) -> list[str]:
    """The latest decisions, newest last; numbers are tokens of KV cache."""
    lines = []
    for row in status.get("decisions") or []:
        lines.append(f"{_clock(row['decided_unix_s'])}  {row['model']}: {decision_text(row)}")
        lines += [
            INDENT + line for line in (_demand(row), _reason(row), row.get("outcome")) if line
        ]
    return lines


def loss_lines(status: Mapping[str, Any]) -> list[str]:
    """The last loss of each group, newest last."""
    return [
        f"{_clock(row['lost_unix_s'])}  {row['group_id']} at epoch {row['epoch']}: {row['reason']}"
        for row in status.get("losses") or []
    ]


def decision_text(row: Mapping[str, Any]) -> str:
    """What was decided, and why in a word."""
    change = {
        "merge": "merge " + (", ".join(row["group_ids"]) or f"to gain {row['needed_tokens']:,}"),
        "restore": "restore " + ", ".join(row["group_ids"]),
        "exhausted": f"{row['needed_tokens']:,} short after all merges",
    }
    cause = "by hand" if row["cause"] == "manual" else row["cause"]
    return f"{change.get(row['action'], row['action'])} ({cause})"


def _clock(unix_s: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def _demand(row: Mapping[str, Any]) -> str:
    waiting = row["waiting_tokens"] + row["queued_tokens"] + row["refused_tokens"]
    return (
        f"demand {row['demand_tokens']:,}: {row['used_tokens']:,} in use,"
        f" {waiting:,} for {row['waiting']:,} waiting requests;"
        f" {row['forecast_tokens']:,} more expected soon"
    )


def _reason(row: Mapping[str, Any]) -> str:
    if row["cause"] == "manual":
        return ""
    for_s = f"for {row['held_s']:.1f} s (needed: {row['dwell_s']:g} s)"
    if row["cause"] == "relief":
        return f"together below {row['threshold_tokens']:,}, where groups split, {for_s}"
    if row["demand_tokens"] + row["forecast_tokens"] <= row["threshold_tokens"]:
        stuck = row.get("stuck_tokens", 0)
        return f"groups are full: {stuck:,} more are needed there than they hold {for_s}"
    return f"together above the room of {row['threshold_tokens']:,} {for_s}"
