"""The gateway when clients, scheduler or workers disappear."""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.clock import monotonic_s
from services.common.errors import ConfigError
from services.common.etcd import Store
from services.common.grpc_client import open_channel
from services.common.membership import GROUPS, WORKERS
from services.gateway.app import serve
from services.gateway.bounds.body_budget import SMALL_BYTES
from services.gateway.bounds.drain import Drain
from services.gateway.cluster import worker_client, worker_link
from services.gateway.cluster.admission_client import SWEEP_S
from services.gateway.cluster.worker_client import WorkerClient
from services.gateway.cluster.worker_link import WorkerLink
from services.gateway.config import GatewayConfig
from tests.support.byte_tokenizer import write_model_folder
from tests.support.control_plane import delete, group_record, put, service_address, worker_record
from tests.support.fake_cluster import FakeWorker
from tests.support.gateway import TEXT, Case, gateway_case, text_ids
from tests.support.refusing_address import refusing_address
from tests.support.waiting import DEADLINE_S, eventually
from tideserve.worker.v1 import worker_pb2

HI: list[Any] = [{"role": "user", "content": "hi"}]
BUSY_S = 30.0
"""Deadline on a busy machine for responses specified to take 5 s."""


async def events_of(answer: httpx.Response) -> list[str]:
    """The data of a stream's events."""
    lines = [line async for line in answer.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def gauge(case: Case, name: str) -> float:
    """A metric; `name` includes its labels."""
    text = (await case.http.get("/metrics")).text
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name + " ")))


async def inflight_is(case: Case, number: int) -> bool:
    """Whether the gateway holds `number` requests."""
    return await gauge(case, "tideserve_gateway_requests_inflight") == number


async def refuses(case: Case) -> bool:
    """Whether the gateway reports that it is not ready."""
    return (await case.http.get("/ready")).status_code == 503


async def hang_up(
    case: Case, body: dict[str, Any], when: Callable[[], object], first: bytes = b""
) -> None:
    """Send a request on a new connection, and close it after `when` and `first`."""
    data = json.dumps({"model": "m", "prompt": "hi"} | body).encode()
    host, port = case.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    await eventually(when)
    if first:
        await reader.readuntil(first)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def test_a_disconnect_in_the_queue_withdraws_the_request(case: Case) -> None:
    scheduler = case.cluster.scheduler
    scheduler.holding = True
    for number, stream in enumerate((False, True), start=1):
        await hang_up(case, {"stream": stream}, lambda wanted=number: len(scheduler.asks) == wanted)
        await eventually(lambda wanted=number: len(scheduler.withdrawn) == wanted)
    assert scheduler.withdrawn == [ask.request_id for ask in scheduler.asks]
    assert case.cluster.workers[0].starts == []
    await eventually(lambda: inflight_is(case, 0))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_at", [0, 5])
async def test_a_disconnect_while_running_aborts_the_request(
    case: Case, stream: bool, pause_at: int
) -> None:
    worker = case.paused(pause_at)
    first = b"data: " if stream and pause_at else b""
    await hang_up(case, {"stream": stream}, lambda: worker.active, first)
    await eventually(lambda: worker.aborted)
    assert worker.aborted == [worker.starts[0].request_id]
    assert worker.active == set()
    await eventually(lambda: inflight_is(case, 0))
    metrics = (await case.http.get("/metrics")).text
    if not stream:
        assert 'requests_total{endpoint="/v1/completions",status="499"} 1.0' in metrics
    worker.go.set()
    assert (await case.complete(max_tokens=4)).status_code == 200


async def test_a_disconnect_in_the_middle_of_the_body(case: Case) -> None:
    host, port = case.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"
    writer.write(head + b"Content-Type: application/json\r\n\r\n{")
    await writer.drain()
    writer.close()
    assert (await case.complete(max_tokens=4)).status_code == 200


async def test_a_missing_scheduler_causes_503_within_5_s_until_it_returns(
    case: Case, store: Store, tmp_path: Path
) -> None:
    assert config_of(store, tmp_path).admit_timeout_s + SWEEP_S < 5
    await case.cluster.stop_scheduler()
    for stream in (False, True):
        began_s = monotonic_s()
        answer = await case.chat(stream=stream)
        assert answer.status_code == 503
        assert monotonic_s() - began_s < BUSY_S
        assert int(answer.headers["retry-after"]) >= 1
        assert "scheduler" in answer.json()["error"]["message"]
    assert (await case.http.get("/ready")).status_code == 503
    assert (await case.http.get("/live")).status_code == 200
    await case.cluster.start_scheduler()
    assert (await case.chat(max_tokens=4)).status_code == 200
    await eventually(case.ready)


async def test_a_frozen_scheduler_is_treated_as_missing(case: Case) -> None:
    case.cluster.scheduler.frozen = True
    began_s = monotonic_s()
    assert (await case.chat()).status_code == 503
    assert monotonic_s() - began_s < BUSY_S
    asks = case.cluster.scheduler.asks
    assert len({ask.request_id for ask in asks}) == 1
    assert len(asks) >= 2
    case.cluster.scheduler.frozen = False
    assert (await case.chat(max_tokens=4)).status_code == 200


@pytest.mark.gateway(admit_timeout_s=8)
async def test_a_queued_request_survives_a_restart_of_the_scheduler(case: Case) -> None:
    scheduler = case.cluster.scheduler
    scheduler.holding = True
    asked = asyncio.create_task(case.complete(max_tokens=4))
    await eventually(lambda: scheduler.asks)
    # Queued long enough to fail if tickets were not considered.
    await asyncio.sleep(8.5)
    await case.cluster.stop_scheduler()
    scheduler.holding = False
    await case.cluster.start_scheduler()
    assert (await asked).status_code == 200
    assert len({ask.request_id for ask in scheduler.asks}) == 1
    assert scheduler.asks[0].waited_s < 1
    assert scheduler.asks[-1].waited_s > 8


async def test_streams_do_not_need_the_scheduler(case: Case) -> None:
    worker = case.paused(10)
    stream = await case.openai.completions.create(
        model="m", prompt="hi", max_tokens=60, stream=True
    )
    text = (await anext(aiter(stream))).choices[0].text
    await case.cluster.stop_scheduler()
    worker.go.set()
    async for chunk in stream:
        text += chunk.choices[0].text
    assert TEXT.startswith(text.rstrip("\ufffd"))
    assert len(text_ids(text.rstrip("\ufffd"))) >= 57


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.gateway(workers=2)
async def test_a_worker_lost_before_a_token_is_replaced(case: Case, stream: bool) -> None:
    # The fake scheduler alternates, starting with the second worker.
    alive, dying = case.cluster.workers
    dying.pause_at = 0
    waiting = asyncio.create_task(case.complete(max_tokens=8, stream=stream))
    await eventually(lambda: dying.active)
    dying.hang_up()
    answer = await waiting
    assert answer.status_code == 200
    if stream:
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == TEXT[:8]
    else:
        assert answer.json()["choices"][0]["text"] == TEXT[:8]
    first, second = case.cluster.scheduler.asks
    assert (first.refused_group_id, first.refused_epoch) == ("", 0)
    assert (second.refused_group_id, second.refused_epoch) == ("group-w1", 1)
    assert first.request_id == second.request_id == alive.starts[0].request_id
    assert [len(worker.starts) for worker in (dying, alive)] == [1, 1]


async def test_unreachable_workers_are_tried_three_times(case: Case) -> None:
    with refusing_address() as case.cluster.workers[0].address:
        answer = await case.complete()
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "worker_lost"
    assert len(case.cluster.scheduler.asks) == 3
    await eventually(lambda: inflight_is(case, 0))


async def test_unreachable_workers_are_reported_to_the_scheduler(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "PAUSE_FIRST_S", 600.0)
    monkeypatch.setattr(worker_link, "PAUSE_MAX_S", 600.0)
    worker = case.cluster.workers[0]
    good = worker.address
    with refusing_address() as bad:
        worker.address = bad
        assert (await case.complete()).status_code == 503
        assert (await case.complete()).status_code == 503
    avoided = [list(ask.avoided_addresses) for ask in case.cluster.scheduler.asks]
    assert avoided == [[], *[[bad]] * 5]
    assert all(0 < ask.avoided_s <= 600 for ask in case.cluster.scheduler.asks[1:])
    # It answers at last: a later break does not mean that it is unreachable.
    worker.address, worker.pause_at = good, 2
    asking = asyncio.create_task(case.complete(max_tokens=4))
    await eventually(lambda: worker.active)
    worker.pause_at = None
    worker.hang_up()
    assert (await asking).status_code == 200
    last = case.cluster.scheduler.asks[-1]
    assert last.resumed and good not in last.avoided_addresses


@pytest.mark.gateway(resume_streams=False)
async def test_without_resumption_a_lost_worker_ends_its_requests_with_an_error(
    case: Case,
) -> None:
    worker = case.paused(5)
    body = {"model": "m", "messages": HI, "stream": True}
    async with case.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        events = asyncio.create_task(events_of(answer))
        await eventually(
            lambda: gauge(case, 'tideserve_gateway_output_tokens_total{model_name="m"}')
        )
        worker.hang_up()
        data = await events
    assert "[DONE]" not in data
    assert json.loads(data[-1])["error"]["code"] == "worker_lost"
    assert not any("error" in json.loads(line) for line in data[:-1])

    stream = await case.openai.chat.completions.create(model="m", messages=HI, stream=True)
    chunks = aiter(stream)
    await anext(chunks)
    worker.hang_up()
    with pytest.raises(openai.APIError, match="worker"):
        async for _ in chunks:
            pass
    assert len(case.cluster.scheduler.asks) == 2
    assert not any(start.resumable for start in worker.starts)
    worker.pause_at = None
    assert (await case.chat(max_tokens=4)).status_code == 200


@pytest.mark.parametrize("move_at", [0, 1, 7])
@pytest.mark.gateway(workers=3)
async def test_a_client_does_not_notice_that_its_request_moves(case: Case, move_at: int) -> None:
    # The fake scheduler alternates, starting with the second worker.
    last, first, second = case.cluster.workers
    first.moves_to, first.move_at = second, move_at
    second.moves_to, second.move_at = last, 7
    async with case.stream(max_tokens=20) as answer:
        data = await events_of(answer)
    assert data.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in data]
    assert "".join(choice["text"] for choice in choices) == TEXT[:20]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert [a.from_index for w in (second, last) for a in w.attaches] == [move_at, 7]
    assert [len(worker.starts) for worker in (first, second, last)] == [1, 0, 0]
    assert len(case.cluster.scheduler.asks) == 1
    assert await gauge(case, "tideserve_gateway_moved_streams_total") == 2
    assert await gauge(case, "tideserve_gateway_requests_running") == 0


@pytest.mark.gateway(workers=2)
async def test_a_disconnect_after_a_move_aborts_at_the_new_worker(case: Case) -> None:
    new, old = case.cluster.workers
    old.moves_to, old.move_at = new, 3
    new.pause_at = 5
    await hang_up(case, {"stream": True}, lambda: new.active, b"data: ")
    await eventually(lambda: new.aborted)
    assert new.aborted == [old.starts[0].request_id]
    assert old.aborted == []
    await eventually(lambda: inflight_is(case, 0))


async def test_an_idle_link_to_a_vanished_worker_is_closed(case: Case) -> None:
    worker = case.cluster.workers[0]
    assert (await case.complete(max_tokens=4)).status_code == 200
    assert len(worker.calls) == 1
    await delete(case.cluster.store, f"{WORKERS}w0")
    await eventually(lambda: not worker.calls)


@pytest.mark.gateway(workers=2)
async def test_a_silent_deregistered_worker_loses_its_requests(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "GONE_SILENT_S", 0.3)
    other, frozen = case.cluster.workers
    frozen.pause_at = 2
    answering = asyncio.create_task(case.complete(max_tokens=6))
    await eventually(lambda: frozen.emitted == 2)
    await delete(case.cluster.store, f"{WORKERS}w1")
    answer = (await answering).json()
    assert answer["choices"][0]["text"] == TEXT[:6]
    assert [len(worker.starts) for worker in (frozen, other)] == [1, 1]
    assert list(other.starts[0].output_ids) == text_ids(TEXT)[:2]


@pytest.mark.gateway(workers=2, attach_timeout_s=300)
async def test_a_move_to_a_worker_that_disappears_is_abandoned(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = asyncio.Event()
    take = FakeWorker._take

    def silent(worker: FakeWorker, frame: worker_pb2.GenerateRequest, *others: Any) -> None:
        if frame.HasField("attach"):
            attached.set()
        else:
            take(worker, frame, *others)

    monkeypatch.setattr(worker_client, "GONE_SILENT_S", 0.3)
    monkeypatch.setattr(FakeWorker, "_take", silent)
    new, old = case.cluster.workers
    old.moves_to, old.move_at = new, 3
    answering = asyncio.create_task(case.complete(max_tokens=6))
    await eventually(attached.is_set)
    await delete(case.cluster.store, f"{WORKERS}w0")
    assert (await answering).json()["choices"][0]["text"] == TEXT[:6]
    assert list(new.starts[0].output_ids) == text_ids(TEXT)[:3]


async def test_a_deregistered_worker_keeps_requests_while_it_responds(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = asyncio.Event()
    watch = WorkerClient._watch_vanished

    async def noted(client: WorkerClient, link: WorkerLink) -> None:
        watched.set()
        await watch(client, link)

    monkeypatch.setattr(worker_client, "GONE_SILENT_S", BUSY_S)
    monkeypatch.setattr(WorkerClient, "_watch_vanished", noted)
    worker = case.paused(2)
    answering = asyncio.create_task(case.complete(max_tokens=6))
    await eventually(lambda: worker.emitted == 2)
    await delete(case.cluster.store, f"{WORKERS}w0")
    await eventually(watched.is_set)
    worker.go.set()
    assert (await answering).json()["choices"][0]["text"] == TEXT[:6]
    assert len(worker.starts) == 1
    await eventually(lambda: not worker.calls)


async def test_a_stale_assignment_is_retried_under_the_same_id(case: Case) -> None:
    case.cluster.workers[0].stale_times = 2
    assert (await case.complete(max_tokens=4)).json()["choices"][0]["text"] == TEXT[:4]
    asks = case.cluster.scheduler.asks
    assert [ask.refused_epoch for ask in asks] == [0, 1, 1]
    assert len({ask.request_id for ask in asks}) == 1


async def test_returned_requests_are_reassigned_under_the_same_id(case: Case) -> None:
    case.cluster.workers[0].return_times = 2
    assert (await case.complete(max_tokens=4)).json()["choices"][0]["text"] == TEXT[:4]
    asks = case.cluster.scheduler.asks
    assert [(ask.refused_epoch, ask.returned) for ask in asks] == [(0, False), (1, True), (1, True)]
    assert len({ask.request_id for ask in asks}) == 1
    assert [start.returnable for start in case.cluster.workers[0].starts] == [True, True, False]


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (worker_pb2.FINISH_REASON_ERROR, 503),
        (worker_pb2.FINISH_REASON_OVERLOADED, 503),
        (worker_pb2.FINISH_REASON_INVALID, 400),
    ],
)
async def test_failures_that_the_worker_reports(case: Case, reason: Any, status: int) -> None:
    worker = case.cluster.workers[0]
    worker.finish = reason
    worker.script = lambda _: text_ids("abc")
    answer = await case.complete()
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    async with case.stream() as answer:
        data = await events_of(answer)
    assert "error" in json.loads(data[-1])
    assert "".join(json.loads(line)["choices"][0]["text"] for line in data[:-1]) == "abc"


@pytest.mark.gateway(expected_workers=None)
async def test_without_an_expected_count_readiness_needs_a_serving_group(
    case: Case, store: Store
) -> None:
    answer = await case.http.get("/ready")
    assert (answer.status_code, answer.json()["workers_expected"]) == (200, None)
    # Workers may come and go as long as a group serves.
    await put(store, f"{WORKERS}w9", worker_record("w9"))
    assert (await case.http.get("/ready")).status_code == 200
    case.cluster.scheduler.workers = []

    async def unready() -> Any:
        answer = await case.http.get("/ready")
        return answer.json()["missing"] if answer.status_code == 503 else None

    assert await eventually(unready) == ["the scheduler sees 0 of 1 groups serving"]


@pytest.mark.gateway(expected_workers=None)
async def test_groups_of_another_model_do_not_make_a_gateway_ready(
    case: Case, store: Store
) -> None:
    worker = worker_record("w0", address=case.cluster.workers[0].address, model="another")
    await put(store, f"{GROUPS}group-w0", group_record(worker, epoch=2))

    async def unready() -> Any:
        answer = await case.http.get("/ready")
        return answer.json() if answer.status_code == 503 else None

    state = await eventually(unready)
    assert state["missing"] == ["no group of the model is stable"]
    assert state["groups_serving"] == 0
    assert (await case.http.get("/health")).status_code == 503
    assert (await case.http.get("/ping")).status_code == 503
    metrics = (await case.http.get("/metrics")).text
    assert 'tideserve_gateway_groups_serving{model_name="m"} 0.0' in metrics


async def test_a_worker_that_sends_too_much_is_aborted(case: Case) -> None:
    worker = case.cluster.workers[0]
    worker.generate_more = 3
    answer = await case.complete(max_tokens=4)
    assert answer.status_code == 500
    assert "inconsistent" in answer.json()["error"]["message"]
    await eventually(lambda: worker.aborted)


@pytest.mark.gateway(drain_timeout_s=30)
async def test_draining_refuses_new_requests_and_finishes_old_ones(case: Case) -> None:
    worker = case.paused(5)
    stream = await case.openai.completions.create(
        model="m", prompt="hi", max_tokens=20, stream=True
    )
    chunks = aiter(stream)
    await anext(chunks)
    case.stop.set()
    await eventually(lambda: refuses(case))
    answer = await case.complete()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "shutting_down"
    assert answer.headers["retry-after"]
    assert (await case.http.get("/live")).status_code == 200
    worker.go.set()
    reasons = [chunk.choices[0].finish_reason async for chunk in chunks]
    assert reasons[-1] == "length"


async def test_requests_are_accepted_between_unreadiness_and_drain(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    over = asyncio.Event()

    async def leave(drain: Drain, delay_s: float) -> None:
        """As the real function, except that the test decides when the delay ends."""
        asked.append(delay_s)
        await real_leave(drain, 0.0)
        await over.wait()

    real_leave = Drain.leave
    monkeypatch.setattr(Drain, "leave", leave)
    async with gateway_case(store, tmp_path / "model", drain_delay_s=3600) as case:
        assert "connection" not in (await case.complete()).headers
        case.stop.set()

        async def unready() -> Any:
            answer = await case.http.get("/ready")
            return answer if answer.status_code == 503 else None

        assert (await eventually(unready)).json()["missing"] == ["this gateway is shutting down"]
        assert asked == [3600]
        assert (await case.http.get("/health")).status_code == 503
        assert (await case.http.get("/live")).status_code == 200
        async with open_channel(await service_address(store, "gateway")) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            health_list = await health.List(health_pb2.HealthListRequest(), timeout=DEADLINE_S)
        assert {name: status.status for name, status in health_list.statuses.items()} == {
            "": health_pb2.HealthCheckResponse.SERVING,
            "tideserve.gateway.v1.GatewayService": health_pb2.HealthCheckResponse.NOT_SERVING,
            "tideserve.gateway.v1.GatewayPeerService": health_pb2.HealthCheckResponse.NOT_SERVING,
        }
        answer = await case.complete()
        assert answer.status_code == 200
        # A client must reconnect, and so reaches another gateway.
        assert answer.headers["connection"] == "close"
        over.set()


@pytest.mark.gateway(drain_timeout_s=0.5)
async def test_streams_end_with_an_error_at_the_drain_deadline(case: Case) -> None:
    worker = case.paused(5)
    waiting = asyncio.create_task(case.complete())
    async with case.stream() as answer:
        await eventually(lambda: len(worker.active) == 2)
        case.stop.set()
        data = await events_of(answer)
    assert json.loads(data[-1])["error"]["code"] == "shutting_down"
    assert (await waiting).status_code == 503
    await eventually(lambda: not worker.active)


@pytest.mark.gateway(client_stall_s=0.5, max_model_len=400_000)
async def test_a_client_that_does_not_read_is_disconnected(case: Case) -> None:
    worker = case.cluster.workers[0]
    worker.script = lambda _: text_ids(TEXT) * 6000
    worker.tokens_per_event = 8
    worker.step_s = 0
    host, port = case.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        body = {"model": "m", "prompt": "hi", "stream": True, "max_tokens": 390_000}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        await eventually(lambda: worker.starts)
        assert (await case.complete(max_tokens=4)).status_code == 200
        await eventually(lambda: worker.aborted)
        await eventually(lambda: inflight_is(case, 0))


@pytest.mark.gateway(inflight_max=1)
async def test_requests_beyond_the_limit_are_refused(case: Case) -> None:
    worker = case.paused(0)
    first = asyncio.create_task(case.complete(max_tokens=4))
    await eventually(lambda: worker.active)
    answer = await case.complete()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "queue_full"
    worker.go.set()
    assert (await first).status_code == 200


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@contextlib.asynccontextmanager
async def unfinished_body(
    case: Case, size_bytes: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection and send all of a body except its last byte."""
    host, port = case.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(HEAD + f"Content-Length: {size_bytes + 1}\r\n\r\n".encode())
        writer.write(b'{"model": "m", "prompt": "hi", "max_tokens": 4'.ljust(size_bytes))
        await writer.drain()
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def body_bytes_are(case: Case, number: int) -> bool:
    return await gauge(case, "tideserve_gateway_body_bytes") == number


async def test_the_total_of_bodies_is_bounded(store: Store, tmp_path: Path) -> None:
    size = 3 * 2**20
    held = size - SMALL_BYTES
    async with gateway_case(store, tmp_path / "model", body_bytes_max=8 * 2**20) as case:
        async with unfinished_body(case, size) as (reader, writer):
            async with unfinished_body(case, size):
                await eventually(lambda: body_bytes_are(case, 2 * held))
                async with unfinished_body(case, size) as (refused, _):
                    head = await refused.readuntil(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 503 ")
                    header = re.search(rb"retry-after: (\d+)\r\n", head)
                    assert header is not None and 1 <= int(header[1]) <= 60
                    assert b"queue_full" in await refused.readuntil(b"}}")
                # The memory of the refused request is free again.
                await eventually(lambda: body_bytes_are(case, 2 * held))
            await eventually(lambda: body_bytes_are(case, held))
            async with unfinished_body(case, size):
                await eventually(lambda: body_bytes_are(case, 2 * held))
            writer.write(b"}")
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        await eventually(lambda: body_bytes_are(case, 0))
        await eventually(lambda: inflight_is(case, 0))


@pytest.mark.gateway(body_bytes_max=4 * 2**20)
async def test_a_large_body_does_not_block_small_ones(case: Case) -> None:
    size = 4 * 2**20 - 1
    async with unfinished_body(case, size):
        await eventually(lambda: body_bytes_are(case, size - SMALL_BYTES))
        assert (await case.complete(prompt="x" * 3 * SMALL_BYTES)).status_code == 503
        assert (await case.complete(max_tokens=4)).status_code == 200


@pytest.mark.gateway(inflight_max=1)
async def test_a_request_counts_before_its_body_arrives(case: Case) -> None:
    async with unfinished_body(case, 100):
        await eventually(lambda: inflight_is(case, 1))
        answer = await case.complete()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "queue_full"
    await eventually(lambda: inflight_is(case, 0))
    assert (await case.complete(max_tokens=4)).status_code == 200


async def test_running_requests_release_their_bodies(case: Case) -> None:
    worker = case.paused(0)
    running = asyncio.create_task(case.complete(max_tokens=4))
    await eventually(lambda: worker.active)
    assert await body_bytes_are(case, 0)
    worker.go.set()
    assert (await running).status_code == 200


@pytest.mark.gateway(request_timeout_s=5)
async def test_the_deadline_of_a_request(case: Case) -> None:
    case.cluster.workers[0].pause_at = 0
    assert (await case.complete()).status_code == 504
    await eventually(lambda: case.cluster.workers[0].aborted)


async def test_status_without_a_memory_manager(case: Case) -> None:
    await case.cluster.stop_memmgr()
    status = (await case.admin.get("/tideserve/v1/status")).json()
    assert (status["workers"], status["groups"]) == ([], [])
    assert len(status["errors"]) == 1
    assert (await case.http.get("/metrics")).status_code == 200


@pytest.mark.gateway(workers=2)
async def test_sixty_four_streams_on_two_workers(case: Case) -> None:
    for worker in case.cluster.workers:
        worker.pause_at = 20

    async def run_stream(number: int) -> str:
        stream = await case.openai.completions.create(
            model="m", prompt="x" * (number + 1), max_tokens=100, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    streams = [asyncio.create_task(run_stream(number)) for number in range(64)]
    await eventually(lambda: sum(len(w.active) for w in case.cluster.workers) == 64)
    for worker in case.cluster.workers:
        worker.go.set()
    texts = {await stream for stream in streams}
    assert len(texts) == 1
    assert min(len(worker.starts) for worker in case.cluster.workers) >= 20


def config_of(store: Store, model_dir: Path, **fields: Any) -> GatewayConfig:
    """A configuration for a start that fails."""
    known: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "etcd_url": store.url,
        "model_name": "m",
        "model_dir": model_dir,
        "expected_workers": 1,
    }
    return GatewayConfig(**(known | fields))


async def test_a_port_in_use_is_reported_in_one_sentence(store: Store, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = config_of(store, write_model_folder(tmp_path), port=port)
        with pytest.raises(ConfigError, match=f"port {port} .* is in use; .* another port"):
            await serve(config, asyncio.Event())


async def test_an_unusable_model_folder_is_reported(store: Store, tmp_path: Path) -> None:
    cases = [(tmp_path / "nowhere", "does not exist"), (tmp_path, "has no config.json")]
    broken = write_model_folder(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    cases.append((broken, "tokenizer.json"))
    endings = write_model_folder(tmp_path / "endings")
    (endings / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(65)]}))
    cases.append((endings, "names 65 end-of-sequence tokens, but at most 64 are supported"))
    missing = write_model_folder(tmp_path / "missing")
    (missing / "tokenizer.json").unlink()
    cases.append((missing, "needs a tokenizer.json"))
    for folder, message in cases:
        with pytest.raises(ConfigError, match=message):
            await serve(config_of(store, folder), asyncio.Event())
