"""Tool and reasoning formats are detected from template and tokenizer."""

import pytest

from services.gateway.tools.event import Content
from services.gateway.tools.format import (
    ReasoningFormat,
    Thinking,
    ToolFormat,
    reasoning_format,
    thinking,
    tool_format,
    tool_parser,
)

QWEN = "{% if tools %}<tool_call>{% endif %} <think></think>"
LLAMA = '{% if tools %}Respond with {"name": …, "parameters": …}{% endif %}'


@pytest.mark.parametrize(
    ("template", "takes_tools", "tokens", "form"),
    [
        (QWEN, True, {"<tool_call>"}, ToolFormat.HERMES),
        ("{{ tools }}<tool_call><function=x>", True, {"<tool_call>"}, ToolFormat.QWEN3_CODER),
        ("{{ tools }}<tool_call>x<arg_key>", True, {"<tool_call>"}, ToolFormat.GLM45),
        ("{{ tools }}<|tool_call_begin|>", True, set(), ToolFormat.KIMI_K2),
        ("{{ tools }}<｜tool▁call▁begin｜>x\n```json\n", True, set(), ToolFormat.DEEPSEEK_V3),
        ("{{ tools }}<｜tool▁call▁begin｜>x", True, set(), ToolFormat.DEEPSEEK_V31),
        ("{{ messages }}<｜tool▁call▁begin｜>x", False, set(), ToolFormat.HERMES),
        ("{{ tools }}<｜DSML｜function_calls>", True, set(), ToolFormat.DEEPSEEK_V32),
        ("{{ tools }}{{ '｜DSML｜' }}tool_calls>", True, set(), ToolFormat.DEEPSEEK_V4),
        (LLAMA, True, {"<|python_tag|>"}, ToolFormat.LLAMA3_JSON),
        (LLAMA, True, set(), ToolFormat.NONE),
        ("{{ tools }}", True, {"[TOOL_CALLS]", "[ARGS]"}, ToolFormat.MISTRAL),
        ("{{ tools }}[TOOL_CALLS]", True, set(), ToolFormat.MISTRAL),
        ("{{ tools }}<|channel|>analysis<|message|>", True, set(), ToolFormat.HARMONY),
        ("{{ messages }}", False, {"<|im_end|>"}, ToolFormat.HERMES),
        ("{{ messages }}", False, {"<|python_tag|>"}, ToolFormat.HERMES),
    ],
)
def test_tool_format_is_detected(
    template: str, takes_tools: bool, tokens: set[str], form: ToolFormat
) -> None:
    assert tool_format("auto", template, takes_tools, tokens) is form


@pytest.mark.parametrize(
    ("template", "tokens", "form"),
    [
        (QWEN, set(), ReasoningFormat.QWEN3),
        ("<|channel|>analysis<|message|>", {"<|channel|>"}, ReasoningFormat.HARMONY),
        ("{{ messages }}", {"<think>"}, ReasoningFormat.QWEN3),
        ("{{ messages }}", {"[THINK]", "[/THINK]"}, ReasoningFormat.MISTRAL),
        ("{{ messages }}", set(), ReasoningFormat.NONE),
    ],
)
def test_reasoning_format_is_detected(
    template: str, tokens: set[str], form: ReasoningFormat
) -> None:
    assert reasoning_format("auto", template, tokens) is form


def test_configured_formats_take_precedence() -> None:
    assert tool_format("none", QWEN, True, {"<tool_call>"}) is ToolFormat.NONE
    assert reasoning_format("deepseek", "", set()) is ReasoningFormat.DEEPSEEK


def test_vllm_parser_names_are_accepted() -> None:
    assert tool_format("qwen3_xml", "", True, set()) is ToolFormat.QWEN3_CODER
    assert tool_format("glm47", "", True, set()) is ToolFormat.GLM45
    assert tool_format("openai", "", True, set()) is ToolFormat.HARMONY
    assert reasoning_format("deepseek_r1", "", set()) is ReasoningFormat.DEEPSEEK
    assert reasoning_format("kimi_k2", "", set()) is ReasoningFormat.QWEN3
    with pytest.raises(ValueError, match="no_such"):
        tool_format("no_such", "", True, set())


@pytest.mark.parametrize(
    ("form", "prompt", "where"),
    [
        (ReasoningFormat.NONE, "<think>\n", Thinking.OVER),
        (ReasoningFormat.QWEN3, "what is <think>?\nassistant\n", Thinking.POSSIBLE),
        (ReasoningFormat.QWEN3, "assistant\n<think>\n", Thinking.OPENED),
        (ReasoningFormat.QWEN3, "assistant\n<think>\n\n</think>\n\n", Thinking.OVER),
        (ReasoningFormat.HARMONY, "<|start|>assistant", Thinking.POSSIBLE),
        (ReasoningFormat.HARMONY, "<|channel|>analysis<|message|>", Thinking.OPENED),
        (ReasoningFormat.HARMONY, "<|channel|>final<|message|>", Thinking.OVER),
        (ReasoningFormat.MISTRAL, "[/INST][THINK]", Thinking.OPENED),
        (ReasoningFormat.MISTRAL, "<think>", Thinking.POSSIBLE),
        (ReasoningFormat.DEEPSEEK, "assistant\n", Thinking.OPENED),
        (ReasoningFormat.DEEPSEEK, "assistant\n</think>", Thinking.OVER),
    ],
)
def test_output_starts_in_reasoning_if_the_prompt_opens_it(
    form: ReasoningFormat, prompt: str, where: Thinking
) -> None:
    assert thinking(form, prompt) is where


@pytest.mark.parametrize("form", ToolFormat)
def test_each_format_except_none_has_a_parser(form: ToolFormat) -> None:
    parser = tool_parser(form, {"f"})

    assert (parser is None) == (form is ToolFormat.NONE)
    assert parser is None or parser.push("hello") == [Content("hello")]
