"""Chat models: prompts, output parsers and output constraints."""

from typing import Any

import pytest

from services.common.errors import ConfigError
from services.core.request import GrammarKind
from services.gateway.api.chat import ChatRequest, parse_chat
from services.gateway.model.chat_model import ChatModel
from services.gateway.model.chat_template import ChatTemplate
from services.gateway.tools.format import ReasoningFormat, Thinking, ToolFormat
from services.gateway.vocabulary.errors import BadRequest, NotSupported

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
)
QWEN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:"
    "{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
QWEN_TOKENS = {5: "<|im_end|>", 6: "<tool_call>", 7: "</tool_call>", 8: "<think>", 9: "</think>"}
MISTRAL_TOKENS = {5: "[TOOL_CALLS]", 6: "[ARGS]"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "gets",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
STRICT = {"type": "function", "function": TOOL["function"] | {"strict": True}}  # type: ignore[operator]
CALL = {"id": "1", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}


def model(
    source: str = QWEN, tokens: dict[int, str] = QWEN_TOKENS, tools: str = "auto"
) -> ChatModel:
    """A chat model with this template and these tokens."""
    return ChatModel(source, ChatTemplate(source, {}).variables, tokens, tools, "auto")


def prompt_of(body: ChatRequest, source: str = QWEN, tokens: dict[int, str] = QWEN_TOKENS) -> str:
    """The prompt for a body."""
    return ChatTemplate(source, {}).render(**model(source, tokens).template_fields(body))


def chat(**fields: Any) -> ChatRequest:
    """A chat body."""
    messages = [{"role": "user", "content": "hi"}]
    return parse_chat({"model": "m", "messages": messages} | fields)


def test_tools_are_passed_to_a_template_that_supports_them() -> None:
    prompt = prompt_of(chat(tools=[STRICT]))

    assert prompt.startswith('[{"type": "function", "function": {"name": "get", "description": ')
    assert "strict" not in prompt


def test_call_arguments_reach_the_template_as_objects() -> None:
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "fine"},
    ]

    assert prompt_of(chat(messages=messages)) == (
        'assistant:<tool_call>{"a": 1}\ntool:fine\nassistant:'
    )


@pytest.mark.parametrize("system", [True, False])
def test_tools_become_prompt_text_if_the_template_lacks_tools(system: bool) -> None:
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    messages += [{"role": "user", "content": "hi"}]
    prompt = prompt_of(chat(messages=messages, tools=[TOOL]), PLAIN, {})

    lead = "<|im_start|>system\n" + ("Be brief.\n\n" if system else "")
    assert prompt.startswith(f"{lead}You can call functions.")
    assert '"name": "get", "description": "gets", "parameters": {' in prompt
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n")


def test_calls_become_prompt_text_if_the_template_lacks_tools() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Well.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "fine"},
        {"role": "tool", "tool_call_id": "1", "content": "too"},
        {"role": "user", "content": "and?"},
    ]

    assert prompt_of(chat(messages=messages), PLAIN, {}) == (
        "<|im_start|>user\nhi<|im_end|>\n"
        '<|im_start|>assistant\nWell.\n<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nfine\n</tool_response>\n<tool_response>\ntoo\n"
        "</tool_response><|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n"
    )


def test_tools_are_refused_if_the_call_format_is_unknown() -> None:
    source = "{{ tools }}{{ messages }}"
    unknown = model(source, {})

    assert unknown.tool_format is ToolFormat.NONE
    assert "None" in prompt_of(chat(tools=[TOOL], tool_choice="none"), source, {})
    with pytest.raises(NotSupported, match="tool_format"):
        unknown.template_fields(chat(tools=[TOOL]))


CALLED = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "fine"},
    {"role": "assistant", "content": "Well.", "reasoning": "so"},
]


def test_a_template_that_concatenates_arguments_gets_text() -> None:
    source = (
        "{{ tools }}{% for m in messages %}{% for c in m.tool_calls %}"
        "{{ '<｜tool▁call▁begin｜>' + c['function']['name'] + '\n```json\n'"
        " + c['function']['arguments'] }}{% endfor %}{% endfor %}"
    )
    body = chat(messages=CALLED)

    assert model(source, {}).tool_format is ToolFormat.DEEPSEEK_V3
    assert prompt_of(body, source, {}).endswith('get\n```json\n{"a": 1}')


HARMONY = (
    "{{ tools }}{% for m in messages %}<|start|>{{ m.role }}<|channel|>"
    "{{ m.thinking }},{{ m.reasoning_content }}<|message|>{{ m.content }}{% endfor %}"
)


def test_harmony_has_the_reasoning_of_calls_as_thinking() -> None:
    prompt = prompt_of(chat(messages=CALLED), HARMONY, {})

    assert "<|start|>assistant<|channel|>hm,<|message|><|start|>" in prompt
    assert "<|start|>assistant<|channel|>,<|message|>Well." in prompt


def test_harmony_is_a_tool_format_and_a_reasoning_format() -> None:
    made = model(HARMONY, {5: "<|channel|>", 6: "<|end|>"})

    form = made.form(chat(tools=[TOOL]), Thinking.POSSIBLE)
    assert made.reasoning_format is ReasoningFormat.HARMONY
    assert form is not None and form.markers == {5, 6}
    with pytest.raises(ConfigError, match="set both to harmony"):
        model(HARMONY, {}, tools="hermes")


XML = "{{ tools }}<tool_call><function={{ messages }}"


def test_argument_types_come_from_the_schema_for_untyped_formats() -> None:
    form = model(XML, QWEN_TOKENS).form(chat(tools=[TOOL]), Thinking.OVER)
    other = model().form(chat(tools=[TOOL]), Thinking.OVER)

    assert form is not None and form.types == {"get": {"a": {"integer"}}}
    assert other is not None and form.names == other.names and not other.types


@pytest.mark.parametrize(("strict", "refused"), [(True, True), (False, False)])
def test_strict_strings_that_cannot_be_enforced_are_refused(strict: bool, refused: bool) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "b"}}}
    function = {"name": "get", "parameters": parameters, "strict": strict}
    body = chat(tools=[{"type": "function", "function": function}], tool_choice="required")

    made = model(XML, QWEN_TOKENS)
    assert model().argument_schemas(body)
    if not refused:
        assert made.argument_schemas(body)
        return
    with pytest.raises(BadRequest, match=r"\$\.properties\.a\.pattern of the strict tool"):
        made.argument_schemas(body)


def test_thinking_can_be_switched_off() -> None:
    qwen = model()
    prompts = [prompt_of(chat(**fields)) for fields in ({}, {"enable_thinking": False})]

    assert qwen.reasoning_format is ReasoningFormat.QWEN3
    assert [qwen.thinking(prompt) for prompt in prompts] == [Thinking.POSSIBLE, Thinking.OVER]


def test_parser_follows_the_requested_features() -> None:
    plain = model(PLAIN, {})
    asked = plain.form(chat(tools=[TOOL]), Thinking.OVER)
    thinks = model().form(chat(include_reasoning=False), Thinking.POSSIBLE)

    assert plain.form(chat(), Thinking.OVER) is None
    assert plain.form(chat(tools=[TOOL], tool_choice="none"), Thinking.OVER) is None
    assert asked is not None and asked.names == {"get"} and asked.thinking is None
    assert thinks is not None and thinks.thinking is Thinking.POSSIBLE
    assert not thinks.include_reasoning and not thinks.names


def test_marks_that_are_tokens_are_shown() -> None:
    form = model("{{ tools }}{{ messages }}", MISTRAL_TOKENS).form(
        chat(tools=[TOOL]), Thinking.OVER
    )

    assert form is not None and form.markers == {5, 6}


@pytest.mark.parametrize(
    ("fields", "source", "tokens", "where", "parts"),
    [
        # Nothing is asked, or what is asked is all.
        ({}, QWEN, QWEN_TOKENS, Thinking.POSSIBLE, None),
        ({"tools": [TOOL]}, QWEN, QWEN_TOKENS, Thinking.OVER, None),
        ({"guided_regex": "a"}, QWEN, QWEN_TOKENS, Thinking.OVER, ["a"]),
        # After reasoning.
        ({"guided_regex": "a"}, QWEN, QWEN_TOKENS, Thinking.POSSIBLE, ["(<[8]> thoughts)?", "/a/"]),
        ({"guided_regex": "a"}, QWEN, QWEN_TOKENS, Thinking.OPENED, ["start: thoughts", "<[9]>"]),
        # Calls that must be.
        (
            {"tools": [TOOL], "tool_choice": "required"},
            QWEN,
            QWEN_TOKENS,
            Thinking.OVER,
            ['<[6]> "\\n" call "\\n" <[7]>', "%json", "(", "marked)*"],
        ),
        (
            {"tools": [TOOL], "tool_choice": "required"},
            PLAIN,
            {},
            Thinking.OVER,
            ['"<tool_call>" "\\n" call "\\n" "</tool_call>"'],
        ),
        (
            {"tools": [TOOL], "tool_choice": "required"},
            "{{ tools }}{{ messages }}",
            MISTRAL_TOKENS,
            Thinking.OVER,
            ['<[5]> "get" <[6]> %json'],
        ),
        (
            {"tools": [TOOL], "tool_choice": "required"},
            XML,
            QWEN_TOKENS,
            Thinking.OVER,
            [r'<[6]> "\n<function=get>\n" argument_0_0?', r'"<parameter=a>\n" %json {'],
        ),
        (
            {"tools": [TOOL], "tool_choice": "required"},
            HARMONY,
            {5: "<|channel|>", 6: "<|message|>", 7: "<|end|>"},
            Thinking.POSSIBLE,
            ['(<[5]> "analysis" <[6]> /(?s:.*)/ <[7]>', '<[5]> "commentary to=functions.get '],
        ),
        (
            {"guided_regex": "a"},
            HARMONY,
            {5: "<|channel|>", 6: "<|message|>"},
            Thinking.OPENED,
            ["start: thoughts ", '<[5]> "final" <[6]> (/a/)'],
        ),
        # An answer in its form, or calls.
        (
            {"tools": [TOOL], "guided_regex": "a"},
            QWEN,
            QWEN_TOKENS,
            Thinking.OVER,
            ["answer_0: /a/", "answer_1: marked"],
        ),
        # Strict tools that may be called.
        ({"tools": [STRICT]}, QWEN, QWEN_TOKENS, Thinking.OVER, ["/(?s:.*)/ (marked"]),
        ({"tools": [STRICT]}, PLAIN, {}, Thinking.OVER, None),
    ],
)  # fmt: skip
def test_output_constraints_follow_the_tool_choice(
    fields: dict[str, Any],
    source: str,
    tokens: dict[int, str],
    where: Thinking,
    parts: list[str] | None,
) -> None:
    body = chat(**fields)
    made = model(source, tokens)
    structure = made.structure(body, body.structure, made.argument_schemas(body), where)

    if parts is None:
        assert structure is None
        return
    assert structure is not None
    assert all(part in structure.grammar.text for part in parts)
    assert structure.grammar.kind is (GrammarKind.REGEX if parts == ["a"] else GrammarKind.LARK)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "get"}}},
        {
            "tool_choice": {"type": "function", "function": {"name": "get"}},
            "parallel_tool_calls": True,
        },
    ],
)
def test_a_single_call_is_forced_by_name_or_without_parallel_calls(fields: dict[str, Any]) -> None:
    body = chat(tools=[TOOL], **fields)
    structure = model().structure(body, None, model().argument_schemas(body), Thinking.OVER)

    assert structure is not None and "marked)*" not in structure.grammar.text
