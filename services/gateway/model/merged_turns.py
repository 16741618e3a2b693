"""Changes messages of a chat for templates that refuse them as they are.

Many templates permit a single system message at the beginning, or none, and require the roles user
and assistant to alternate. Those of Mistral permit only ids of calls with nine letters and digits.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
_SEPARATOR = "\n\n"
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def merged_forms(messages: Messages) -> Iterator[list[dict[str, Any]]]:
    """Yield `messages` in forms that more templates accept, each changed further than the last."""
    latest = [dict(message) for message in messages]
    for merge in (_shorten_ids, _merge_turns, _merge_after_results, _merge_system):
        form = merge(latest)
        if form != latest:
            yield form
            latest = form


def has_late_system(messages: Messages) -> bool:
    """Whether a system message follows a message of another role."""
    roles = [message["role"] for message in messages]
    return "system" in roles[roles.count("system") :]


def _shorten_ids(messages: Messages) -> list[dict[str, Any]]:
    """Replace ids of calls, which other models may have made, by hexadecimal ids."""
    changed: list[dict[str, Any]] = []
    for message in messages:
        fields = dict(message)
        if (call_id := fields.get("tool_call_id")) is not None:
            fields["tool_call_id"] = _short_id(call_id)
        if calls := fields.get("tool_calls"):
            fields["tool_calls"] = [call | {"id": _short_id(call["id"])} for call in calls]
        changed.append(fields)
    return changed


def _short_id(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _merge_turns(messages: Messages) -> list[dict[str, Any]]:
    """Merge all system messages into the first message, and consecutive ones of another role."""
    merged: list[dict[str, Any]] = []
    systems = [message for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    for message in [*systems, *others]:
        role = message["role"]
        # Each result of a tool names its call.
        if merged and merged[-1]["role"] == role and role != "tool":
            merged[-1] = _merged(merged[-1], message)
        else:
            merged.append(dict(message))
    return merged


def _merge_after_results(messages: Messages) -> list[dict[str, Any]]:
    """Append the user's text after the results of tools to the last result."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        if merged and merged[-1]["role"] == "tool" and message["role"] == "user":
            merged[-1] = _merged(merged[-1], message)
        else:
            merged.append(dict(message))
    return merged


def _merge_system(messages: Messages) -> list[dict[str, Any]]:
    """Put the system message in front of the user's first message."""
    roles = [message["role"] for message in messages]
    if roles[:2] != ["system", "user"]:
        return [dict(message) for message in messages]
    system, user, *others = messages
    first = {**user, "content": _joined("content", system, user)}
    return [first, *(dict(message) for message in others)]


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The first message, with texts and tool calls of the second."""
    merged = dict(first)
    for field in ("content", "reasoning_content"):
        if text := _joined(field, first, second):
            merged[field] = text
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return merged


def _joined(field: str, *messages: Mapping[str, Any]) -> str:
    return _SEPARATOR.join(text for message in messages if (text := message.get(field)))
