"""Tool calls are parsed in the formats of the served architectures, with any chunking."""

import json
from collections.abc import Callable
from random import Random

import pytest

from services.gateway.tools.event import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Parser,
)
from services.gateway.tools.hermes import hermes_calls
from services.gateway.tools.llama3_json import Llama3JsonCalls
from services.gateway.tools.mistral import mistral_calls
from tests.support.cuttings import cuttings, merged, parsed

NAMES = frozenset({"get", "put_all", "now"})
PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": lambda: hermes_calls(NAMES),
    "mistral": lambda: mistral_calls(NAMES),
    "llama3_json": lambda: Llama3JsonCalls(NAMES),
}


def call(index: int, name: str, arguments: str = "{}", complete: bool = True) -> list[Event]:
    """The events of a call."""
    return [CallBegin(index, name), CallArguments(index, arguments), CallEnd(index, complete)]


def text(content: str) -> list[Event]:
    """The events of plain content."""
    return [Content(content)] if content else []


GET = '{"name": "get", "arguments": {"key": "a}\\"]", "n": [1, {"x": null}]}}'
GET_ARGUMENTS = '{"key": "a}\\"]", "n": [1, {"x": null}]}'
NOW = '{"arguments":{},"id":3,"name":"now"}'
OUTPUTS: dict[str, list[tuple[str, list[Event]]]] = {
    "hermes": [
        ("", []),
        ("Hello <tool", text("Hello <tool")),
        (" \n a < b \n", text(" \n a < b \n")),
        (f"<tool_call>\n{GET}\n</tool_call>", call(0, "get", GET_ARGUMENTS)),
        (f"<tool_call>{GET}", call(0, "get", GET_ARGUMENTS)),
        (
            f"Well:\n\n<tool_call>\n{NOW}\n</tool_call>\n<tool_call>\n{GET}\n</tool_call>\n",
            [*text("Well:"), *call(0, "now"), *call(1, "get", GET_ARGUMENTS)],
        ),
        (
            f"<tool_call>[{GET}, {NOW}]</tool_call> done\n",
            [*call(0, "get", GET_ARGUMENTS), *call(1, "now"), *text(" done\n")],
        ),
        ('<tool_call>{"name": "now"}</tool_call>', call(0, "now")),
        (
            '<tool_call>{"name": "get", "parameters": {"a": "b\nc"}}</tool_call>',
            call(0, "get", '{"a": "b\\nc"}'),
        ),
        (f"<tool_call>{NOW}<tool_call>{NOW}</tool_call>", [*call(0, "now"), *call(1, "now")]),
        # Text that is no call is content, the marks included.
        ("a <tool_call>now()</tool_call>", text("a <tool_call>now()</tool_call>")),
        (
            '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
            text('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ),
        (f"<tool_call>x <tool_call>{NOW}</tool_call>", [*text("<tool_call>x"), *call(0, "now")]),
        (
            '<tool_call>{"name": "get", "arguments": "{}"}',
            text('<tool_call>{"name": "get", "arguments": "{}"}'),
        ),
        ('<tool_call>{"arguments": {}}', text('<tool_call>{"arguments": {}}')),
        ('<tool_call>{"name": 3}', text('<tool_call>{"name": 3}')),
        ('<tool_call>\n{"name": "g', text('<tool_call>\n{"name": "g')),
        # A call that breaks after it has begun ends there.
        ('<tool_call>{"name": "get", "arguments": {"a": 1', call(0, "get", '{"a": 1', False)),
        (
            f'<tool_call>[{NOW}, {{"name": "get", "arguments": {{"a": 1',
            [*call(0, "now"), *call(1, "get", '{"a": 1', False)],
        ),
        (
            '<tool_call>{"name": "get", "arguments": {"a": tru}}</tool_call>',
            [*call(0, "get", '{"a": tru', False), *text("}}</tool_call>")],
        ),
        (
            f'<tool_call>[{NOW}, {{"name": 1}}]</tool_call>',
            [*call(0, "now"), *text(', {"name": 1}]</tool_call>')],
        ),
        (f"<tool_call>{NOW}}}</tool_call>", [*call(0, "now"), *text("}</tool_call>")]),
        # After a call the beginning of another, which has no name yet, is omitted.
        (f"<tool_call>{NOW}</tool_call>\n<tool", call(0, "now")),
        (f"<tool_call>{NOW}</tool_call>\n<tool_call>\n", call(0, "now")),
        (f'<tool_call>{NOW}</tool_call>\n<tool_call>\n{{"name": "get"', call(0, "now")),
        (f'<tool_call>[{NOW}, {{"name": "get"', call(0, "now")),
        (
            f"<tool_call>{NOW}</tool_call> a <tool_call>\n",
            [*call(0, "now"), *text(" a <tool_call>\n")],
        ),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{GET}, {NOW}]", [*call(0, "get", GET_ARGUMENTS), *call(1, "now")]),
        (f"[TOOL_CALLS]{NOW}", call(0, "now")),
        (
            'Hi [TOOL_CALLS]get[ARGS]{"a": 1}[TOOL_CALLS] now[CALL_ID]abcdefghi[ARGS]{}',
            [*text("Hi"), *call(0, "get", '{"a": 1}'), *call(1, "now")],
        ),
        ('get{"a": 1}', text('get{"a": 1}')),
        ('[TOOL_CALLS]get{"a": 1}', call(0, "get", '{"a": 1}')),
        ('[TOOL_CALLS]\nwhat[ARGS]{"a": 1}', text('[TOOL_CALLS]\nwhat[ARGS]{"a": 1}')),
        ("[TOOL_CALLS]" + "x" * 300, text("[TOOL_CALLS]" + "x" * 300)),
        ("[TOOL_CALLS]" + " " * 300 + "get{}", call(0, "get")),
        ("a [TOOL_CALLS] ", text("a [TOOL_CALLS] ")),
        ("a [TOOL_CALLS]get", text("a [TOOL_CALLS]get")),
        ('[TOOL_CALLS]get[ARGS]{"a"', call(0, "get", '{"a"', False)),
        ("[TOOL_CALLS]get[ARGS]{a}", [*call(0, "get", "{", False), *text("a}")]),
        (f"[TOOL_CALLS][{NOW}", call(0, "now")),
        (f'[TOOL_CALLS][{NOW}, {{"name": "get"', call(0, "now")),
        ("[TOOL_CALLS]now[ARGS]{}[TOOL", call(0, "now")),
        ("[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get[AR", call(0, "now")),
    ],
    "llama3_json": [
        ('{"name": "get", "parameters": {"a": "b"}}', call(0, "get", '{"a": "b"}')),
        (
            ' <|python_tag|>{"type": "function", "name": "get", "parameters": {"a": 1}}\n',
            call(0, "get", '{"a": 1}'),
        ),
        (
            '{"name": "now", "parameters": {}}; {"name": "get", "parameters": {}} ',
            [*call(0, "now"), *call(1, "get")],
        ),
        (
            '{"name": "now", "parameters": {}}; {"name": "get", "parameters": {"a',
            [*call(0, "now"), *call(1, "get", '{"a', False)],
        ),
        (f'{NOW}; {{"name": "get"', call(0, "now")),
        (f"{NOW};", call(0, "now")),
        ('{"name": "now"}', text('{"name": "now"}')),
        ('{"name": "Bob", "age": 3}', text('{"name": "Bob", "age": 3}')),
        ('{"name": "now", "age": 3}', text('{"name": "now", "age": 3}')),
        ('[{"name": "now"}]', text('[{"name": "now"}]')),
        (f"So {NOW}", text(f"So {NOW}")),
        (" \n", text(" \n")),
        ("<|python", text("<|python")),
        ("<|python_tag|>now.call()", text("<|python_tag|>now.call()")),
        ('{"name": "now", "parameters": {}} and more', [*call(0, "now"), *text(" and more")]),
    ],
}
CASES = [(form, *case) for form, cases in OUTPUTS.items() for case in cases]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_events_of_examples_do_not_depend_on_chunking(case: int) -> None:
    form, output, events = CASES[case]

    for pieces in cuttings(output, seed=case):
        assert parsed(PARSERS[form](), pieces) == merged(events)


@pytest.mark.parametrize("form", PARSERS)
@pytest.mark.parametrize("seed", range(150))
def test_events_of_random_text_do_not_depend_on_chunking(form: str, seed: int) -> None:
    rng = Random(seed)
    vocabulary = [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
        *(GET, NOW, '{"name": "get", "parameters": {"a": 1}}', "get", "[", "]", "{", "}", ","),
        *(";", " ", "\n", '"name"', ":", '"now"', '"arguments"', "{}", "a", "é"),
    ]
    output = "".join(rng.choice(vocabulary) for _ in range(rng.randrange(1, 14)))
    whole = parsed(PARSERS[form](), [output])

    assert all(parsed(PARSERS[form](), pieces) == whole for pieces in cuttings(output, seed))
    _check_order(whole)


def _check_order(events: list[Event]) -> None:
    """Calls start in order, and each ends before the next event of another kind."""
    index, open_call = 0, False
    for event in events:
        match event:
            case CallBegin():
                assert event.index == index and not open_call and event.name in NAMES
                open_call = True
            case CallArguments():
                assert event.index == index and open_call
            case CallEnd():
                assert event.index == index and open_call
                index, open_call = index + 1, False
            case _:
                assert not open_call


@pytest.mark.parametrize("form", PARSERS)
def test_arguments_are_streamed(form: str) -> None:
    lead = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": ""}[form]
    parser = PARSERS[form]()

    begun = parser.push(lead + '{"name": "get", "arguments": {"a": "b')
    more = parser.push("cd")

    assert begun == [CallBegin(0, "get"), CallArguments(0, '{"a": "b')]
    assert more == [CallArguments(0, "cd")]


@pytest.mark.parametrize("form", PARSERS)
def test_plain_text_is_not_held_back(form: str) -> None:
    assert PARSERS[form]().push("an answer") == [Content("an answer")]


def test_complete_arguments_are_json() -> None:
    (_, arguments, _) = parsed(PARSERS["hermes"](), [f"<tool_call>{GET}"])

    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == {"key": 'a}"]', "n": [1, {"x": None}]}
