"""`tideserve up --upstream`: a cluster in front of a real server, here another cluster."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError

from tests.support.batches import as_file
from tests.support.client import open_client, prompt_of, stream_completion
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model, write_tokenizer
from tests.support.upstream_server import UpstreamServer
from tests.support.waiting import eventually

STREAMS = 24
KEY = "sk-of-the-upstream"

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


def server(model_dir: Path) -> Cluster:
    """A cluster that serves as the upstream server."""
    options: dict[str, Any] = {"model_name": "tiny", "dtype": "float64", "threads": 1}
    return Cluster(model_dir, workers=1, memory="64MiB", api_key=KEY, **options)


@pytest.fixture(scope="module")
def upstream(model_dir: Path) -> Iterator[Cluster]:
    with server(model_dir) as running:
        yield running


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text(KEY)
    return path


@pytest.fixture(scope="module")
def front(upstream: Cluster, model_dir: Path, key_file: Path) -> Iterator[Cluster]:
    options: dict[str, Any] = {"upstream": [upstream.url], "upstream_key_file": str(key_file)}
    options["worker"] = {"upstream_kv_tokens": 16_384}
    with Cluster(model_dir, workers=1, queue_limit=4, **options) as running:
        yield running


@asynccontextmanager
async def entered(cluster: Cluster) -> AsyncIterator[Cluster]:
    """Start and stop a cluster without blocking this process's servers."""
    stack = ExitStack()
    try:
        yield await asyncio.to_thread(stack.enter_context, cluster)
    finally:
        await asyncio.to_thread(stack.close)


async def answer(cluster: Cluster, number: int, key: str = "none", **options: Any) -> str:
    """The greedy output for a prompt derived from `number`."""
    answer = await stream_completion(
        cluster.url,
        api_key=key,
        prompt=prompt_of(number, options.pop("prompt_tokens", 20)),
        max_tokens=options.pop("max_tokens", 64),
        temperature=0.0,
        ignore_eos=True,
        **options,
    )
    return answer.text


async def test_outputs_are_those_of_the_server(upstream: Cluster, front: Cluster) -> None:
    async with open_client(front.url) as client, open_client(upstream.url, KEY) as direct:
        asked: Any = {"model": "tiny", "prompt": "Tides", "temperature": 0, "max_tokens": 24}
        asked |= {"logprobs": 2, "stop": ["word7"]}
        mine, theirs = [await each.completions.create(**asked) for each in (client, direct)]
        assert mine.choices == theirs.choices
        messages = [{"role": "user", "content": "Which animal barks?"}]
        asked = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24}
        chats = [await each.chat.completions.create(**asked) for each in (client, direct)]
        assert chats[0].choices == chats[1].choices
    (row,) = front.workers()
    assert (row["engine"], row["can_merge"]) == ("openai", False)
    assert row["upstream"].startswith(f"{upstream.url}: tiny by tideserve")
    assert row["upstream"].endswith("output as token ids") and not row["outage"]


async def test_a_disconnect_reaches_the_server(upstream: Cluster, front: Cluster) -> None:
    begun = asyncio.Event()

    async def note(_chunks: int) -> None:
        begun.set()

    tokens = "vllm:request_generation_tokens_sum"
    before = upstream.metric(tokens)
    running = asyncio.create_task(answer(front, 1, max_tokens=3000, on_chunk=note))
    await begun.wait()
    await eventually(lambda: upstream.workers()[0]["running"] == 1)
    running.cancel()
    await asyncio.wait([running])
    await eventually(lambda: upstream.workers()[0]["running"] == 0)
    assert upstream.metric(tokens) == before, "the server finished the request"
    await eventually(lambda: front.workers()[0]["running"] == 0)


async def test_overload_is_refused_with_retry_after(front: Cluster) -> None:
    async def ask(number: int) -> str:
        try:
            await answer(front, number, prompt_tokens=3000, max_tokens=400)
        except APIStatusError as error:
            assert error.status_code == 503
            assert int(error.response.headers["retry-after"]) >= 1
            return "refused"
        return "served"

    assert set(await asyncio.gather(*map(ask, range(40)))) == {"refused", "served"}


async def test_a_batch_works(upstream: Cluster, front: Cluster) -> None:
    bodies: list[Any] = [
        {"model": "tiny", "prompt": prompt_of(number, 20), "max_tokens": 16, "temperature": 0}
        for number in range(8)
    ]
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    async with open_client(front.url) as client, open_client(upstream.url, KEY) as direct:
        file = await client.files.create(file=("in.jsonl", as_file(lines)), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )

        async def output() -> str | None:
            state = await client.batches.retrieve(batch.id)
            assert state.status != "failed", state.errors
            return state.output_file_id if state.status == "completed" else None

        content = await client.files.content(await eventually(output))
        answers = {row["custom_id"]: row for row in map(json.loads, content.text.splitlines())}
        for number, body in enumerate(bodies):
            wanted = await direct.completions.create(**body)
            answered = answers[f"{number}"]["response"]["body"]
            assert answered["choices"][0]["text"] == wanted.choices[0].text


@pytest.mark.parametrize("tier", ["priority", "default", "flex"])
async def test_each_class_is_served(front: Cluster, tier: Any) -> None:
    async with open_client(front.url) as client:
        messages: Any = [{"role": "user", "content": "a"}]
        chat = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, service_tier=tier
        )
    assert chat.service_tier == tier


def held(cluster: Cluster) -> int:
    """Requests at the first worker."""
    (row,) = cluster.workers()
    return int(row["running"] + row["waiting"])


async def test_streams_survive_the_loss_of_the_server(upstream: Cluster, front: Cluster) -> None:
    tokens = 400
    wanted = [await answer(upstream, n, KEY, max_tokens=tokens) for n in range(STREAMS)]
    chunks = [0] * STREAMS

    async def ask(number: int) -> str:
        async def note(count: int) -> None:
            chunks[number] = count

        return await answer(front, number, max_tokens=tokens, on_chunk=note)

    running = [asyncio.create_task(ask(number)) for number in range(STREAMS)]
    # At the worker all are resumed, also those that wait for the server.
    await eventually(lambda: max(chunks) >= 3 and held(front) == STREAMS, interval_s=0.005)
    killed = upstream.kill("gateway")
    await asyncio.to_thread(upstream.wait_for_restart, "gateway", killed)
    assert list(await asyncio.gather(*running)) == wanted
    await eventually(lambda: front.workers()[0]["running"] == 0)
    assert "is gone" in front.log("worker-0")


async def test_a_request_breaks_three_servers_at_most(tmp_path: Path) -> None:
    """Streams break after each token, so no other limit ends the request."""
    (tmp_path / "config.json").write_text('{"vocab_size": 320, "max_position_embeddings": 4096}')
    write_tokenizer(tmp_path, 320)
    async with UpstreamServer() as first, UpstreamServer() as other:
        options: dict[str, Any] = {"upstream": [first.url, other.url], "model_name": "tiny"}
        async with entered(Cluster(tmp_path, workers=2, **options)) as cluster:
            first.ends_early = other.ends_early = True
            async with open_client(cluster.url) as client:
                with pytest.raises(APIStatusError) as raised:
                    await client.completions.create(model="tiny", prompt="a", max_tokens=60)
        assert (raised.value.status_code, raised.value.code) == (502, "server_lost")
        assert len(first.bodies) + len(other.bodies) == 3


@pytest.mark.slow
async def test_requests_of_a_killed_server_move_to_another(
    upstream: Cluster, model_dir: Path, key_file: Path
) -> None:
    tokens = 400
    wanted = [await answer(upstream, n, KEY, max_tokens=tokens) for n in range(STREAMS)]
    chunks = [0] * STREAMS
    with server(model_dir) as other:
        options: dict[str, Any] = {"upstream": [upstream.url, other.url]}
        options |= {"upstream_key_file": str(key_file), "worker": {"upstream_kv_tokens": 16_384}}
        with Cluster(model_dir, workers=2, **options) as front:

            async def ask(number: int) -> str:
                async def note(count: int) -> None:
                    chunks[number] = count

                return await answer(front, number, max_tokens=tokens, on_chunk=note)

            running = [asyncio.create_task(ask(number)) for number in range(STREAMS)]
            await eventually(lambda: min(chunks) >= 3, interval_s=0.005)
            assert all(row["running"] for row in front.workers())
            other.kill_all()
            assert list(await asyncio.gather(*running)) == wanted
            (gone,) = [row for row in front.workers() if row["outage"]]
            assert gone["upstream"].startswith(other.url) and not gone["running"]
            assert (await asyncio.gather(*(ask(n) for n in range(4)))) == wanted[:4]
