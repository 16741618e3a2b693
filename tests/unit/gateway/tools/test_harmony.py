"""Harmony output is parsed as its library renders it, with any chunking."""

import itertools
import json
from random import Random

import openai_harmony
import pytest
from openai_harmony import Message, Role

from services.core.request import FinishReason
from services.gateway.serving.chat_output import ChatOutput
from services.gateway.serving.output import Output, OutputPiece
from services.gateway.tools.event import CallEnd, Content, Event, Reasoning
from services.gateway.tools.format import ChatForm, Thinking, ToolFormat
from services.gateway.tools.harmony import HEADER_CHARS_MAX, HarmonyParser
from services.gateway.vocabulary.delta import AnswerAccumulator
from tests.support.cuttings import cuttings, parsed

NAMES = frozenset({"get", "now"})
PROMPT = "<|start|>assistant"
ENCODING = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
TEXTS = ("Paris", "a < b | c\n\n", " \n x", "<b>é</b> 😀", "{}", "to=functions.get", "2 * 3 = 6.")


def read(pieces: list[str], opened: bool = False) -> list[Event]:
    """The parser events for the pieces."""
    return parsed(HarmonyParser(NAMES, opened), pieces)


def parsed_answer(pieces: list[str]) -> AnswerAccumulator:
    """The answer of a choice."""
    ids = itertools.count()
    chat = ChatForm(ToolFormat.HARMONY, NAMES, Thinking.POSSIBLE)
    output, total = ChatOutput(chat, lambda _: f"id{next(ids)}"), Output()
    for text in pieces:
        for piece in output.push(OutputPiece(text)):
            total.add(piece)
    for piece in output.push(OutputPiece("", finish_reason=FinishReason.STOP)):
        total.add(piece)
    return total.parsed


def random_messages(rng: Random) -> list[Message]:
    """Reasoning, preambles, calls and an answer, in the order of the model."""
    messages: list[Message] = []

    def add(channel: str, text: str) -> Message:
        message = Message.from_role_and_content(Role.ASSISTANT, text)
        messages.append(message.with_channel(channel))
        return messages[-1]

    for _ in range(rng.randrange(3)):
        add("analysis", rng.choice(TEXTS))
    if rng.random() < 0.5:
        add("commentary", rng.choice(TEXTS))
    for _ in range(rng.randrange(3)):
        arguments = {"city": rng.choice(TEXTS), "list": [1, None, {"a": rng.choice(TEXTS)}]}
        text = json.dumps(arguments, ensure_ascii=rng.random() < 0.5)
        call = add("commentary", text).with_recipient(f"functions.{rng.choice(sorted(NAMES))}")
        messages[-1] = call.with_content_type("<|constrain|>json")
    if rng.random() < 0.5 or not messages:
        add("final", rng.choice(TEXTS))
    return messages


def rendered(messages: list[Message]) -> str:
    """The output of a model that writes the messages."""
    ids = [token for message in messages for token in ENCODING.render(message)]
    text: str = ENCODING.decode_utf8(ids)
    assert text.startswith(PROMPT)
    return text.removeprefix(PROMPT)


@pytest.mark.parametrize("seed", range(80))
def test_rendered_messages_parse_with_any_chunking(seed: int) -> None:
    messages = random_messages(Random(seed))
    output = rendered(messages)

    for pieces in ([output], *([output[:at], output[at:]] for at in range(len(output)))):
        answer = parsed_answer(pieces)
        texts: dict[str | None, list[str]] = {"analysis": [], "final": []}
        calls = []
        for message in messages:
            (content,) = message.content
            assert isinstance(content, openai_harmony.TextContent)
            if message.recipient is not None:
                name = message.recipient.removeprefix("functions.")
                calls.append((name, json.loads(content.text)))
            else:
                kind = "analysis" if message.channel == "analysis" else "final"
                texts[kind].append(content.text)
        assert answer.reasoning == "\n".join(texts["analysis"])
        assert answer.content == "\n".join(texts["final"])
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    for pieces in cuttings(output, seed, count=40):
        assert read(pieces) == read([output])


@pytest.mark.parametrize("seed", range(120))
def test_truncated_output_parses_as_in_the_library(seed: int) -> None:
    rng = Random(f"library {seed}")
    ids = ENCODING.encode(rendered(random_messages(rng)), allowed_special="all")
    # The library reads tokens, and would hold an incomplete character back.
    end = rng.choice([n for n in range(1, len(ids) + 1) if not _splits_character(ids[:n])])
    stream = openai_harmony.StreamableParser(ENCODING, Role.ASSISTANT)
    texts: dict[tuple[int, str | None, str | None], str] = {}
    for token in ids[:end]:
        stream.process(token)
        if delta := stream.last_content_delta:
            key = (len(stream.messages), stream.current_channel, stream.current_recipient)
            texts[key] = texts.get(key, "") + delta

    answer = parsed_answer([ENCODING.decode_utf8(ids[:end])])

    def joined(wanted: bool) -> str:
        parts = [
            text
            for (_, channel, recipient), text in texts.items()
            if recipient is None and (channel == "analysis") is wanted
        ]
        return "\n".join(parts).strip()

    assert (answer.reasoning.strip(), answer.content.strip()) == (joined(True), joined(False))
    called = [text for (_, _, recipient), text in texts.items() if recipient is not None]
    assert [call.arguments for call in answer.calls] == called


def _splits_character(ids: list[int]) -> bool:
    try:
        ENCODING.decode_utf8(ids)
    except openai_harmony.HarmonyError:
        return True
    return False


CALL = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("output", "reasoning", "content", "arguments"),
    [
        ("", "", "", []),
        ("Hello", "", "Hello", []),
        ("<|message|>Hello", "", "Hello", []),
        ("<|channel|>final<|message|>Hi <|retu", "", "Hi <|retu", []),
        ("<|channel|>final<|message|>Hi<|return|>", "", "Hi", []),
        # The recipient may precede the channel, and the type of the arguments may be missing.
        (" to=functions.get<|channel|>commentary<|message|>{}", "", "", ["{}"]),
        ("<|channel|>analysis to=functions.get code<|message|>{}<|call|>", "", "", ["{}"]),
        (f'{CALL} {{"a": 1}} \n<|call|>', "", "", ['{"a": 1}']),
        # What is no call is content.
        (f"{CALL}[1]<|call|>", "", "[1]", []),
        (f"{CALL.replace('get', 'no')}{{}}", "", "{}", []),
        (f'{CALL}{{"a": 1}} so', "", " so", ['{"a": 1}']),
        # Reasoning for another tool is reasoning.
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", "1+1", "", []),
        # Headers that break off or have no message.
        ("<|channel|>anal", "", "", []),
        ("<|channel|>commentary to=functi", "", "", []),
        ("<|channel|>final<|message|>a<|end|><|start|>assis", "", "a", []),
        ("<|start|>hello you", "", "<|start|>hello you", []),
        ("<|channel|>final<|end|>", "", "<|channel|>final", []),
        ("<|channel|>final<|start|>assistant<|message|>a", "", "<|channel|>final\na", []),
        (f"<|channel|>{'x' * 600}<|message|>a", "", f"<|channel|>{'x' * 600}<|message|>a", []),
        ("<|end|><|end|>a<|end|>", "", "a", []),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>"
            "b<|end|><|start|>assistant<|channel|>final<|message|>c",
            "a\nb",
            "c",
            [],
        ),
    ],
)
def test_documented_deviations_from_the_library(
    output: str, reasoning: str, content: str, arguments: list[str]
) -> None:
    for pieces in cuttings(output, seed=len(output)):
        answer = parsed_answer(pieces)
        assert (answer.reasoning, answer.content) == (reasoning, content)
        assert [call.arguments for call in answer.calls] == arguments


def test_a_truncated_call_is_incomplete() -> None:
    for pieces in cuttings(f'{CALL}{{"a": 1, "b', seed=1):
        assert read(pieces)[-1] == CallEnd(0, complete=False)


def test_the_prompt_may_have_opened_the_reasoning() -> None:
    output = "hm<|end|><|start|>assistant<|channel|>final<|message|>Yes."

    for pieces in cuttings(output, seed=2):
        assert read(pieces, opened=True) == [Reasoning("hm"), Content("Yes.")]


@pytest.mark.parametrize("seed", range(100))
def test_events_do_not_depend_on_chunking(seed: int) -> None:
    rng = Random(seed)
    vocabulary = [
        *("<|start|>", "assistant", "<|channel|>", "analysis", "final", "<|message|>", "<|end|>"),
        *(" to=", "functions.get", "<|constrain|>", "json", "<|call|>", '{"a": 1}', "{", "é"),
        *(" ", "\n", "<|", "x" * HEADER_CHARS_MAX),
    ]
    output = "".join(rng.choice(vocabulary) for _ in range(rng.randrange(14)))
    whole = read([output])

    assert all(read(pieces) == whole for pieces in cuttings(output, seed))
