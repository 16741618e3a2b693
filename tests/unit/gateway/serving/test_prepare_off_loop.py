"""Expensive preparation runs off the event loop, whichever part of a body is long."""

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.gateway.api.chat import parse_chat
from services.gateway.api.completion import parse_completion
from services.gateway.api.conversation import MESSAGES_MAX
from services.gateway.api.messages import parse_messages
from services.gateway.api.responses import parse_responses
from services.gateway.api.tokens import TEXT_TOKENS_MAX, parse_detokenize
from services.gateway.model.chat_model import ChatModel
from services.gateway.model.served_model import ServedModel, load_model
from services.gateway.records.request_record import RequestRecord
from services.gateway.serving.prepare import Preparer
from services.gateway.structure.checker import GrammarChecker
from services.gateway.structure.fair_semaphore import FairSemaphore
from services.gateway.text.tokenizer import TextPool, Tokenizer
from services.gateway.vocabulary.errors import BadRequest
from tests.support.byte_tokenizer import write_model_folder

EMPTY = {"role": "user", "content": ""}
SHORT = {"role": "user", "content": "hi"}
TOOLS = [
    {"type": "function", "function": {"name": f"f{number}", "description": "x" * 50_000}}
    for number in range(4)
]


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    return load_model("m", write_model_folder(tmp_path / "model"), tool_format="hermes")


@pytest.fixture
async def preparer(model: ServedModel) -> AsyncIterator[Preparer]:
    pool = TextPool(1)
    checker = GrammarChecker(model.vocab_size, model.tokenizer.added_tokens)
    yield Preparer(model, pool, lambda: 300_000, checker)
    pool.close()
    await checker.close()
    assert model.renderer is not None
    await model.renderer.close()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the threads that prepared for rendering, encoded and decoded."""
    names: set[str] = set()

    def noted(kind: type[Any], name: str) -> None:
        original = getattr(kind, name)

        def note(*arguments: Any, **named: Any) -> Any:
            thread = threading.current_thread()
            names.add("loop" if thread is threading.main_thread() else thread.name)
            return original(*arguments, **named)

        monkeypatch.setattr(kind, name, note)

    noted(ChatModel, "template_fields")
    noted(Tokenizer, "encode")
    noted(Tokenizer, "decode")
    return names


def record(address: str = "") -> RequestRecord:
    return RequestRecord("r", 0.0, response_id="r", address=address)


async def test_short_prompts_are_prepared_inline(preparer: Preparer, threads: set[str]) -> None:
    for body in (
        parse_chat({"model": "m", "messages": [SHORT]}),
        parse_completion({"model": "m", "prompt": ["hi", "ho"]}),
    ):
        await preparer.token_ids(body, record())
    assert threads == {"loop"}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [EMPTY] * MESSAGES_MAX},
        {"messages": [EMPTY] * 64},
        {"messages": [SHORT], "tools": TOOLS},
        {"prompt": ["x" * 1000] * 64},
    ],
    ids=["empty-messages", "some-empty-messages", "tools", "prompts"],
)
async def test_long_input_is_prepared_off_the_loop(
    preparer: Preparer, threads: set[str], fields: dict[str, Any]
) -> None:
    parse = parse_chat if "messages" in fields else parse_completion
    await preparer.token_ids(parse({"model": "m"} | fields), record())
    assert threads and "loop" not in threads


async def test_an_echo_of_tokens_is_decoded_off_the_loop(
    preparer: Preparer, threads: set[str]
) -> None:
    body = parse_completion({"model": "m", "prompt": [65] * 5000, "echo": True})
    prepared = await preparer.prepare(body, record())
    assert len(prepared.choices[0].echo) == 5000
    assert any(name != "loop" for name in threads)


def test_messages_are_bounded_in_number() -> None:
    many = [EMPTY] * (MESSAGES_MAX + 1)
    for parse, field, more in (
        (parse_chat, "messages", {}),
        (parse_messages, "messages", {"max_tokens": 1}),
        (parse_responses, "input", {}),
    ):
        parse({"model": "m", field: [SHORT] * MESSAGES_MAX} | more)
        with pytest.raises(BadRequest, match=str(MESSAGES_MAX)) as caught:
            parse({"model": "m", field: many} | more)
        assert caught.value.param == field


async def test_tokens_to_detokenize_are_bounded_in_number(
    preparer: Preparer, threads: set[str]
) -> None:
    ids = [65] * TEXT_TOKENS_MAX
    assert len(await preparer.text_of(ids)) == TEXT_TOKENS_MAX
    assert threads and "loop" not in threads
    parse_detokenize({"tokens": ids}, "m")
    with pytest.raises(BadRequest, match=str(TEXT_TOKENS_MAX)):
        parse_detokenize({"tokens": [*ids, 65]}, "m")
    with pytest.raises(BadRequest, match=str(TEXT_TOKENS_MAX)):
        await preparer.text_of([*ids, 65])


async def test_chats_and_grammars_alternate_by_address_without_keys(
    preparer: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = list[str]()
    original = FairSemaphore.slot

    def noted(self: FairSemaphore, limit_key: str) -> Any:
        turns.append(limit_key)
        return original(self, limit_key)

    monkeypatch.setattr(FairSemaphore, "slot", noted)
    for number, address in enumerate(("192.0.2.1", "192.0.2.2")):
        asked = {"model": "m", "messages": [SHORT], "guided_regex": f"a{{{number + 1}}}"}
        await preparer.prepare(parse_chat(asked), record(address))
    assert turns == ["192.0.2.1", "192.0.2.1", "192.0.2.2", "192.0.2.2"]
