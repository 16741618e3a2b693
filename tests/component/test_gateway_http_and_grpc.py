"""HTTP and gRPC return the same texts, tokens, counts, finish reasons and errors."""

import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc.aio
import pytest

from services.gateway.grpc import translate
from services.gateway.grpc.errors import reason_of
from services.gateway.serving.output import LOGPROB_MIN
from services.gateway.vocabulary.errors import BadRequest
from tests.support import fake_cluster
from tests.support.bad_inputs import CHAT, COMPLETION, CONTEXT, VOCABULARY, bad_inputs
from tests.support.gateway import TIMEOUT_S, Case, text_ids
from tests.support.grpc_bodies import Request, to_message
from tideserve.client.errors import error_of
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc
from tideserve.worker.v1 import worker_pb2

REQUESTS = 200
SEED = 17
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
# gRPC's asynchronous stubs do not exist as types at run time.
Stub = Any
REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


@dataclass(frozen=True)
class Answer:
    """A response in a form common to HTTP and gRPC.

    By choice: text, finish reason, stop match, and the log probabilities of its tokens.
    """

    choices: tuple[tuple[str, int, Any, tuple[float, ...]], ...] = ()
    usage: tuple[int, int, int] | None = None
    # Parts of an error: HTTP status, reason, field, message.
    error: tuple[int, str, str | None, str] | None = None


@pytest.fixture
async def stub(
    case: Case,
) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(case.target) as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)


async def over_http(case: Case, endpoint: str, body: dict[str, Any], stream: bool) -> Answer:
    """Send a body over HTTP."""
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    content = json.dumps(body | more).encode()
    headers = {"content-type": "application/json"}
    got = await case.http.post(PATHS[endpoint], content=content, headers=headers)
    if got.status_code != 200:
        error = got.json()["error"]
        refused = BadRequest(error["message"], param=error["param"], code=error["code"])
        names = translate.NAMES["Chat" if endpoint == "chat" else "Complete"]
        message, param = names.translated(refused)
        return Answer(error=(got.status_code, reason_of(refused), param, message))
    if not stream:
        return _http_answer([got.json()])
    lines = [line.removeprefix("data: ") for line in got.text.split("\n\n") if line]
    return _http_answer([json.loads(line) for line in lines[:-1]])


def _http_answer(objects: list[dict[str, Any]]) -> Answer:
    texts: dict[int, str] = {}
    endings: dict[int, tuple[int, Any]] = {}
    logprobs: dict[int, list[float]] = {}
    for choice in (choice for item in objects for choice in item["choices"]):
        index, message = choice["index"], choice.get("message") or choice.get("delta") or {}
        texts[index] = texts.get(index, "") + (message.get("content") or choice.get("text") or "")
        if choice["finish_reason"] is not None:
            endings[index] = REASONS[choice["finish_reason"]], choice["stop_reason"]
        logprobs.setdefault(index, []).extend(_http_logprobs(choice["logprobs"]))
    usage = objects[-1]["usage"]
    return Answer(
        tuple((texts[k], *endings[k], tuple(logprobs[k])) for k in sorted(texts)),
        (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]),
    )


def _http_logprobs(logprobs: dict[str, Any] | None) -> list[float]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"]]
    return [value for value in logprobs["token_logprobs"] if value is not None]


async def over_grpc(stub: Stub, request: Request, stream: bool) -> Answer:
    """Send a message over gRPC."""
    try:
        if not stream:
            return _whole_answer(await _unary(stub, request))
        return _stream_answer([piece async for piece in _streamed(stub, request)])
    except grpc.aio.AioRpcError as failed:
        error = error_of(failed)
        status = int(error.metadata["http_status"])
        return Answer(error=(status, error.reason, error.field, error.message))


async def _unary(stub: Stub, request: Request) -> Any:
    if isinstance(request, pb.ChatRequest):
        return await stub.Chat(request, timeout=TIMEOUT_S)
    return await stub.Complete(request, timeout=TIMEOUT_S)


def _streamed(stub: Stub, request: Request) -> Any:
    if isinstance(request, pb.ChatRequest):
        return stub.StreamChat(pb.StreamChatRequest(chat=request), timeout=TIMEOUT_S)
    return stub.StreamComplete(pb.StreamCompleteRequest(completion=request), timeout=TIMEOUT_S)


def _whole_answer(answer: Any) -> Answer:
    choices = []
    for choice in answer.choices:
        text = choice.message.text if isinstance(choice, pb.ChatChoice) else choice.text
        logprobs = _echoed(choice) if isinstance(choice, pb.CompletionChoice) else []
        logprobs += [token.logprob for token in choice.logprobs]
        choices.append((text, choice.finish_reason, _stop(choice), tuple(logprobs)))
    return Answer(tuple(choices), _usage(answer.usage))


def _stream_answer(pieces: list[Any]) -> Answer:
    choices = []
    for index in sorted({piece.index for piece in pieces}):
        mine = [piece for piece in pieces if piece.index == index]
        logprobs = _echoed(mine[0]) + [token.logprob for piece in mine for token in piece.logprobs]
        text = "".join(piece.text for piece in mine)
        choices.append((text, mine[-1].finish_reason, _stop(mine[-1]), tuple(logprobs)))
    return Answer(tuple(choices), _usage(pieces[-1].usage))


def _echoed(choice: Any) -> list[float]:
    return [token.logprob for token in choice.prompt_logprobs]


def _stop(choice: Any) -> Any:
    kind = choice.stop_reason.WhichOneof("reason")
    return None if kind is None else getattr(choice.stop_reason, kind)


def _usage(usage: pb.Usage) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


async def test_bad_inputs_have_the_same_errors(case: Case, stub: Stub) -> None:
    count = 0
    for bad in bad_inputs():
        request = to_message(bad.endpoint, bad.body)
        if request is None:
            continue
        count += 1
        stream = bad.body.get("stream") is True
        body = {name: value for name, value in bad.body.items() if name != "stream"}
        expected = await over_http(case, bad.endpoint, body, stream)
        assert expected.error is not None and expected.error[0] == bad.status, bad.name
        assert await over_grpc(stub, request, stream) == expected, bad.name
    assert count > 130, "most of what protobuf can say is in the table"
    assert case.cluster.workers[0].starts == []
    assert (await case.grpc.complete("hi", model="m", max_tokens=1)).usage.completion_tokens == 1


def some_body(random: Random) -> tuple[str, dict[str, Any]]:
    """A random endpoint and body; most are valid, some exceed limits."""

    def maybe(**fields: Any) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if random.random() < 0.25}

    endpoint = random.choice(["chat", "completion"])
    texts = [random.choice(["tide", "sea", "Ça va", "日本", "\0", "😀"]) for _ in range(5)]
    body = maybe(
        temperature=random.choice([0.0, 0.5, 2.0, 2.5]),
        top_p=random.choice([0.1, 1.0, 1.5]),
        top_k=random.choice([-1, 0, 5, VOCABULARY, VOCABULARY + 1]),
        min_p=random.choice([0.0, 0.5]),
        presence_penalty=random.choice([-2.0, 0.5, 2.5]),
        repetition_penalty=random.choice([0.5, 1.5]),
        seed=random.choice([-1, 0, 2**63 - 1]),
        logit_bias={str(random.randrange(VOCABULARY)): 1.5},
        bad_words=["no"],
        min_tokens=random.choice([0, 2]),
        ignore_eos=random.choice([True, False]),
        n=random.choice([1, 2, 3, 129]),
        cache_salt="salt",
        priority=random.choice([-3, 0, 3]),
        user="someone",
        stop=random.sample([" comes", "goes", "日", "zzz", "!"], 2),
        stop_token_ids=[random.choice([*text_ids("!"), 3, VOCABULARY])],
    )
    body["max_tokens"] = random.choice([1, 8, 30, 60, 90, CONTEXT])
    if endpoint == "chat":
        roles = ["system", "user", "assistant", "developer"]
        body["messages"] = [{"role": random.choice(roles), "content": word} for word in texts]
        body |= maybe(logprobs=True)
        if body.get("logprobs"):
            body |= maybe(top_logprobs=2)
        return endpoint, CHAT | body
    ids = [random.randrange(VOCABULARY) for _ in range(4)]
    body["prompt"] = random.choice([" ".join(texts), ids, [texts[0], ids], texts[:3]])
    body |= maybe(logprobs=random.choice([0, 3]), echo=True)
    return endpoint, COMPLETION | body


async def test_http_and_grpc_return_the_same(case: Case, stub: Stub) -> None:
    random, worker = Random(SEED), case.cluster.workers[0]
    worker.step_s = 0.0
    refused, answered = 0, 0
    for number in range(REQUESTS):
        worker.tokens_per_event = random.choice([1, 3, 16])
        endpoint, body = some_body(random)
        request = to_message(endpoint, body)
        assert request is not None, body
        expected = await over_http(case, endpoint, body, stream=False)
        for stream in (False, True):
            name = f"{number}, stream {stream}: {body}"
            assert await over_grpc(stub, request, stream) == expected, name
        assert await over_http(case, endpoint, body, stream=True) == expected, body
        refused += expected.error is not None
        answered += expected.error is None
    assert refused > REQUESTS / 10 and answered > REQUESTS / 4


async def test_prompts_have_as_many_logprobs_as_each_field_requests(case: Case, stub: Stub) -> None:
    for beside, of_prompt in ((1, 5), (5, 1), (0, 3), (2, None)):
        fields: dict[str, Any] = {"prompt": "hello", "echo": True, "logprobs": beside}
        fields |= {} if of_prompt is None else {"prompt_logprobs": of_prompt}
        answer = await case.complete(**fields, max_tokens=2)
        (choice,) = answer.json()["choices"]
        # The token itself is added unless it is among them.
        tops = choice["logprobs"]["top_logprobs"]
        assert tops[0] is None and len(tops) == 7
        assert {len(top) for top in tops[1:]} == {beside + 1}
        assert ("prompt_logprobs" in choice) is (of_prompt is not None)
        if of_prompt is not None:
            assert {len(rows) for rows in choice["prompt_logprobs"][1:]} == {of_prompt + 1}
        request = to_message("completion", {"model": "m", "max_tokens": 2} | fields)
        (over_grpc,) = (await stub.Complete(request, timeout=TIMEOUT_S)).choices
        assert {len(token.top) for token in over_grpc.logprobs} == {beside}
        wanted = beside if of_prompt is None else of_prompt
        assert {len(token.top) for token in over_grpc.prompt_logprobs} == {wanted}


async def test_minus_infinity_is_the_same_number_over_http_and_grpc(
    case: Case, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(token_id: int, top: int) -> worker_pb2.TokenLogprobs:
        low = [-math.inf] * top
        return worker_pb2.TokenLogprobs(
            logprob=-math.inf, rank=1, top_ids=range(3, 3 + top), top_logprobs=low
        )

    monkeypatch.setattr(fake_cluster, "fake_logprobs", impossible)
    body = {"model": "m", "prompt": "hi", "max_tokens": 1, "logprobs": 1}
    (choice,) = (await case.complete(**body)).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [LOGPROB_MIN]
    assert set(choice["logprobs"]["top_logprobs"][0].values()) == {LOGPROB_MIN}
    answer = await stub.Complete(to_message("completion", body), timeout=TIMEOUT_S)
    (token,) = answer.choices[0].logprobs
    assert (token.logprob, token.top[0].logprob) == (LOGPROB_MIN, LOGPROB_MIN)


async def test_top_logprobs_need_logprobs(stub: Stub) -> None:
    for sampling in (pb.Sampling(top_logprobs=0), pb.Sampling(logprobs=False, top_logprobs=0)):
        prompts = [pb.Prompt(text="hi")]
        request = pb.CompleteRequest(model="m", prompts=prompts, sampling=sampling)
        message = pb.Message(role=pb.ROLE_USER, text="hi")
        chat = pb.ChatRequest(model="m", messages=[message], sampling=sampling)
        for answer in (
            await stub.Complete(request, timeout=TIMEOUT_S),
            await stub.Chat(chat, timeout=TIMEOUT_S),
        ):
            assert not answer.choices[0].logprobs
