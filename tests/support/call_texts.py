"""Tool calls in the text formats that models generate."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.tools.format import ToolFormat

Calls = Sequence[tuple[str, Mapping[str, Any]]]
"""Function names with their arguments."""


def written(form: ToolFormat, calls: Calls) -> str:
    """Render the calls in the format `form`."""
    return _WRITERS[form](calls)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    """A value as element text: strings are unquoted."""
    return value if isinstance(value, str) else _json(value)


def _hermes(calls: Calls) -> str:
    texts = [_json({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def _mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _llama(calls: Calls) -> str:
    return "; ".join(_json({"name": name, "parameters": values}) for name, values in calls)


def _qwen(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        elements = "".join(
            f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        texts.append(f"<tool_call>\n<function={name}>\n{elements}</function>\n</tool_call>")
    return "\n".join(texts)


def _glm(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        elements = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        texts.append(f"<tool_call>{name}\n{elements}</tool_call>")
    return "\n".join(texts)


def _dsml(section: str, calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        elements = "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{_text(value)}</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )
        texts.append(f'<｜DSML｜invoke name="{name}">\n{elements}</｜DSML｜invoke>\n')
    return f"<｜DSML｜{section}>\n{''.join(texts)}</｜DSML｜{section}>"


def _deepseek(calls: Calls, fenced: bool) -> str:
    texts = []
    for name, arguments in calls:
        kind = "function<｜tool▁sep｜>" if fenced else ""
        body = f"\n```json\n{_json(arguments)}\n```" if fenced else f"{_json(arguments)}"
        separator = "" if fenced else "<｜tool▁sep｜>"
        texts.append(f"<｜tool▁call▁begin｜>{kind}{name}{separator}{body}<｜tool▁call▁end｜>")
    gap = "\n" if fenced else ""
    return f"<｜tool▁calls▁begin｜>{gap.join(texts)}<｜tool▁calls▁end｜>"


def _harmony(calls: Calls) -> str:
    # A model's output ends with a call; only texts rendered by the library have further messages.
    texts = [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"
        for name, arguments in calls
    ]
    return "<|call|><|start|>assistant".join(texts)


def _kimi(calls: Calls) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


_WRITERS = {
    ToolFormat.DEEPSEEK_V3: lambda calls: _deepseek(calls, fenced=True),
    ToolFormat.DEEPSEEK_V31: lambda calls: _deepseek(calls, fenced=False),
    ToolFormat.DEEPSEEK_V32: lambda calls: _dsml("function_calls", calls),
    ToolFormat.DEEPSEEK_V4: lambda calls: _dsml("tool_calls", calls),
    ToolFormat.GLM45: _glm,
    ToolFormat.HARMONY: _harmony,
    ToolFormat.HERMES: _hermes,
    ToolFormat.KIMI_K2: _kimi,
    ToolFormat.LLAMA3_JSON: _llama,
    ToolFormat.MISTRAL: _mistral,
    ToolFormat.QWEN3_CODER: _qwen,
}
CALL_FORMATS = tuple(_WRITERS)
# Complete tags of each format, from which shuffled texts are built.
TAGS: Mapping[ToolFormat, Sequence[str]] = {
    ToolFormat.HARMONY: (
        *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "{", "<|end|>"),
        *("<|start|>assistant<|channel|>commentary<|message|>", "<|call|>", "<|return|>"),
        "<|channel|>commentary to=functions.get <|constrain|>json<|message|>",
    ),
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>", '{"name": "get", "arguments": {'),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]", "[ARGS]", "get{", '[{"name": "get", "arguments": {'),
    ToolFormat.LLAMA3_JSON: ("<|python_tag|>", ";", '{"name": "get", "parameters": {'),
    ToolFormat.QWEN3_CODER: (
        *("<tool_call>", "<function=get>", "<parameter=city>", "<parameter=days>"),
        *("</parameter>", "</function>", "</tool_call>"),
    ),
    ToolFormat.GLM45: (
        *("<tool_call>", "get", "<arg_key>city</arg_key>", "<arg_key>days</arg_key>"),
        *("<arg_value>", "</arg_value>", "</tool_call>"),
    ),
    ToolFormat.DEEPSEEK_V3: (
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "function<｜tool▁sep｜>get\n```json\n",
        ),
        *('{"city": "a"}', "{", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolFormat.DEEPSEEK_V31: (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "get<｜tool▁sep｜>", "{}", "{"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolFormat.KIMI_K2: (
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.get:0", "{}", "{"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
} | {
    form: (
        *(f"<｜DSML｜{section}>", '<｜DSML｜invoke name="get">'),
        '<｜DSML｜parameter name="city" string="true">',
        '<｜DSML｜parameter name="days" string="false">',
        *("</｜DSML｜parameter>", "</｜DSML｜invoke>", f"</｜DSML｜{section}>"),
    )
    for form, section in (
        (ToolFormat.DEEPSEEK_V32, "function_calls"),
        (ToolFormat.DEEPSEEK_V4, "tool_calls"),
    )
}
