"""Clients' strings and keys appear in no log line, metric, span or event log.

All client-supplied strings are marked, in requests that succeed, are refused, fail and crash, over
HTTP and gRPC. Ids chosen by clients are logged on purpose and have no mark.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from services.common.etcd import Store
from services.core.quota.limits import QuotaLimits
from services.gateway.serving.prepare import Preparer
from tests.support.canaries import CHAT, COMPLETION, MARK, good, refused, refused_json, word
from tests.support.gateway import TIMEOUT_S, Case, gateway_case, text_ids
from tests.support.grpc_bodies import to_message
from tests.support.log_lines import LogLines, log_lines
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.waiting import eventually
from tideserve.cli.keys import add_key
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc
from tideserve.kserve.v2 import inference_pb2 as kpb
from tideserve.kserve.v2 import inference_pb2_grpc
from tideserve.worker.v1 import worker_pb2

PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
MINE = "logged-on-purpose"
LAST = "the-last-of-all"
TRACEPARENT = f"00-{'1' * 32}-{'2' * 16}-01"
HEADERS = {
    "x-request-id": MINE,
    "traceparent": TRACEPARENT,
    "user-agent": word("agent"),
    "x-anything": word("header"),
}
# Loggers of this test's own clients.
OURS = ("httpx", "httpcore", "openai")


@pytest.fixture
def lines() -> Iterator[LogLines]:
    # Log lines of the test's own clients are ignored.
    with log_lines(*OURS) as lines:
        yield lines


class Seen:
    """A gateway that receives the marked requests, with their outcomes."""

    def __init__(self, case: Case, keys: dict[str, str], receiver: OtlpReceiver) -> None:
        self.case = case
        self.keys = keys
        self.receiver = receiver
        self.headers = HEADERS | {"authorization": f"Bearer {keys['client']}"}
        # gRPC's library sets the user agent itself.
        sent = self.headers.items()
        self.metadata = tuple((name, value) for name, value in sent if name != "user-agent")
        self.last = ""

    async def http(self, endpoint: str, body: dict[str, Any] | bytes, **headers: str) -> int:
        """The status of an HTTP request."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json"} | self.headers | headers
        path = f"{PATHS.get(endpoint, endpoint)}?q={word('query')}"
        answer = await self.case.http.post(path, content=content, headers=sent)
        self.last = answer.text
        return answer.status_code

    async def grpc(self, request: Any, stream: bool = False) -> str:
        """The code of a call."""
        async with grpc.aio.insecure_channel(self.case.target) as channel:
            stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
            options = {"metadata": self.metadata, "timeout": TIMEOUT_S}
            if not stream:
                method = stub.Chat if isinstance(request, pb.ChatRequest) else stub.Complete
                call = method(request, **options)
            elif isinstance(request, pb.ChatRequest):
                call = stub.StreamChat(pb.StreamChatRequest(chat=request), **options)
            else:
                asked = pb.StreamCompleteRequest(completion=request)
                call = stub.StreamComplete(asked, **options)
            with contextlib.suppress(grpc.aio.AioRpcError):
                while stream and await call.read() is not grpc.aio.EOF:
                    pass
            return str((await call.code()).name)

    async def kserve(self, stream: bool, **fields: Any) -> None:
        """Send a request over KServe's protocol; it may fail."""
        request = kpb.ModelInferRequest(model_name="m", id=word("kserve-id"))
        for name, text in (("text_input", word("tensor")), ("sampling_parameters", fields)):
            tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
            data = text if isinstance(text, str) else json.dumps(text)
            tensor.contents.bytes_contents.append(data.encode())
        request.parameters[word("parameter")].string_param = word("value")
        async with grpc.aio.insecure_channel(self.case.target) as channel:
            stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            options = {"metadata": self.metadata, "timeout": TIMEOUT_S}
            with contextlib.suppress(grpc.aio.AioRpcError):
                if stream:
                    async for _ in stub.ModelStreamInfer(iter([request]), **options):
                        pass
                else:
                    await stub.ModelInfer(request, **options)

    async def both(self, endpoint: str, body: dict[str, Any]) -> tuple[int, str]:
        """The HTTP status and the gRPC code of a request."""
        request = to_message(endpoint, body)
        assert request is not None, f"gRPC cannot say {body}"
        return await self.http(endpoint, body), await self.grpc(request)


@pytest.fixture
async def seen(store: Store, tmp_path: Path, lines: LogLines) -> AsyncIterator[Seen]:
    path = tmp_path / "keys.jsonl"
    keys = {
        "client": add_key(path, "alice", False, None, QuotaLimits()),
        "other": add_key(path, "bob", False, ["other"], QuotaLimits()),
        "admin": add_key(path, "ops", True, None, QuotaLimits()),
    }
    with OtlpReceiver() as receiver:
        async with gateway_case(
            store,
            tmp_path / "model",
            max_model_len=1024,
            api_keys_file=path,
            sent_key=keys["client"],
            otlp_endpoint=receiver.endpoint,
            trace_sample_ratio=1.0,
            event_log=tmp_path / "events",
            client_stall_s=5.0,
        ) as case:
            yield Seen(case, keys, receiver)


async def answered(seen: Seen) -> None:
    for endpoint, body in good():
        assert await seen.both(endpoint, body) == (200, "OK"), seen.last
        assert await seen.http(endpoint, body | {"stream": True}) == 200
        request = to_message(endpoint, body)
        assert await seen.grpc(request, stream=True) == "OK"
    unknown = {word("field"): word("value"), "metadata": {"k": word("metadata")}}
    assert await seen.http("chat", CHAT | unknown) == 200
    messages = {"model": "m", "max_tokens": 3, "system": word("system")}
    messages |= {"messages": [{"role": "user", "content": word("user")}]}
    assert await seen.http("/v1/messages", messages) == 200
    answer = {"model": "m", "instructions": word("system"), "input": word("user")}
    assert await seen.http("/v1/responses", answer | {"max_output_tokens": 3}) == 200
    assert await seen.http("/tokenize", {"model": "m", "prompt": word("prompt")}) == 200
    assert await seen.http(f"/v1/requests/{word('unknown')}/cancel", b"") == 200
    for stream in (False, True):
        await seen.kserve(stream, max_tokens=3, stop=word("stop"))


async def refusals(seen: Seen) -> None:
    for endpoint, body in refused():
        status, code = await seen.both(endpoint, body)
        assert 400 <= status < 500 and code in ("INVALID_ARGUMENT", "NOT_FOUND"), seen.last
    for endpoint, body in refused_json():
        assert 400 <= await seen.http(endpoint, body) < 500, body
    for name in ("x-slo-ttft-ms", "x-gateway-inference-objective"):
        assert await seen.http("chat", CHAT, **{name: word("promise")}) == 400
    assert await seen.http("chat", word("no json").encode()) == 400
    assert await seen.http("chat", b'{"' + word("half").encode()) == 400
    assert await seen.http(f"/v1/{word('path')}", b"{}") == 404
    assert await seen.http("chat", CHAT, **{"content-type": f"text/{word('type')}"}) == 415
    assert await seen.http("chat", CHAT, **{"x-filler": word("filler") * 2000}) == 431
    assert await seen.http("chat", CHAT, authorization=f"Bearer {word('key')}") == 401
    assert await seen.http("chat", CHAT, authorization=word("no-bearer")) == 401
    assert await seen.http("chat", CHAT, authorization=f"Bearer {seen.keys['other']}") == 403
    for stream in (False, True):
        await seen.kserve(stream, temperature=word("temperature"))
        await seen.kserve(stream, **{word("field"): word("value"), "n": -1})
    metadata = (("authorization", f"Bearer {word('key')}"), ("x-request-id", word("un safe")))
    async with grpc.aio.insecure_channel(seen.case.target) as channel:
        for path, data in (
            ("/tideserve.gateway.v1.GatewayService/Chat", b"\xff" + word("bytes").encode()),
            (f"/{word('Service')}/{word('Method')}", word("bytes").encode()),
        ):
            for sent in (metadata, seen.metadata):
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(path)(data, metadata=sent, timeout=TIMEOUT_S)


async def no_http(seen: Seen) -> None:
    """Send bytes that are not HTTP."""
    host, port = seen.case.url.removeprefix("http://").split(":")
    for data in (f"{word('method')} / {word('version')}\r\n\r\n", f"\x16\x03{word('tls')}\r\n\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data.encode())
        assert b"400" in await reader.readline()
        writer.close()


async def broken(seen: Seen) -> None:
    """Use workers that fail, misbehave and disappear, with errors that quote their clients."""
    worker = seen.case.cluster.workers[0]
    worker.broken, worker.finish = word("reason"), worker_pb2.FINISH_REASON_ERROR
    for endpoint, body in (("chat", CHAT), ("completion", COMPLETION)):
        assert (await seen.both(endpoint, body))[0] == 503
    worker.finish = worker_pb2.FINISH_REASON_LENGTH
    worker.generate_more = 1
    for endpoint, body in (("chat", CHAT), ("completion", COMPLETION)):
        assert (await seen.both(endpoint, body))[0] == 500
        assert await seen.http(endpoint, body | {"stream": True}) == 200
    worker.generate_more = 0
    worker.pause_at = 2
    streams = [
        asyncio.create_task(seen.http("chat", CHAT | {"stream": True})),
        asyncio.create_task(seen.grpc(to_message("chat", CHAT), stream=True)),
    ]
    await eventually(lambda: len(worker.active) == 2)
    worker.die()
    assert await asyncio.gather(*streams) == [200, "ABORTED"]
    worker.pause_at, worker.fails_after = 2, None
    left = asyncio.create_task(seen.http("completion", COMPLETION))
    await eventually(lambda: len(worker.active) == 1)
    left.cancel()
    await eventually(lambda: not worker.active)
    worker.pause_at = None


async def crashed(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cause internal errors whose exceptions quote the request."""

    async def crash(self: Preparer, body: Any, record: Any) -> Any:
        try:
            raise KeyError(word("inner"))
        except KeyError as error:
            raise ValueError(f"{word('crash')} {body!r}") from error

    with monkeypatch.context() as patch:
        patch.setattr(Preparer, "prepare", crash)
        for endpoint, body in (("chat", CHAT), ("completion", COMPLETION)):
            assert await seen.both(endpoint, body) == (500, "INTERNAL")
        await seen.kserve(stream=False)


async def operator_views(seen: Seen) -> str:
    """The metrics and the status shown to operators."""
    admin = {"authorization": f"Bearer {seen.keys['admin']}"}
    pages = []
    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=admin) as http:
        for url in (
            f"{seen.case.url}/metrics",
            f"{str(seen.case.admin.base_url).rstrip('/')}/metrics",
            f"{str(seen.case.admin.base_url).rstrip('/')}/tideserve/v1/status",
        ):
            answer = await http.get(url)
            assert answer.status_code == 200, url
            pages.append(answer.text)
    return "\n".join(pages)


async def test_no_strings_or_keys_of_clients_are_exposed(
    seen: Seen,
    lines: LogLines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    seen.case.cluster.workers[0].script = lambda _: text_ids(word("output") * 5)
    await answered(seen)
    await refusals(seen)
    await no_http(seen)
    await broken(seen)
    await crashed(seen, monkeypatch)
    metrics = await operator_views(seen)
    # Spans are exported in order of their ends, so this is the last.
    assert await seen.http("chat", CHAT, **{"x-request-id": LAST}) == 200
    seen.case.stop.set()
    await eventually(lambda: any(LAST in str(span) for span in seen.receiver.all_spans))
    written = "\n".join(path.read_text() for path in (tmp_path / "events").iterdir())
    streams = capfd.readouterr()
    texts = {
        "log": "\n".join(lines.lines),
        "metrics": metrics,
        "spans": "\n".join(map(str, seen.receiver.all_spans)),
        "event log": written,
        "output": streams.out + streams.err,
    }
    # The logs are not empty: they contain ids, failures and crashes.
    assert texts["log"].count(MINE) > 50 and texts["spans"].count(MINE) > 20
    assert "a request failed" in texts["log"] and "a call failed" in texts["log"]
    assert "builtins.ValueError" in texts["log"] and "worker_lost" in texts["spans"]
    assert 'status="500"' in metrics and "StreamOpened" in written
    secrets = [MARK, *seen.keys.values()]
    for where, text in texts.items():
        for secret in secrets:
            for line in text.lower().splitlines():
                assert secret.lower() not in line, f"{where}: {line[:600]}"
