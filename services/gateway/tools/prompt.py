"""Tools told in messages, for templates that know none: in the format of Hermes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.tools.hermes import CLOSE, OPEN
from services.gateway.tools.tool import Tool

_INTRODUCTION = """You can call functions. Each line between <tools> and </tools> describes one, \
with a JSON schema of its arguments:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and arguments between {open} and {close}, \
and nothing else:
{open}
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
{close}"""


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """The messages with the tools in the first one, which becomes the system's."""
    told = [dict(message) for message in messages]
    if not tools:
        return told
    lines = "\n".join(json.dumps(tool.described(), ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=lines, open=OPEN, close=CLOSE)
    if told and told[0]["role"] == "system":
        told[0]["content"] = f"{told[0]['content']}\n\n{text}"
        return told
    return [{"role": "system", "content": text}, *told]


def flattened(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with calls and their answers as text; answers come from the user.

    Answers that follow each other are one message, as roles alternate in many templates.
    """
    told: list[dict[str, Any]] = []
    after_answer = False
    for message in messages:
        content, role = message["content"], message["role"]
        if role == "tool":
            answer = f"<tool_response>\n{content}\n</tool_response>"
            if after_answer:
                told[-1]["content"] += f"\n{answer}"
            else:
                told.append({"role": "user", "content": answer})
        else:
            calls = [_call(call["function"]) for call in message.get("tool_calls", ())]
            text = "\n".join([content, *calls] if content else calls)
            told.append({"role": role, "content": text})
        after_answer = role == "tool"
    return told


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"
