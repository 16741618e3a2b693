"""Chat templates render in a sandbox."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.gateway.model.chat_template import ChatTemplate
from services.gateway.vocabulary.errors import BadRequest

MESSAGES = [{"role": "user", "content": "a <b> & 'c'"}]


def render(source: str, **tokens: str) -> str:
    """The text of `source` for MESSAGES."""
    return ChatTemplate(source, tokens).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>a <b> & 'c'"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ messages[0]['content'] | tojson }}", "\"a <b> & 'c'\""),
        ('{{ {"a": 1} | tojson(indent=2) }}', '{\n  "a": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_capabilities_are_detected_from_the_template(source: str, text: str) -> None:
    assert render(source, bos_token="<s>") == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.x }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ undefined_thing() }}",
    ],
)
def test_an_exception_of_the_template_is_a_client_error(source: str) -> None:
    with pytest.raises(BadRequest, match="chat template refuses") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_with_a_syntax_error_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        render("{% if %}")


def test_generation_tags_are_ignored() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.role }}\n{% endgeneration %}{% endfor %}"
    assert render(source) == "user\n"


TURNS = "{{% for m in messages %}}<{{{{ m.role }}}}>{content}</{{{{ m.role }}}}>\n{{% endfor %}}"
CONTINUED: dict[str, tuple[str, Callable[[str], str]]] = {
    "plain": ("{{ m.content }}", str),
    "trim": ("{{ m.content | trim }}", str.strip),
    "lstrip": ("{{ m.content.lstrip() }}", str.lstrip),
    "rstrip": ("{{ m.content.rstrip() }}", str.rstrip),
    "newlines": ("{{ m.content.strip('\n') }}", lambda text: text.strip("\n")),
    "thoughts": ("{{ m.content.split('</think>')[-1] }}", lambda text: text.split("</think>")[-1]),
    "json": ("{{ m.content | tojson }}", lambda text: json.dumps(text, ensure_ascii=False)[:-1]),
    "upper": ("{{ m.content | upper }}", str.upper),
    "space": ("{{ ' ' + m.content + ' ' }}", lambda text: f" {text}"),
}
"""How a template writes contents, and what of a last content comes before the end."""
TEXTS = st.lists(
    st.sampled_from(["e", "<", "user", "</assistant>", " ", "\n", "\t", "hi", "</think>", "é"]),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("name", CONTINUED)
@given(user=TEXTS, text=TEXTS)
def test_a_continued_prompt_ends_with_the_last_message(name: str, user: str, text: str) -> None:
    content, written = CONTINUED[name]
    template = ChatTemplate(TURNS.format(content=content), {})
    earlier = [{"role": "user", "content": user}]
    messages = [*earlier, {"role": "assistant", "content": text}]

    prompt = template.render(messages, add_generation_prompt=False, continue_final_message=True)

    begin = template.render(earlier, add_generation_prompt=False) + "<assistant>"
    assert prompt == begin + written(text)


def test_an_empty_message_is_continued_even_if_the_template_omits_it() -> None:
    source = "{% for m in messages if m.content %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    messages = [*MESSAGES, {"role": "assistant", "content": ""}]

    prompt = ChatTemplate(source, {}).render(messages, continue_final_message=True)

    assert prompt == "<user>a <b> & 'c';<assistant>"


def test_a_continued_message_may_occur_twice() -> None:
    source = "{% for m in messages %}{{ messages[-1].content }}|{{ m.content }};{% endfor %}"
    messages = [*MESSAGES, {"role": "assistant", "content": "so"}]

    prompt = ChatTemplate(source, {}).render(messages, continue_final_message=True)

    assert prompt == "so|a <b> & 'c';so|so"


@pytest.mark.parametrize("continued", [False, True])
def test_a_refusal_that_quotes_messages_quotes_no_marks(continued: bool) -> None:
    source = "{{ raise_exception('no ' ~ messages[-1].content ~ '!') }}"
    messages = [{"role": "user", "content": "<12345|end|>"}]
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(source, {}, hidden="12345").render(messages, continue_final_message=continued)
    assert caught.value.message.endswith(": no <|end|>!")


def test_a_message_that_the_template_omits_cannot_be_continued() -> None:
    with pytest.raises(BadRequest, match="the template omits it") as caught:
        ChatTemplate("{{ messages[0].role }}", {}).render(MESSAGES, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


# As Mistral's: a single system message at the beginning, and alternating roles but for tool calls.
ALTERNATING = """{% set ns = namespace(turn=0) %}
{% for m in messages %}
{% if m.role == 'system' %}
{% if not loop.first %}{{ raise_exception('system comes first') }}{% endif %}
{% elif m.role != 'tool' and not m.tool_calls %}
{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
{% set ns.turn = ns.turn + 1 %}
{% endif %}
{{- '[' ~ m.role ~ ':' ~ m.content ~ (m.tool_calls | length if m.tool_calls else '') ~ ']' }}
{%- endfor %}"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}


def chat(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    """Messages; the role `call` is an assistant's tool call."""
    return [
        {"role": "assistant", "content": text, "tool_calls": [CALL]}
        if role == "call"
        else {"role": role, "content": text}
        for role, text in turns
    ]


@pytest.mark.parametrize(
    ("turns", "prompt"),
    [
        ([("system", "a"), ("user", "b")], "[system:a][user:b]"),
        ([("system", "a"), ("system", "b"), ("user", "c")], "[system:a\n\nb][user:c]"),
        (
            [("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d")],
            "[system:c][user:a][assistant:b][user:d]",
        ),
        (
            [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "")],
            "[user:a\n\nb][assistant:c\n\nd][user:]",
        ),
        (
            [("user", "a"), ("call", ""), ("tool", "b"), ("tool", "c"), ("user", "d")],
            "[user:a][assistant:1][tool:b][tool:c\n\nd]",
        ),
        (
            [("user", "a"), ("user", "b"), ("call", "c"), ("call", ""), ("tool", "d")],
            "[user:a\n\nb][assistant:c2][tool:d]",
        ),
    ],
)
def test_messages_are_merged_where_the_template_refuses_them(
    turns: list[tuple[str, str]], prompt: str
) -> None:
    assert ChatTemplate(ALTERNATING, {}).render(chat(*turns)) == prompt


def test_a_system_message_is_merged_where_the_template_has_none() -> None:
    template = ChatTemplate(NO_SYSTEM + ALTERNATING, {})
    assert template.render(chat(("system", "a"), ("user", "b"))) == "[user:a\n\nb]"


def test_messages_that_the_template_cannot_render_are_refused() -> None:
    with pytest.raises(BadRequest, match="must alternate"):
        ChatTemplate(ALTERNATING, {}).render(chat(("assistant", "a"), ("user", "b"), ("user", "c")))


def test_a_refusal_names_the_error_that_remains_after_merging() -> None:
    unnamed = "{% if not messages[-1].content.count('d') %}{{ raise_exception('no d') }}{% endif %}"
    turns = chat(("user", "a"), ("user", "b"))
    with pytest.raises(BadRequest, match="no d"):
        ChatTemplate(ALTERNATING + unnamed, {}).render(turns)


# As Mistral's.
NINE = """{% for m in messages %}
{% for id in [m.tool_call_id] + m.tool_calls | map(attribute='id') | list %}
{% if id is defined and id | length != 9 %}{{ raise_exception('ids of length 9') }}{% endif %}
{% endfor %}{% endfor %}"""


def test_ids_of_other_models_are_shortened_where_the_template_refuses_them() -> None:
    source = (
        NINE + "{% for m in messages %}[{{ m.tool_call_id or m.tool_calls[0].id }}]{% endfor %}"
    )
    ids = ("toolu_1", "abcdEF123")
    turns = [
        message
        for call_id in ids
        for message in (
            {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": call_id}]},
            {"role": "tool", "content": "b", "tool_call_id": call_id},
        )
    ]
    prompt = ChatTemplate(source, {}).render(turns).strip()
    short = re.fullmatch(r"\[(\w{9})\]\[\1\]\[abcdEF123\]\[abcdEF123\]", prompt)
    assert short is not None and short[1] != "abcdEF123"
    # Others write them as they are.
    plain = ChatTemplate(source.removeprefix(NINE), {})
    assert plain.render(turns).startswith("[toolu_1][toolu_1]")


def test_merged_messages_are_continued() -> None:
    turns = chat(("user", "a"), ("assistant", "b"), ("assistant", "c"))
    prompt = ChatTemplate(ALTERNATING, {}).render(turns, continue_final_message=True)
    assert prompt == "[user:a][assistant:b\n\nc"
