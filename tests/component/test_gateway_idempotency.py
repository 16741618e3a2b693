"""Requests repeated with an Idempotency-Key share a response that is generated once."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.etcd import Store
from services.gateway.keys.key_file import KeyEntry, hash_of
from tests.support.exposition import samples, value
from tests.support.gateway import TEXT, Case, gateway_case
from tests.support.log_lines import log_lines
from tests.support.waiting import eventually
from tideserve.worker.v1 import worker_pb2

OPERATORS_KEY = "operators-key"
OPERATOR = {"authorization": f"Bearer {OPERATORS_KEY}"}
MINE, OTHERS = "k" * 24, "o" * 24
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
COMPLETION = {"model": "m", "prompt": "hi", "max_tokens": 9}
RESPONSE = {"model": "m", "input": "hi", "max_output_tokens": 9}
DIALECTS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", COMPLETION),
    ("/v1/messages", CHAT),
    ("/v1/responses", RESPONSE),
]
STREAM = COMPLETION | {"stream": True}


async def post(
    case: Case, body: dict[str, Any], key: str = "a", path: str = "/v1/completions", **headers: str
) -> httpx.Response:
    sent = {"idempotency-key": key} | headers
    return await case.http.post(path, json=body, headers=sent)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    return error


def text_of(answer: httpx.Response) -> str:
    """The text of a complete stream."""
    *events, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert last == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def metric(case: Case, name: str) -> float:
    metric_value = value(samples((await case.http.get("/metrics", headers=OPERATOR)).text), name)
    assert metric_value is not None
    return metric_value


async def gone_after(case: Case, body: dict[str, Any], key: str, at: int) -> None:
    """Send a request and disconnect when the worker is about to emit token `at`."""
    worker = case.paused(at)
    asking = asyncio.create_task(post(case, body, key))
    await eventually(lambda: worker.active and worker.emitted >= at)
    asking.cancel()
    await asyncio.wait({asking})


async def idle(case: Case) -> bool:
    """Whether the gateway holds no request, and none waits at a worker."""
    held = await metric(case, "tideserve_gateway_requests_inflight")
    return not held and not case.cluster.workers[0].active


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), DIALECTS)
async def test_a_repeated_request_gets_the_same_bytes(
    case: Case, path: str, body: dict[str, Any], stream: bool
) -> None:
    first = await post(case, body | {"stream": stream}, path=path)
    again = await post(case, body | {"stream": stream}, path=path, **{"x-request-id": "second"})
    assert first.status_code == again.status_code == 200
    assert first.content == again.content and first.content
    assert first.headers["content-type"] == again.headers["content-type"]
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["x-request-id"] == "second" != first.headers["x-request-id"]
    assert len(case.cluster.workers[0].starts) == 1
    assert await metric(case, "tideserve_gateway_replayed_requests_total") == 1

    other = await post(case, body | {"stream": not stream}, path=path)
    error = error_of(other)
    assert other.status_code == 409 and "Idempotency-Key" in error["message"]
    assert error["type"] == "invalid_request_error"
    if path == "/v1/messages":
        assert other.json()["type"] == "error"
    else:
        assert error["code"] == "idempotency_key_reused"


async def test_a_key_is_specific_to_its_route_and_quoting(case: Case) -> None:
    chat = await post(case, CHAT, path="/v1/chat/completions")
    messages = await post(case, CHAT, path="/v1/messages")
    assert chat.status_code == messages.status_code == 200
    assert chat.json()["id"] != messages.json()["id"]
    quoted = await post(case, CHAT, '"a"', path="/v1/messages")
    assert quoted.content == messages.content


@pytest.mark.parametrize("key", ["", "x" * 256, "two words", '"', '""', '"open', "é"])
async def test_invalid_keys_are_refused(case: Case, key: str) -> None:
    sent = [(b"idempotency-key", key.encode())]
    answer = await case.http.post("/v1/completions", json=COMPLETION, headers=sent)
    assert answer.status_code == 400 and error_of(answer)["code"] == "invalid_idempotency_key"
    assert not case.cluster.workers[0].starts


async def test_two_keys_are_refused(case: Case) -> None:
    sent = [("idempotency-key", "a"), ("idempotency-key", "a")]
    answer = await case.http.post("/v1/completions", json=COMPLETION, headers=sent)
    assert answer.status_code == 400


async def test_ignored_fields_are_listed_again(case: Case) -> None:
    first, again = [await post(case, COMPLETION | {"unheard_of": 1}) for _ in range(2)]
    assert first.headers["warning"] == again.headers["warning"]


async def test_repeated_requests_join_a_running_one(case: Case) -> None:
    worker = case.paused(4)
    url, key = "/v1/completions", {"idempotency-key": "a"}
    async with (
        case.http.stream("POST", url, json=STREAM, headers=key) as first,
        case.http.stream("POST", url, json=STREAM, headers=key) as second,
    ):
        # Both have the output so far, and the worker has one request.
        lines = [aiter(response.aiter_lines()) for response in (first, second)]
        assert await anext(lines[0]) == await anext(lines[1])
        assert len(worker.starts) == 1
        worker.go.set()
        rests = [[line async for line in part] for part in lines]
    assert rests[0] == rests[1] and rests[0][-2] == "data: [DONE]"


@pytest.mark.parametrize("body", [COMPLETION, STREAM])
@pytest.mark.parametrize("at", [0, 4])
async def test_a_retry_takes_over_from_a_disconnected_client(
    case: Case, body: dict[str, Any], at: int
) -> None:
    worker = case.cluster.workers[0]
    with log_lines() as log:
        await gone_after(case, body, "a", at)
        retry = asyncio.create_task(post(case, body))
        await eventually(lambda: _replayed(case))
        worker.go.set()
        answer = await retry
        await eventually(lambda: len(log.requests("/v1/completions")) == 2)
    text = text_of(answer) if body is STREAM else answer.json()["choices"][0]["text"]
    assert text == TEXT[:9]
    assert len(worker.starts) == 1 and not worker.aborted
    rows = {row.get("replayed", False): row for row in log.requests("/v1/completions")}
    assert rows[False]["code"] == "client_gone" and rows[False]["output_tokens"] == 9
    assert rows[True]["status"] == 200
    assert rows[True]["response_id"] == rows[False]["request_id"]


async def _replayed(case: Case) -> bool:
    return await metric(case, "tideserve_gateway_replayed_requests_total") == 1


@pytest.mark.gateway(idempotency_grace_s=0.3)
async def test_an_abandoned_request_ends_after_the_grace_period(case: Case) -> None:
    worker = case.cluster.workers[0]
    body = COMPLETION | {"seed": 7}
    await gone_after(case, body, "a", 4)
    await eventually(lambda: worker.aborted)
    await eventually(lambda: idle(case))
    assert await metric(case, "tideserve_gateway_answer_bytes") == 0
    # It runs again, as at another gateway: same seed, different id.
    worker.pause_at = None
    answer = await post(case, body)
    assert answer.json()["choices"][0]["text"] == TEXT[:9]
    first, second = worker.starts
    assert first.sampling == second.sampling and first.request_id != second.request_id
    assert "idempotent-replayed" not in answer.headers


async def test_without_a_key_an_abandoned_request_ends_at_once(case: Case) -> None:
    worker = case.paused(4)
    asking = asyncio.create_task(case.complete(max_tokens=9))
    await eventually(lambda: worker.active)
    asking.cancel()
    await eventually(lambda: worker.aborted)
    assert await metric(case, "tideserve_gateway_answer_bytes") == 0


async def test_a_failure_is_reported_to_all_and_not_stored(case: Case) -> None:
    scheduler = case.cluster.scheduler
    case.refuse(message="full")
    refused = await post(case, COMPLETION)
    assert refused.status_code == 503
    scheduler.refusal = None
    assert (await post(case, COMPLETION)).status_code == 200
    assert len(case.cluster.workers[0].starts) == 1


async def test_a_failed_stream_runs_again(case: Case) -> None:
    worker = case.cluster.workers[0]
    worker.script, worker.finish = lambda _: [65, 66], worker_pb2.FINISH_REASON_ERROR
    broken = await post(case, STREAM)
    assert "error" in broken.text and "[DONE]" not in broken.text
    worker.script, worker.finish = lambda _: [65, 66], worker_pb2.FINISH_REASON_LENGTH
    again = await post(case, STREAM | {})
    assert len(text_of(again)) == 2 and "idempotent-replayed" not in again.headers


async def test_a_cancelled_request_ends_for_all_its_clients(case: Case) -> None:
    worker = case.paused(2)
    asking = [asyncio.create_task(post(case, COMPLETION)) for _ in range(2)]
    await eventually(lambda: _replayed(case))
    await case.http.post(f"/v1/requests/{worker.starts[0].request_id}/cancel")
    answers = await asyncio.gather(*asking)
    assert [answer.status_code for answer in answers] == [499, 499]
    assert [error_of(answer)["code"] for answer in answers] == ["cancelled"] * 2
    await eventually(lambda: idle(case))
    assert await metric(case, "tideserve_gateway_answer_bytes") == 0


@pytest.mark.gateway(idempotency_bytes_max=2**16)
async def test_a_response_that_does_not_fit_is_served_and_not_stored(case: Case) -> None:
    body = STREAM | {"max_tokens": 200}
    first, second = [await post(case, body) for _ in range(2)]
    assert text_of(first) == text_of(second)
    assert len(case.cluster.workers[0].starts) == 2
    await eventually(lambda: idle(case))
    assert await metric(case, "tideserve_gateway_answer_bytes") == 0


async def test_keys_are_separate_by_owner_and_repetitions_cost_no_quota(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    rows = [
        KeyEntry(owner="mine", sha256=hash_of(MINE), concurrent=1),
        KeyEntry(owner="others", sha256=hash_of(OTHERS)),
    ]
    path.write_text("".join(f"{row.line()}\n" for row in rows))
    path.chmod(0o600)
    async with gateway_case(
        store, tmp_path / "model", api_key=OPERATORS_KEY, api_keys_file=path
    ) as case:
        worker = case.paused(4)

        async def ask(key: str, owner: str) -> httpx.Response:
            return await post(case, COMPLETION, key, authorization=f"Bearer {owner}")

        first = asyncio.create_task(ask("a", MINE))
        await eventually(lambda: worker.active)
        assert (await ask("b", MINE)).status_code == 429, "one of this owner runs"
        again = asyncio.create_task(ask("a", MINE))
        await eventually(lambda: _replayed(case))
        worker.go.set()
        mine = await first
        assert (await again).content == mine.content
        others = await ask("a", OTHERS)
        assert others.json()["id"] != mine.json()["id"] and len(worker.starts) == 2


@pytest.mark.gateway(idempotency_grace_s=0.1, idempotency_keep_s=0)
async def test_vanishing_clients_leave_no_state(case: Case) -> None:
    """Many clients share few keys and disconnect at any moment, some before a response."""
    await case.complete(max_tokens=2)  # opened once per process
    await eventually(lambda: idle(case))
    before = len(asyncio.all_tasks())
    chosen = random.Random(7)

    async def vanish(number: int) -> None:
        body = COMPLETION | {"stream": number % 2 == 0, "max_tokens": 100}
        async with httpx.AsyncClient(base_url=case.url, timeout=60) as client:
            asking = asyncio.create_task(
                client.post(
                    "/v1/completions",
                    json=body,
                    headers={"idempotency-key": str(number % 10)},
                )
            )
            await asyncio.wait({asking}, timeout=chosen.random() * 0.3)
            asking.cancel()
            await asyncio.wait({asking})

    await asyncio.gather(*(vanish(number) for number in range(60)))
    await eventually(lambda: idle(case))
    await eventually(lambda: len(asyncio.all_tasks()) <= before)
    # A new key purges finished entries.
    assert (await post(case, COMPLETION, "new")).status_code == 200
    assert (await post(case, COMPLETION, "newer")).status_code == 200
    await eventually(lambda: idle(case))
    assert await metric(case, "tideserve_gateway_answer_bytes") < 4096
