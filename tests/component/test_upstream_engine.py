"""Requests of a worker run on an upstream HTTP server, despite its losses and refusals."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.common.config import from_mapping
from services.core.planner.events import EmitToken, RefuseRequest
from services.core.report import OtherRoom
from services.core.request import (
    SERVER_LOSSES_MAX,
    FinishReason,
    Grammar,
    GrammarKind,
    Limits,
    LogprobOptions,
    Request,
    Sampling,
)
from services.core.service import Service, ServiceClass
from services.worker.config import WorkerConfig
from services.worker.errors import WorkerError
from services.worker.ipc import AbortRequest, ReturnRequests, StartRequest
from services.worker.openai_engine import opening
from services.worker.openai_engine.errors import UpstreamChanged
from services.worker.openai_engine.opening import open_upstream
from services.worker.vllm_engine.arguments import priority_of
from services.worker.vllm_engine.server_losses import LossCount
from tests.support.fake_async_llm import AdapterOnTest
from tests.support.tiny_models import write_tokenizer
from tests.support.upstream_server import BLOCKS, UpstreamServer, expected
from tests.support.waiting import eventually

GREEDY = Sampling(temperature=0)


@pytest.fixture
async def upstream() -> AsyncIterator[UpstreamServer]:
    async with UpstreamServer() as server:
        yield server


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = {"vocab_size": 320, "max_position_embeddings": 4096, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def config_of(model_dir: Path, server: UpstreamServer, **options: Any) -> WorkerConfig:
    given = {"etcd_url": "", "model_name": server.model, "model_dir": str(model_dir)}
    given |= {"engine": "openai", "upstream_url": server.url, "start_timeout_s": 4}
    return from_mapping(WorkerConfig, given | options, "a test")


@asynccontextmanager
async def worker(
    model_dir: Path, server: UpstreamServer, **options: Any
) -> AsyncIterator[AdapterOnTest]:
    running = AdapterOnTest(opened=await open_upstream(config_of(model_dir, server, **options)))
    try:
        yield running
    finally:
        await running.close()


@pytest.fixture
async def adapter(model_dir: Path, upstream: UpstreamServer) -> AsyncIterator[AdapterOnTest]:
    async with worker(model_dir, upstream) as running:
        yield running


def prompt_of(name: str) -> tuple[int, ...]:
    return tuple(3 + ord(letter) % 80 for letter in f"prompt {name}")


def start(name: str = "r", **changes: Any) -> StartRequest:
    fields: dict[str, Any] = {"sampling": GREEDY, "limits": Limits(8)}
    return StartRequest(Request(name, prompt_of(name), arrival_s=0.0, **(fields | changes)))


def tokens(adapter: AdapterOnTest, name: str = "r") -> list[EmitToken]:
    return [t for frame in adapter.progress for t in frame.tokens if t.request_id == name]


def ids(adapter: AdapterOnTest, name: str = "r") -> list[int]:
    return [token.token_id for token in tokens(adapter, name)]


def refusals(adapter: AdapterOnTest) -> list[RefuseRequest]:
    return [refusal for frame in adapter.progress for refusal in frame.refusals]


async def ended(adapter: AdapterOnTest, name: str = "r") -> FinishReason | RefuseRequest:
    def end() -> FinishReason | RefuseRequest | None:
        last = [token.finish_reason for token in tokens(adapter, name)[-1:]]
        return next(filter(None, [*last, *refusals(adapter)]), None)

    return await eventually(end, interval_s=0.005)


async def begun(adapter: AdapterOnTest, count: int, name: str = "r") -> None:
    await eventually(lambda: len(tokens(adapter, name)) >= count, interval_s=0.001)


async def test_a_request_gets_the_servers_tokens(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    batch = Service(ServiceClass.BATCH, rank=4)
    adapter.send(start(cache_salt="of a", service=batch))
    assert await ended(adapter) is FinishReason.LENGTH
    assert ids(adapter) == expected(list(prompt_of("r")), 8)
    assert [token.index for token in tokens(adapter)] == list(range(8))
    (body,) = upstream.bodies
    wanted = {"model": upstream.model, "prompt": list(prompt_of("r")), "max_tokens": 8}
    wanted |= {"temperature": 0, "cache_salt": "of a", "priority": priority_of(batch)}
    assert wanted.items() <= body.items()
    (times,) = [frame.times["r"] for frame in adapter.progress if frame.times]
    assert times.wait_s == 0 and times.prefill_s > 0
    assert (await adapter.settled()).report.load.kv_blocks_free == BLOCKS


@pytest.mark.parametrize("count", [1, 8])
async def test_cached_tokens_are_those_reported_by_the_server(
    adapter: AdapterOnTest, upstream: UpstreamServer, count: int
) -> None:
    upstream.cached_tokens = 5
    adapter.send(start(limits=Limits(count)))
    assert await ended(adapter) is FinishReason.LENGTH
    assert [token.cached_tokens for token in tokens(adapter)] == [0] * (count - 1) + [5]
    assert not upstream.hung_up


async def test_cached_tokens_of_a_prompt_with_output_do_not_count(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    upstream.cached_tokens, upstream.ends_early = 5, True
    adapter.send(start())
    await begun(adapter, 1)
    upstream.ends_early = False
    assert await ended(adapter) is FinishReason.LENGTH
    assert {token.cached_tokens for token in tokens(adapter)} == {0}


@pytest.mark.parametrize("count", [-1, "5", True, None, {}])
async def test_invalid_counts_of_cached_tokens_are_ignored(
    adapter: AdapterOnTest, upstream: UpstreamServer, count: Any
) -> None:
    upstream.cached_tokens = count
    adapter.send(start())
    assert await ended(adapter) is FinishReason.LENGTH
    assert {token.cached_tokens for token in tokens(adapter)} == {0}


async def test_a_stream_that_exceeds_its_last_token_is_closed(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    upstream.tokens_more = 50
    adapter.send(start())
    assert await ended(adapter) is FinishReason.LENGTH
    assert ids(adapter) == expected(list(prompt_of("r")), 8)
    await eventually(lambda: upstream.hung_up, interval_s=0.005)


async def test_a_stop_token_ends_a_request(adapter: AdapterOnTest) -> None:
    output = expected(list(prompt_of("r")), 8)
    adapter.send(start(limits=Limits(8, stop_token_ids=frozenset({output[3]}))))
    assert await ended(adapter) is FinishReason.STOP
    assert ids(adapter) == output[: output.index(output[3]) + 1]


async def test_log_probabilities(adapter: AdapterOnTest) -> None:
    adapter.send(start(logprobs=LogprobOptions(output=1, prompt=0)))
    await ended(adapter)
    first = tokens(adapter)[0]
    assert first.logprobs is not None and first.prompt_logprobs is not None
    (row,) = first.logprobs.unpacked()
    assert (row.logprob, row.rank, row.top) == (-0.5, 1, ((first.token_id, -0.5),))
    assert [row.logprob for row in first.prompt_logprobs.unpacked()] == [-1.0] * (
        len(prompt_of("r")) - 1
    )


async def test_an_abort_closes_the_connection(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    upstream.hold(after=1)
    adapter.send(start())
    await begun(adapter, 1)
    adapter.send(AbortRequest("r"))
    await eventually(lambda: upstream.hung_up == [list(prompt_of("r"))], interval_s=0.005)
    assert (await adapter.settled()).report.load.kv_blocks_free == BLOCKS


async def test_requests_survive_the_loss_of_the_server(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    names = [f"r{number}" for number in range(24)]
    upstream.hold(after=5)
    for name in names:
        adapter.send(start(name, limits=Limits(40)))
    for name in names:
        await begun(adapter, 5, name)
    await upstream.kill()
    gone = await eventually(
        lambda: [f for f in adapter.progress if f.report.load.kv_blocks_free == 0], interval_s=0.005
    )
    assert gone
    upstream.release()
    await upstream.start()
    for name in names:
        assert await ended(adapter, name) is FinishReason.LENGTH
        assert ids(adapter, name) == expected(list(prompt_of(name)), 40)
        assert [token.index for token in tokens(adapter, name)] == list(range(40))
    resumed = [body["max_tokens"] for body in upstream.bodies if body["max_tokens"] != 40]
    assert resumed == [40 - 5] * len(names)
    await eventually(lambda: adapter.progress[-1].report.load.kv_blocks_free == BLOCKS)


async def test_a_server_that_does_not_return_fails_its_requests(
    model_dir: Path, upstream: UpstreamServer
) -> None:
    async with worker(model_dir, upstream, upstream_wait_s=0.2) as adapter:
        upstream.hold(after=1)
        adapter.send(start())
        await begun(adapter, 1)
        await upstream.kill()
        refusal = await ended(adapter)
    assert isinstance(refusal, RefuseRequest)
    assert refusal.retryable and "was gone for 0.2 s (upstream_wait_s)" in refusal.message


async def test_an_unresponsive_server_is_lost(model_dir: Path, upstream: UpstreamServer) -> None:
    async with worker(model_dir, upstream, engine_unready_s=1) as adapter:
        upstream.hold(after=1)
        adapter.send(start(limits=Limits(30)))
        await begun(adapter, 1)
        upstream.polled.clear()
        await eventually(lambda: upstream.hung_up)
        await eventually(lambda: adapter.progress[-1].report.load.kv_blocks_free == 0)
        upstream.polled.set()
        upstream.release()
        assert await ended(adapter) is FinishReason.LENGTH
        assert ids(adapter) == expected(list(prompt_of("r")), 30)


async def test_a_server_that_returns_with_another_model_ends_the_worker(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    await upstream.kill()
    upstream.max_model_len -= 1
    await eventually(
        lambda: adapter.progress and not adapter.progress[-1].report.load.kv_blocks_free
    )
    await upstream.start()
    with pytest.raises(ExceptionGroup) as raised:
        await adapter.running
    (changed,) = raised.value.exceptions
    assert isinstance(changed, UpstreamChanged) and "up to 511 tokens" in str(changed)


async def test_requests_to_a_full_server_are_retried(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    upstream.refusals = [503, 429]
    adapter.send(start())
    assert await ended(adapter) is FinishReason.LENGTH
    assert len(upstream.bodies) == 3


async def test_failing_metrics_do_not_break_streams(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    upstream.hold(after=2)
    adapter.send(start())
    await begun(adapter, 2)
    upstream.metrics_status = 500
    await eventually(lambda: upstream.failed_polls >= 2)
    upstream.release()
    assert await ended(adapter) is FinishReason.LENGTH
    assert len(upstream.bodies) == 1 and not (await adapter.settled()).report.outage


@pytest.mark.parametrize("status", [429, 503, 529])
async def test_a_full_server_is_not_lost(
    adapter: AdapterOnTest, upstream: UpstreamServer, status: int
) -> None:
    upstream.hold(after=2)
    adapter.send(start())
    await begun(adapter, 2)
    upstream.refusals, upstream.probe_status = [500], status
    adapter.send(start("lost"))
    await begun(adapter, 2, "lost")
    upstream.release()
    assert await ended(adapter) is FinishReason.LENGTH
    assert await ended(adapter, "lost") is FinishReason.LENGTH
    assert len(upstream.bodies) == 3  # only one request is retried


@pytest.mark.parametrize("status", [429, 503, 529])
async def test_the_wait_for_a_full_server_is_limited(
    model_dir: Path, upstream: UpstreamServer, status: int
) -> None:
    upstream.refusals = [status]
    async with worker(model_dir, upstream, upstream_wait_s=0) as adapter:
        adapter.send(start())
        refusal = await ended(adapter)
    assert isinstance(refusal, RefuseRequest)
    assert refusal.retryable and "the upstream server is full" in refusal.message


async def test_a_request_for_prompt_logprobs_waits_for_a_full_server(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    upstream.probe_status = 429
    adapter.send(start(logprobs=LogprobOptions(prompt=1)))
    await eventually(lambda: upstream.failed_probes)
    upstream.probe_status = 200
    assert await ended(adapter) is FinishReason.LENGTH
    assert tokens(adapter)[0].prompt_logprobs is not None


async def test_a_refused_request_has_the_servers_reason(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    upstream.refusals = [400]
    adapter.send(start())
    refusal = await ended(adapter)
    assert isinstance(refusal, RefuseRequest) and not refusal.retryable
    assert refusal.message == (
        "the upstream server refused the request: as the test wants (HTTP 400)"
    )


async def test_a_stream_that_ends_early_continues_and_then_fails(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    upstream.ends_early = True
    adapter.send(start())
    refusal = await ended(adapter)
    assert isinstance(refusal, RefuseRequest) and refusal.retryable
    assert "were lost 3 times under this request" in refusal.message
    assert refusal.server_losses == SERVER_LOSSES_MAX == 3
    assert ids(adapter) == expected(list(prompt_of("r")), SERVER_LOSSES_MAX)


@pytest.mark.parametrize("earlier", [0, 1, 2])
async def test_losses_at_earlier_workers_count(
    adapter: AdapterOnTest, upstream: UpstreamServer, earlier: int
) -> None:
    upstream.breaks = True
    adapter.send(start(server_losses=earlier))
    refusal = await ended(adapter)
    assert isinstance(refusal, RefuseRequest)
    assert (refusal.server_losses, len(upstream.bodies)) == (3, 3 - earlier)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"refusals": [500, 502, 504]}, "failed with HTTP status 504"),
        ({"refusals": [204] * SERVER_LOSSES_MAX}, "failed with HTTP status 204"),
        ({"content_type": "text/html"}, "got 'text/html'"),
        ({"breaks": True}, "the connection to the upstream server failed"),
    ],
)
async def test_repeated_server_failures_are_not_blamed_on_the_request(
    adapter: AdapterOnTest, upstream: UpstreamServer, fault: dict[str, Any], message: str
) -> None:
    vars(upstream).update(fault)
    adapter.send(start())
    refusal = await ended(adapter)
    assert isinstance(refusal, RefuseRequest) and refusal.retryable
    assert message in refusal.message and "do not retry" not in refusal.message
    assert len(upstream.bodies) == SERVER_LOSSES_MAX


async def test_a_redirect_is_an_error_of_the_server(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    upstream.refusals = [307]
    adapter.send(start())
    refusal = await ended(adapter)
    assert isinstance(refusal, RefuseRequest) and refusal.retryable
    assert "redirects requests (HTTP 307)" in refusal.message
    assert "set 'upstream_url'" in refusal.message


@pytest.mark.parametrize("filler", ['data: {"choices":[]}\n\n', ": keep-alive\n\n"])
@pytest.mark.parametrize("held_after", [0, 2])
async def test_a_stream_without_tokens_is_lost(
    model_dir: Path,
    upstream: UpstreamServer,
    monkeypatch: pytest.MonkeyPatch,
    filler: str,
    held_after: int,
) -> None:
    monkeypatch.setattr(opening, "FIRST_TIMEOUTS", 1)
    async with worker(model_dir, upstream, engine_dead_s=1) as adapter:
        upstream.filler = filler
        upstream.hold(after=held_after)
        adapter.send(start())
        await eventually(lambda: upstream.hung_up, deadline_s=30)
        upstream.release()
        assert await ended(adapter) is FinishReason.LENGTH
        assert ids(adapter) == expected(list(prompt_of("r")), 8)


async def test_bad_words_are_refused(adapter: AdapterOnTest) -> None:
    adapter.send(start(sampling=replace(GREEDY, bad_words=((5,),))))
    refusal = await ended(adapter)
    assert isinstance(refusal, RefuseRequest) and not refusal.retryable
    assert refusal.message.startswith("bad_words is not supported with the upstream server; use")


def test_old_losses_are_forgotten() -> None:
    losses = LossCount()
    for output, count in ((0, 1), (999, 2), (1998, 3), (2998, 1), (2998, 2)):
        losses.note(output)
        assert losses.count == count


@pytest.mark.parametrize("with_output", [False, True])
async def test_a_grammar_restarts_only_without_output(
    adapter: AdapterOnTest, upstream: UpstreamServer, with_output: bool
) -> None:
    upstream.hold(after=1 if with_output else 0)
    grammar = replace(GREEDY, grammar=Grammar(GrammarKind.REGEX, "a*"))
    adapter.send(start(sampling=grammar))
    if with_output:
        await begun(adapter, 1)
    await eventually(lambda: upstream.bodies)
    await upstream.kill()
    upstream.release()
    await upstream.start()
    end = await ended(adapter)
    if with_output:
        assert isinstance(end, RefuseRequest) and end.retryable
        assert "in the middle of a grammar" in end.message
        adapter.send(start("resumed", sampling=grammar, output_ids=(5,)))
        resumed = (await eventually(lambda: refusals(adapter)[1:]))[0]
        assert resumed.retryable and "the upstream server cannot resume" in resumed.message
    else:
        assert end is FinishReason.LENGTH
        assert ids(adapter) == expected(list(prompt_of("r")), 8)


async def test_requests_of_a_lost_server_are_returned_on_demand(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    upstream.hold(after=2)
    for name, fields in {"kept": {}, "moved": {"resumable": True}}.items():
        adapter.send(start(name, **fields))
        await begun(adapter, 2, name)
    room = ReturnRequests(OtherRoom(1000, (1000,)))
    await upstream.kill()
    await eventually(lambda: adapter.progress[-1].report.outage)
    assert upstream.url in adapter.progress[-1].report.outage
    adapter.send(ReturnRequests(OtherRoom(1000)))  # no worker has room now
    assert not (await adapter.settled()).refusals
    adapter.send(room)
    (refusal,) = await eventually(lambda: refusals(adapter))
    assert (refusal.request_id, refusal.returned, refusal.kv_lost) == ("moved", True, True)
    assert refusal.server_losses == 1
    upstream.release()
    await upstream.start()
    await eventually(lambda: len(ids(adapter, "kept")) == 8)
    assert ids(adapter, "kept") == expected(list(prompt_of("kept")), 8)
    assert ids(adapter, "moved") == expected(list(prompt_of("moved")), 2)


async def test_requests_of_another_worker_continue_after_their_output(
    adapter: AdapterOnTest, upstream: UpstreamServer
) -> None:
    output = expected(list(prompt_of("r")), 8)
    adapter.send(start(output_ids=tuple(output[:5])))
    assert await ended(adapter) is FinishReason.LENGTH
    assert ids(adapter) == output[5:]
    assert [token.index for token in tokens(adapter)] == [5, 6, 7]


async def test_a_worker_waits_for_its_server(model_dir: Path) -> None:
    server = UpstreamServer()
    opening = asyncio.create_task(open_upstream(config_of(model_dir, server)))
    async with server:
        opened = await opening
        assert opened.facts.kv_blocks_total == BLOCKS
        assert (opened.facts.max_model_len, opened.facts.vocab_size) == (512, 320)


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        ({"key": "secret"}, {}, "denies access (no such key); set 'upstream_key_file'"),
        ({}, {"upstream_model": "other"}, "has no model 'other' but: up/stream; set"),
        ({"completes": False}, {}, "refuses a completion of a token (status 400)"),
    ],
)
async def test_unusable_servers(
    model_dir: Path, server: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    async with UpstreamServer(**server) as upstream:
        with pytest.raises(WorkerError) as raised:
            await open_upstream(config_of(model_dir, upstream, **options))
    assert message in str(raised.value)


async def test_a_missing_server(model_dir: Path) -> None:
    with pytest.raises(WorkerError, match="did not serve within 1 s"):
        await open_upstream(config_of(model_dir, UpstreamServer(), start_timeout_s=1))


async def test_the_key_is_sent(model_dir: Path) -> None:
    key = model_dir / "key"
    key.write_text("secret\n")
    async with UpstreamServer(key="secret") as upstream:
        config = config_of(model_dir, upstream, upstream_key_file=str(key))
        assert (await open_upstream(config)).facts.block_size == 16


@pytest.mark.parametrize("content", ["", "secret\nsecond", "secret\x01"])
async def test_a_malformed_key_is_not_shown(model_dir: Path, content: str) -> None:
    key = model_dir / "key"
    key.write_text(content)
    config = config_of(model_dir, UpstreamServer(), upstream_key_file=str(key))
    with pytest.raises(WorkerError, match="is not a key in printable ASCII") as raised:
        await open_upstream(config)
    assert "secret" not in str(raised.value)


async def test_without_metrics_the_configured_cache_size_is_used(model_dir: Path) -> None:
    async with UpstreamServer(has_metrics=False) as upstream:
        for options, blocks in (
            ({"upstream_kv_tokens": 640}, 640 // 16),
            ({"max_running": 4}, 4 * 512 // 16),
        ):
            opened = await open_upstream(config_of(model_dir, upstream, **options))
            assert opened.facts.kv_blocks_total == blocks
        async with worker(model_dir, upstream, upstream_kv_tokens=640) as adapter:
            adapter.send(start())
            assert await ended(adapter) is FinishReason.LENGTH
            assert (await adapter.settled()).report.load.kv_blocks_free == 40


@pytest.mark.parametrize(
    ("server", "options", "warns"),
    [
        ({"owned_by": "tideserve", "has_metrics": False}, {}, True),
        ({"owned_by": "tideserve", "has_metrics": False}, {"upstream_kv_tokens": 640}, False),
        ({"owned_by": "tideserve"}, {}, False),
        ({"has_metrics": False}, {}, False),
    ],
)
async def test_a_tideserve_server_without_cluster_metrics_is_warned_of(
    model_dir: Path,
    caplog: pytest.LogCaptureFixture,
    server: dict[str, Any],
    options: dict[str, Any],
    warns: bool,
) -> None:
    async with UpstreamServer(**server) as upstream:
        await open_upstream(config_of(model_dir, upstream, max_running=4, **options))
    warnings = [r.getMessage() for r in caplog.records if "KV capacity" in r.getMessage()]
    assert len(warnings) == warns
    for warning in warnings:
        assert f"{upstream.url} exports no KV capacity" in warning
        assert "assumes 2048 tokens; set 'cluster_metrics: true'" in warning


@pytest.fixture(params=[False, True], ids=["prompts of ids", "prompts of text"])
async def text_server(
    request: pytest.FixtureRequest, model_dir: Path
) -> AsyncIterator[UpstreamServer]:
    write_tokenizer(model_dir, 320)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    async with UpstreamServer(tokenizer=tokenizer, text_prompts=request.param) as server:
        yield server


async def test_text_is_tokenized(model_dir: Path, text_server: UpstreamServer) -> None:
    async with worker(model_dir, text_server) as adapter:
        assert (await adapter.settled()).report.upstream.endswith(
            "output as text, prompts too" if text_server.text_prompts else "output as text"
        )
        adapter.send(start())
        assert await ended(adapter) is FinishReason.LENGTH
        assert ids(adapter) == expected(list(prompt_of("r")), 8)
        (body,) = text_server.bodies
        assert isinstance(body["prompt"], str) == text_server.text_prompts
        assert not {"return_token_ids", "min_p", "top_k"} & body.keys()
        adapter.send(start("s", limits=Limits(8, stop_token_ids=frozenset({2, 50}))))
        await eventually(lambda: len(text_server.bodies) == 2)
        assert text_server.bodies[1]["stop_token_ids"] == [2, 50]


async def test_text_output_does_not_survive_a_loss_of_the_server(
    model_dir: Path, text_server: UpstreamServer
) -> None:
    async with worker(model_dir, text_server) as adapter:
        text_server.hold(after=3)
        adapter.send(start("begun", resumable=True))
        await begun(adapter, 2, "begun")
        text_server.hold(after=0)
        adapter.send(start("new"))
        await eventually(lambda: len(text_server.bodies) == 2)
        await text_server.kill()
        (refusal,) = await eventually(lambda: refusals(adapter))
        assert refusal.request_id == "begun" and refusal.retryable
        assert "cannot continue the output because it returns text only" in refusal.message
        text_server.release()
        await text_server.start()
        await eventually(lambda: len(ids(adapter, "new")) == 8)
        assert ids(adapter, "new") == expected(list(prompt_of("new")), 8)
        adapter.send(start("resumed", output_ids=(5,)))
        refused = await eventually(lambda: refusals(adapter)[1:])
        assert refused[0].retryable
        assert "cannot continue the output of another worker" in refused[0].message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": LogprobOptions(output=1)}, "log probabilities are not supported"),
        ({"logprobs": LogprobOptions(prompt=1)}, "log probabilities of the prompt are not"),
        (
            {"sampling": replace(GREEDY, grammar=Grammar(GrammarKind.REGEX, "a"))},
            "grammars are not supported with an upstream server that returns text only",
        ),
    ],
)
async def test_requests_that_need_token_ids_are_refused(
    model_dir: Path, text_server: UpstreamServer, changes: dict[str, Any], message: str
) -> None:
    async with worker(model_dir, text_server) as adapter:
        adapter.send(start(**changes))
        refusal = await ended(adapter)
    assert isinstance(refusal, RefuseRequest) and not refusal.retryable
    assert message in refusal.message
