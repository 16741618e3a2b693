"""The official client against a whole cluster; batching must not change results."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from benchmarks.systems.system import read_metrics
from benchmarks.systems.tideserve import metrics_addresses
from tests.support.client import open_client, prompt_of
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually

MESSAGES: Any = [{"role": "user", "content": "Tell me about the tide."}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), seed=8)
    with Cluster(model_dir=folder, memory="32MiB", dtype="float64", api_key="sesame") as running:
        yield running


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with open_client(cluster.url, api_key="sesame") as opened:
        yield opened


@pytest.fixture
def model(cluster: Cluster) -> str:
    return str(cluster.get("/v1/models")["data"][0]["id"])


async def chat(client: openai.AsyncOpenAI, model: str, **options: Any) -> Any:
    return await client.chat.completions.create(model=model, messages=MESSAGES, **options)


async def test_models(client: openai.AsyncOpenAI, model: str) -> None:
    card = await client.models.retrieve(model)
    assert card.id == model
    assert card.max_model_len == 4096
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("no-such-model")


async def test_chat_and_usage(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await chat(client, model, temperature=0, max_completion_tokens=12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens > len(MESSAGES[0]["content"])
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


async def test_stream_equals_whole(client: openai.AsyncOpenAI, model: str) -> None:
    options: Any = {"temperature": 0.9, "seed": 4, "max_tokens": 40}
    whole = await chat(client, model, **options)
    stream = await chat(
        client, model, stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None and not chunks[-1].choices
    # Cached tokens differ: the second request may reuse the first one's prompt.
    assert usage.completion_tokens == whole.usage.completion_tokens == 40
    assert usage.prompt_tokens == whole.usage.prompt_tokens


async def test_stop(client: openai.AsyncOpenAI, model: str) -> None:
    options: Any = {"temperature": 0, "max_tokens": 60}
    text = (await chat(client, model, **options)).choices[0].message.content
    stop = text[20:26]
    answer = await chat(client, model, stop=stop, **options)
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


async def test_the_same_seed_gives_the_same_text_alone_or_in_a_batch(
    client: openai.AsyncOpenAI, model: str
) -> None:
    async def text(seed: int) -> str:
        answer = await chat(client, model, temperature=1, top_p=0.95, seed=seed, max_tokens=64)
        return str(answer.choices[0].message.content)

    alone = [await text(seed) for seed in range(8)]
    assert len(set(alone)) == 8, "different seeds give different texts"
    together = await asyncio.gather(*(text(seed % 8) for seed in range(32)))
    assert together == alone * 4


async def test_the_first_of_several_choices_is_the_only_one_of_the_same_seed(
    client: openai.AsyncOpenAI, model: str
) -> None:
    options: Any = {"temperature": 1, "seed": 11, "max_tokens": 32}
    alone = await chat(client, model, **options)
    several = await chat(client, model, n=4, **options)
    texts = [choice.message.content for choice in several.choices]
    assert texts[0] == alone.choices[0].message.content
    assert len(set(texts)) == 4
    again = await chat(client, model, n=4, **options)
    assert [choice.message.content for choice in again.choices] == texts
    assert several.usage.prompt_tokens == alone.usage.prompt_tokens


async def test_log_probabilities_of_an_output_are_those_of_the_same_text_as_a_prompt(
    client: openai.AsyncOpenAI, model: str
) -> None:
    prompt = prompt_of(3, 20)
    ids: Any = {"return_token_ids": True, "ignore_eos": True}
    made = await client.completions.create(
        model=model, prompt=prompt, temperature=0.8, seed=5, max_tokens=12, logprobs=2,
        extra_body=ids,
    )  # fmt: skip
    (choice,) = made.choices
    assert len(choice.logprobs.tokens) == made.usage.completion_tokens == 12
    scored = await client.completions.create(
        model=model, prompt=[*prompt, *choice.token_ids], max_tokens=0, echo=True, logprobs=2
    )
    logprobs = scored.choices[0].logprobs
    assert scored.usage.completion_tokens == 0
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[-12:] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
    assert logprobs.tokens[-12:] == choice.logprobs.tokens
    assert len(logprobs.tokens) == len(logprobs.text_offset) == 32


async def test_a_greedy_chat_takes_the_most_likely_tokens(
    client: openai.AsyncOpenAI, model: str
) -> None:
    answer = await chat(client, model, temperature=0, max_tokens=16, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.token == token.top_logprobs[0].token
        assert token.logprob == token.top_logprobs[0].logprob
    stream = await chat(
        client, model, temperature=0, max_tokens=16, logprobs=True, top_logprobs=3, stream=True
    )
    chunks = [chunk async for chunk in stream]
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    assert [token for part in parts if part is not None for token in part.content] == content


async def test_logit_bias_and_allowed_tokens_constrain_the_output(
    client: openai.AsyncOpenAI, model: str
) -> None:
    ids: Any = {"return_token_ids": True, "ignore_eos": True}
    options: Any = {"model": model, "prompt": prompt_of(1, 9), "max_tokens": 6, "temperature": 0}
    forced = await client.completions.create(**options, logit_bias={"77": 100}, extra_body=ids)
    assert forced.choices[0].token_ids == [77] * 6
    only = ids | {"allowed_token_ids": [5, 6]}
    chosen = await client.completions.create(**options, extra_body=only)
    assert set(chosen.choices[0].token_ids) <= {5, 6}
    other = await client.completions.create(
        **options, logit_bias={"77": 100}, frequency_penalty=2, presence_penalty=2,
        extra_body=ids | {"repetition_penalty": 2.0},
    )  # fmt: skip
    assert other.choices[0].token_ids[0] == 77


async def test_a_disconnect_frees_kv_blocks(
    cluster: Cluster, client: openai.AsyncOpenAI, model: str
) -> None:
    addresses = metrics_addresses(cluster.folder / "cluster" / "prometheus_targets.json")

    def blocks(which: str) -> float:
        name = f"tideserve_worker_kv_blocks_{which}"
        return sum(read_metrics(f"http://{address}").get(name, 0.0) for address in addresses)

    total = blocks("total")
    assert total > 0
    stream = await chat(
        client, model, stream=True, max_tokens=3500, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await eventually(lambda: blocks("free") < total)
    await stream.close()
    loop = asyncio.get_running_loop()
    closed_s = loop.time()
    await eventually(lambda: blocks("free") == total)
    # A second on an idle machine; the rest is slack for busy machines.
    assert loop.time() - closed_s < 15
    counters = [read_metrics(f"http://{address}") for address in addresses]
    assert sum(counter.get("vllm:num_requests_running", 0.0) for counter in counters) == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": 2.5}, openai.BadRequestError),
        ({"max_tokens": 0}, openai.BadRequestError),
        ({"max_tokens": 100_000}, openai.BadRequestError),
        ({"n": 129}, openai.BadRequestError),
        ({"model": "no-such-model"}, openai.NotFoundError),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, openai.BadRequestError),
    ],
)
async def test_errors_have_their_types(
    client: openai.AsyncOpenAI, model: str, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        await client.chat.completions.create(**{"model": model, "messages": MESSAGES, **options})
    body = raised.value.body
    assert set(body) >= {"message", "type", "param", "code"}
    assert len(body["message"]) > 20


async def test_a_wrong_key_is_refused(cluster: Cluster, model: str) -> None:
    async with open_client(cluster.url, api_key="wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await chat(stranger, model)
