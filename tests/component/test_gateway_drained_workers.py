"""Workers that shut down return streams at any token, unnoticed by clients.

Both workers return a request after each token, so moves fall between any two tokens of a stop
string, a character or a tool call. Requests move without KV through the scheduler, or with KV
directly to the other worker.
"""

import json

import pytest

from tests.support.byte_tokenizer import EOS_ID
from tests.support.gateway import TEXT, Case, text_ids
from tideserve.worker.v1 import worker_pb2

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'

pytestmark = pytest.mark.gateway(workers=2, max_model_len=4096)


@pytest.fixture(autouse=True, params=[False, True], ids=["without KV", "with KV"])
def with_kv(case: Case, request: pytest.FixtureRequest) -> bool:
    for worker, other in zip(case.cluster.workers, reversed(case.cluster.workers), strict=True):
        worker.fails_after, worker.failure = 1, worker_pb2.FINISH_REASON_RETURNED
        worker.leaving = not request.param
        worker.go_to = other if request.param else None
    return bool(request.param)


def starts_of(case: Case) -> int:
    return sum(len(worker.starts) for worker in case.cluster.workers)


async def test_characters_of_several_tokens_are_complete(case: Case, with_kv: bool) -> None:
    tokens = len(text_ids(TEXT))
    async with case.stream(max_tokens=tokens) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    texts = [json.loads(line)["choices"][0]["text"] for line in lines]
    assert "".join(texts) == TEXT
    assert starts_of(case) == tokens
    asks = case.cluster.scheduler.asks
    if with_kv:
        assert len(asks) == 1
        return
    assert len(asks) == tokens and all(ask.returned and ask.resumed for ask in asks[1:])
    assert not any(ask.alone for ask in asks), "no engine has died"
    assert all(0 < ask.excused_s <= ask.waited_s for ask in asks[1:])


async def test_a_stop_string_may_span_many_workers(case: Case) -> None:
    choice = (await case.complete(max_tokens=60, stop=["and the"])).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The tide comes in, ", "stop")


async def test_log_probabilities_are_complete(case: Case) -> None:
    choice = (await case.complete(max_tokens=9, logprobs=1)).json()["choices"][0]
    assert choice["text"] == TEXT[:9] and len(choice["logprobs"]["tokens"]) == 9


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_may_span_many_workers(case: Case, stream: bool) -> None:
    for worker in case.cluster.workers:
        worker.script = lambda _: [*text_ids(f"Let me see.\n{CALL}"), EOS_ID]
    answer = await case.chat(tools=[TOOL], stream=stream)
    if not stream:
        choice = answer.json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        arguments, reason = call["function"]["arguments"], choice["finish_reason"]
    else:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        choices = [json.loads(line)["choices"][0] for line in lines]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
        arguments = "".join(call["function"].get("arguments", "") for call in calls)
        reason = choices[-1]["finish_reason"]
    assert json.loads(arguments) == {"city": "Köln"} and reason == "tool_calls"
    assert starts_of(case) > len(text_ids(CALL))


@pytest.mark.parametrize("with_kv", [False], indirect=True)
async def test_a_request_may_be_returned_often_before_its_first_token(case: Case) -> None:
    """Returns are not limited like losses of a worker."""
    for worker in case.cluster.workers:
        worker.fails_after = 0
    alive = case.cluster.workers[0]

    original = alive._generate

    async def generate(start: worker_pb2.Start, *others: object) -> None:
        if len(case.cluster.scheduler.asks) > 6:
            alive.fails_after = None
        await original(start, *others)

    alive._generate = generate  # type: ignore[method-assign,assignment]
    answer = await case.complete(max_tokens=5)
    assert answer.json()["choices"][0]["text"] == TEXT[:5]
    asks = case.cluster.scheduler.asks
    assert len(asks) > 6 and not any(ask.resumed for ask in asks)
