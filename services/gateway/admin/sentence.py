"""Decisions about memory as sentences, for people who have never heard of them. Pure."""

from collections.abc import Mapping
from typing import Any

# By action and cause, or by action alone; `wanted` is what the threshold is compared with.
SENTENCES = {
    "merge manual": "Somebody asked for it: {names} merge into one group.",
    "merge": (
        "Requests need {wanted:,} tokens of KV; there is room for {threshold_tokens:,}."
        " Groups merge and drop layers that both hold."
    ),
    "merge of full groups": (
        "Requests at full groups need {stuck_tokens:,} tokens of KV more than these hold."
        " Groups merge and drop layers that both hold."
    ),
    "restore manual": "Somebody asked for it: {names} splits, and its parameters come back.",
    "restore draining": "A worker of {names} is leaving, so the group splits.",
    "restore": (
        "Demand fell to {wanted:,} tokens of KV, below {threshold_tokens:,}: {names} splits, and"
        " its parameters come back."
    ),
    "exhausted": (
        "Requests need {needed_tokens:,} tokens of KV more than there is, whatever groups merge."
        " Add workers."
    ),
}


def sentence(row: Mapping[str, Any]) -> str:
    """What was decided and why; `row` has the names of Decision in memmgr.proto."""
    action, cause = row["action"], row["cause"]
    wanted = row["demand_tokens"] + row["forecast_tokens"]
    if (action, cause) == ("merge", "overload") and wanted <= row["threshold_tokens"]:
        text = SENTENCES["merge of full groups"]
    else:
        text = SENTENCES.get(f"{action} {cause}") or SENTENCES.get(action) or f"{action} ({cause})"
    names = ", ".join(row["group_ids"]) or "a group"
    return text.format_map({**row, "wanted": wanted, "names": names})
