"""The content and the order of an output do not depend on chunking."""

import itertools
import json
from collections.abc import Iterable
from random import Random
from typing import Any

import msgspec
import pytest

from services.core.request import FinishReason
from services.gateway.http.messages import MessageBuilder
from services.gateway.http.response_items import Items
from services.gateway.serving.chat_output import ChatOutput
from services.gateway.serving.output import Output, OutputPiece, Usage
from services.gateway.serving.prepared import PreparedRequest
from services.gateway.text.token_text import TokenTexts
from services.gateway.tools.format import ChatForm, Thinking, ToolFormat
from tests.support.call_texts import CALL_FORMATS, TAGS, Calls, written
from tests.support.cuttings import cuttings

NO_TEXTS = TokenTexts(lambda _: None, b"null", ())
NAMES = frozenset({"get", "now"})
GET = '{"name": "get", "arguments": {"key": "a}\\"]", "n": [1, {"x": null}]}}'
NOW = '{"arguments":{},"id":3,"name":"now"}'
CALLS: Calls = [("get", {"key": 'a}"]', "n": [1, {"x": None}]}), ("now", {})]
# Whole calls are frequent, so that text comes between them.
WORDS = {form: (*TAGS[form], *[written(form, CALLS)] * 4) for form in CALL_FORMATS}
WORDS[ToolFormat.NONE] = ("<tool_call>",)
OTHERS = ("<think>", "</think>", GET, NOW, '{"name": "get", "parameters": {"a": ', "[", "}", ",")
PLAIN = (" ", "\n", "text", "é", "a")


def text_of(form: ToolFormat, rng: Random) -> str:
    """A random output with calls, reasoning, text, and malformed parts."""
    vocabulary = [*WORDS[form] * 3, *OTHERS, *PLAIN * 2]
    return "".join(rng.choices(vocabulary, k=rng.randrange(1, 14)))


def pieces_of(form: ChatForm, cut: list[str], finish: FinishReason) -> list[OutputPiece]:
    """The output pieces for a text with these cuts."""
    ids = itertools.count()
    output = ChatOutput(form, lambda _: f"id{next(ids)}")
    lasts = [None] * (len(cut) - 1) + [finish]
    given = [OutputPiece(text, (1,), last) for text, last in zip(cut, lasts, strict=True)]
    return [piece for part in given for piece in output.push(part)]


def story(pieces: Iterable[OutputPiece]) -> list[list[str]]:
    """The parts in order; neighbours of the same kind are joined."""
    parts: list[list[str]] = []

    def tell(kind: str, text: str) -> None:
        if text and parts and parts[-1][0] == kind:
            parts[-1][1] += text
        elif text:
            parts.append([kind, text])

    for piece in pieces:
        parsed = piece.parsed
        tell("reasoning", parsed.reasoning)
        tell("content", parsed.content)
        for call in parsed.tool_calls:
            tell(f"begin {call.index} {call.id}", call.name)
            tell(f"arguments {call.index}", call.arguments)
            tell(f"end {call.index}", "end" if call.ended else "")
        tell("finish", parsed.finish_reason or "")
    return parts


def chat(pieces: Iterable[OutputPiece]) -> Any:
    """The message of a chat."""
    output = Output()
    for piece in pieces:
        output.add(piece)
    parsed = output.parsed
    return parsed.content, parsed.reasoning, parsed.calls, parsed.finish_reason, output.text


def message(pieces: Iterable[OutputPiece]) -> Any:
    """The message of Anthropic's API, which must equal the one from its events."""
    answer = MessageBuilder(PreparedRequest("msg_1", 0, "m", (), 1, NO_TEXTS))
    events = [event for piece in pieces for event in answer.push(piece)] + answer.end(Usage(1, 1))
    whole = json.loads(msgspec.json.encode(answer.message(Usage(1, 1))))
    texts = [""] * len(whole["content"])
    for event in events:
        if event["type"] == "content_block_delta":
            (text,) = (value for name, value in event["delta"].items() if name != "type")
            texts[event["index"]] += text
    for block, text in zip(whole["content"], texts, strict=True):
        content = block["input" if block["type"] == "tool_use" else block["type"]]
        if isinstance(content, dict):
            content = content.get("INVALID_JSON", content)
        assert content == text or content == json.loads(text)
    return whole


def response(pieces: Iterable[OutputPiece]) -> Any:
    """The items of a response, without their ids."""
    items = Items(None)
    for piece in pieces:
        items.push(piece)
    return [{**item, "id": ""} for item in items.written("completed")]


@pytest.mark.parametrize("form", ToolFormat)
@pytest.mark.parametrize("thinking", [None, Thinking.OPENED, Thinking.POSSIBLE])
@pytest.mark.parametrize("include", [True, False])
def test_output_and_its_order_do_not_depend_on_chunking(
    form: ToolFormat, thinking: Thinking | None, include: bool
) -> None:
    rng = Random(f"{form} {thinking} {include}")
    between = 0
    for seed in range(60):
        text = text_of(form, rng)
        chat_form = ChatForm(form, NAMES, thinking, include_reasoning=include)
        finish = rng.choice((FinishReason.STOP, FinishReason.LENGTH))
        whole = pieces_of(chat_form, [text], finish)
        between += len(whole) > 1
        for cut in cuttings(text, seed, count=8):
            pieces = pieces_of(chat_form, cut, finish)
            for render in (story, chat, message, response):
                assert render(pieces) == render(whole)
    # Texts between calls are what one delta cannot tell.
    assert between or thinking or form in (ToolFormat.NONE, ToolFormat.LLAMA3_JSON)
