"""Output parsers read each character a bounded number of times."""

from collections.abc import Callable
from typing import Any, Protocol

import pytest

from tests.support.counted_modules import CountedModules

COUNTED = CountedModules("services.gateway.")
StopText = COUNTED.module("services.gateway.serving.output").StopText
hermes_calls = COUNTED.module("services.gateway.tools.hermes").hermes_calls
mistral_calls = COUNTED.module("services.gateway.tools.mistral").mistral_calls
Llama3JsonCalls = COUNTED.module("services.gateway.tools.llama3_json").Llama3JsonCalls
qwen3_coder_calls = COUNTED.module("services.gateway.tools.qwen3_coder").qwen3_coder_calls
dsml_calls = COUNTED.module("services.gateway.tools.deepseek").dsml_calls
HarmonyParser = COUNTED.module("services.gateway.tools.harmony").HarmonyParser
kimi_calls = COUNTED.module("services.gateway.tools.kimi").kimi_calls
ReasoningSplit = COUNTED.module("services.gateway.tools.reasoning").ReasoningSplit
NAMES = frozenset({"get", "now"})
NOW = '{"name": "now", "arguments": {}}'
TYPES = {"get": {"a": frozenset({"string"}), "b": frozenset({"integer"})}}
QWEN_BEGIN = "<tool_call><function=get>"
DSML_BEGIN = '<｜DSML｜tool_calls><｜DSML｜invoke name="get">'
KIMI_BEGIN = "<|tool_calls_section_begin|><|tool_call_begin|>"


def qwen() -> Any:
    """A parser of Qwen3-Coder's calls."""
    return qwen3_coder_calls(NAMES, TYPES)


def dsml() -> Any:
    """A parser of DeepSeek's calls."""
    return dsml_calls("tool_calls", NAMES, TYPES)


# Beginnings of an answer, and what comes again and again after them.
OUTPUTS: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: hermes_calls(NAMES), "", "\n"),
    (lambda: hermes_calls(NAMES), "a", " "),
    (lambda: hermes_calls(NAMES), "", " <tool_call"),
    (lambda: hermes_calls(NAMES), "", "<tool_call>"),
    (lambda: hermes_calls(NAMES), "<tool_call>", "\n"),
    (lambda: hermes_calls(NAMES), "<tool_call>{", " "),
    (lambda: hermes_calls(NAMES), '<tool_call>{"', "k"),
    (lambda: hermes_calls(NAMES), '<tool_call>{"name": ', " "),
    (lambda: hermes_calls(NAMES), '<tool_call>{"name": "', "n"),
    (lambda: hermes_calls(NAMES), '<tool_call>{"name": ', "7"),
    (lambda: hermes_calls(NAMES), '<tool_call>{"arguments": {"a": "', "\n"),
    (lambda: hermes_calls(NAMES), '<tool_call>{"arguments": {"a": ', "7"),
    (lambda: hermes_calls(NAMES), '<tool_call>{"name": "get", "arguments": {"a": ', "7"),
    (lambda: hermes_calls(NAMES), '<tool_call>{"name": "get", "arguments": {"a": "', "\n"),
    (lambda: hermes_calls(NAMES), f"<tool_call>{NOW}", "\n"),
    (lambda: hermes_calls(NAMES), "", f"<tool_call>{NOW}</tool_call>\n"),
    (lambda: hermes_calls(NAMES), "<tool_call>[", f" {NOW},"),
    (lambda: mistral_calls(NAMES), "", " "),
    (lambda: mistral_calls(NAMES), "", "[TOOL_CALLS]"),
    (lambda: mistral_calls(NAMES), "[TOOL_CALLS]", " "),
    (lambda: mistral_calls(NAMES), "", "[TOOL_CALLS]now{}"),
    (lambda: mistral_calls(NAMES), '[TOOL_CALLS]get[ARGS]{"a": "', " "),
    (lambda: mistral_calls(NAMES), '[TOOL_CALLS]get[ARGS]{"a": ', "7"),
    (lambda: Llama3JsonCalls(NAMES), "", "\n"),
    (lambda: Llama3JsonCalls(NAMES), "<|python_tag|>", "\n"),
    (lambda: Llama3JsonCalls(NAMES), '{"parameters": {"a": ', "7"),
    (lambda: Llama3JsonCalls(NAMES), NOW, "\n"),
    (lambda: Llama3JsonCalls(NAMES), NOW, f" ; {NOW}"),
    (qwen, "", "\n"),
    (qwen, "", "<tool_call><function="),
    (qwen, "<tool_call>", "\n"),
    (qwen, "<tool_call><function=", "n"),
    (qwen, f"{QWEN_BEGIN}<parameter=a>", "\n"),
    (qwen, f"{QWEN_BEGIN}<parameter=a>", "x"),
    (qwen, f"{QWEN_BEGIN}<parameter=a>", "\n</paramete"),
    (qwen, f"{QWEN_BEGIN}<parameter=b>", "7"),
    (qwen, QWEN_BEGIN, "<parameter=a>x</parameter>"),
    (qwen, QWEN_BEGIN, "<parameter=b>[1]</parameter>\n"),
    (qwen, "<tool_call>", "<function=now></function>"),
    (dsml, DSML_BEGIN, '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'),
    (dsml, f'{DSML_BEGIN}<｜DSML｜parameter name="a" string="true">', "</｜DSML｜para"),
    (lambda: kimi_calls(NAMES), KIMI_BEGIN, "n"),
    (lambda: kimi_calls(NAMES), f"{KIMI_BEGIN}get<|tool_call_argument_begin|>", "\n"),
    (lambda: kimi_calls(NAMES), f'{KIMI_BEGIN}get<|tool_call_argument_begin|>{{"a": "', "x"),
    (
        lambda: kimi_calls(NAMES),
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>get<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
    (lambda: HarmonyParser(NAMES), "", "<|end|>"),
    (lambda: HarmonyParser(NAMES), "", " "),
    (lambda: HarmonyParser(NAMES), "<|channel|>" * 60, "<|channel|>"),
    (lambda: HarmonyParser(NAMES), "", "<|channel|>final<|message|>a<|end|>"),
    (lambda: HarmonyParser(NAMES), "<|channel|>final<|message|>", "\n"),
    (lambda: HarmonyParser(NAMES), "<|channel|>final<|message|>a", "<|en"),
    (lambda: HarmonyParser(NAMES), "<|channel|>analysis to=functions.get<|message|>", "[1]"),
    (lambda: HarmonyParser(NAMES), '<|channel|>x to=functions.get<|message|>{"a": "', "x"),
    (lambda: ReasoningSplit(opened=False), "", "\n"),
    (lambda: ReasoningSplit(opened=True), "", "\n"),
    (lambda: ReasoningSplit(opened=True), "hm", "\n"),
    (lambda: ReasoningSplit(opened=True), "", " </think"),
    (lambda: ReasoningSplit(opened=False), "<think>a</think>", "\n"),
    (lambda: ReasoningSplit(opened=False), "<think>a</think>b", "\n"),
]


class Taker(Protocol):
    """A parser that takes text in pieces."""

    def push(self, text: str, /) -> object:
        """Add a piece of text."""


def work(taker: Taker, pieces: list[str]) -> int:
    """The number of characters that it reads or copies."""
    before = COUNTED.chars
    for piece in pieces:
        taker.push(piece)
    return COUNTED.chars - before


@pytest.mark.parametrize("case", range(len(OUTPUTS)))
@pytest.mark.parametrize("whole", [False, True], ids=["by characters", "whole"])
def test_parser_cost_is_linear(case: int, whole: bool) -> None:
    parser, begin, again = OUTPUTS[case]
    outputs = [begin + again * (size // len(again)) for size in (400, 1_600)]
    short, long = (work(parser(), [text] if whole else list(text)) for text in outputs)

    assert long / len(outputs[1]) <= 1.1 * short / len(outputs[0])
    assert long <= 100 * len(outputs[1])


@pytest.mark.parametrize("again", [" ", "a", "ab", "a" * 31 + "c"])
def test_stop_text_matching_is_linear(again: str) -> None:
    stops = ["a" * 31 + "b", "ab" * 15 + "c", " " * 32, "b"]

    outputs = [again * (size // len(again)) for size in (320, 1_280)]
    short, long = (work(StopText(stops), list(text)) for text in outputs)

    assert long <= 4.2 * short


def test_a_tool_name_may_be_a_number_of_any_length() -> None:
    output = f'<tool_call>{{"name": {"7" * 5_000}}}'
    parser = hermes_calls(NAMES)
    events = [*parser.push(output), *parser.finish()]

    assert "".join(event.text for event in events) == output
