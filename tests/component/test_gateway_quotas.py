"""Quotas at real gateways, alone and together, in front of fake services."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.common.etcd import Store
from services.common.membership import QUOTAS
from services.core.quota.limits import QuotaLimits
from services.core.quota.shared_rate import BURST
from services.gateway.keys import key_ring
from tests.support.etcd_server import EtcdServer
from tests.support.exposition import samples, value
from tests.support.gateway import Case, gateway_before, gateway_case
from tests.support.waiting import eventually
from tideserve.cli.keys import add_key
from tideserve.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from tideserve.kserve.v2 import inference_pb2, inference_pb2_grpc

# The key in the settings, which has no owner.
OPERATORS = "operators-key"
REQUEST = {"model": "m", "prompt": "hi", "max_tokens": 1}


class Door:
    """A gateway with the key of an owner."""

    def __init__(self, case: Case, key: str) -> None:
        self.case = case
        self.headers = {"authorization": f"Bearer {key}"}

    async def complete(self, **fields: Any) -> httpx.Response:
        """Send a completion."""
        body = REQUEST | fields
        return await self.case.http.post("/v1/completions", json=body, headers=self.headers)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.jsonl"
    path.touch(0o600)
    return path


@pytest.fixture
async def case(store: Store, tmp_path: Path, keys: Path) -> AsyncIterator[Case]:
    async with gateway_case(
        store, tmp_path / "model", api_key=OPERATORS, api_keys_file=keys
    ) as case:
        yield case


@pytest.fixture(autouse=True)
def quick_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ring, "POLL_S", 0.05)


async def door(case: Case, keys: Path, owner: str, **limits: int) -> Door:
    """A gateway that has accepted a new key."""
    made = Door(case, add_key(keys, owner, False, None, QuotaLimits(**limits)))

    async def opens() -> bool:
        return (await case.http.get("/v1/models", headers=made.headers)).is_success

    await eventually(opens)
    return made


async def metric(case: Case, name: str, **labels: str) -> float | None:
    """A metric of the gateway."""
    answer = await case.http.get("/metrics", headers={"authorization": f"Bearer {OPERATORS}"})
    return value(samples(answer.text), name, **labels)


async def test_requests_beyond_the_limit_get_retry_after(case: Case, keys: Path) -> None:
    alice = await door(case, keys, "alice", requests_per_minute=2)
    bob = await door(case, keys, "bob")
    answers = [await alice.complete() for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == [
        "1",
        "0",
        "0",
    ]
    refused = answers[2]
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert 20 <= int(refused.headers["retry-after"]) <= 38
    error = refused.json()["error"]
    assert f"; retry in {refused.headers['retry-after']} s" in error["message"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")
    assert "alice has reached its limit of 2 requests per minute" in error["message"]
    # Refused before the body is read; listing models costs nothing.
    broken = await case.http.post("/v1/completions", content=b"{", headers=alice.headers)
    assert broken.status_code == 429
    models = await case.http.get("/v1/models", headers=alice.headers)
    assert models.is_success and models.headers["x-ratelimit-remaining-requests"] == "0"
    unlimited = await bob.complete()
    assert unlimited.is_success and "x-ratelimit-limit-requests" not in unlimited.headers
    name = "tideserve_gateway_quota_refusals_total"
    assert await metric(case, name, owner="alice", limit="requests") == 2


async def test_http_and_grpc_share_a_quota(case: Case, keys: Path) -> None:
    alice = await door(case, keys, "alice", requests_per_minute=2)
    assert (await alice.complete()).is_success
    async with grpc.aio.insecure_channel(case.target) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.CompleteRequest(
            model="m",
            prompts=[gateway_pb2.Prompt(text="hi")],
            sampling=gateway_pb2.Sampling(max_tokens=1),
        )
        metadata = tuple(alice.headers.items())
        call = stub.Complete(request, metadata=metadata, timeout=30)
        await call
        initial = dict(await call.initial_metadata())
        assert initial["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Complete(request, metadata=metadata, timeout=30)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(caught.value)
    assert status is not None
    details = {detail.type_url.rpartition(".")[2]: detail for detail in status.details}
    quota, retry = error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
    assert details["QuotaFailure"].Unpack(quota) and details["RetryInfo"].Unpack(retry)
    assert quota.violations[0].subject == "owner:alice"
    assert 20 <= retry.retry_delay.ToSeconds() <= 38
    assert (await alice.complete()).status_code == 429


async def test_tokens_beyond_the_limit_are_refused_before_a_worker_gets_them(
    case: Case, keys: Path
) -> None:
    alice = await door(case, keys, "alice", tokens_per_minute=100)
    first = await alice.complete(prompt="x" * 50, max_tokens=50)
    assert first.is_success and first.headers["x-ratelimit-limit-tokens"] == "100"
    assert first.json()["usage"]["total_tokens"] >= 100
    starts = len(case.cluster.workers[0].starts)
    refused = await alice.complete()
    assert refused.status_code == 429 and refused.json()["error"]["type"] == "tokens"
    assert len(case.cluster.workers[0].starts) == starts
    carol = await door(case, keys, "carol", tokens_per_minute=30)
    never = await carol.complete(prompt="x" * 50)
    assert never.status_code == 429 and "retry-after" not in never.headers


async def test_concurrency_is_released_at_the_end_or_a_disconnect(case: Case, keys: Path) -> None:
    alice = await door(case, keys, "alice", concurrent=1)
    worker = case.paused(1)
    running = asyncio.create_task(alice.complete(max_tokens=5))
    await eventually(lambda: bool(worker.active))
    refused = await alice.complete()
    assert refused.status_code == 429 and refused.json()["error"]["type"] == "concurrent"
    worker.go.set()
    assert (await running).is_success
    worker.go.clear()
    gone = asyncio.create_task(alice.complete(max_tokens=5))
    await eventually(lambda: bool(worker.active))
    gone.cancel()
    worker.pause_at = None

    async def served() -> bool:
        return (await alice.complete()).is_success

    await eventually(served)


async def test_unservable_requests_cost_nothing(case: Case, keys: Path) -> None:
    alice = await door(case, keys, "alice", requests_per_minute=2, tokens_per_minute=10_000)
    case.refuse(message="full", retry_after_s=2)
    before = (await case.http.get("/v1/models", headers=alice.headers)).headers
    failed = await alice.complete()
    assert failed.status_code == 503
    after = (await case.http.get("/v1/models", headers=alice.headers)).headers
    for limit in ("requests", "tokens"):
        name = f"x-ratelimit-remaining-{limit}"
        assert int(after[name]) >= int(before[name])


# --- two gateways


@asynccontextmanager
async def pair(
    store: Store, model_dir: Path, keys: Path, **limits: int
) -> AsyncIterator[tuple[Door, Door]]:
    """Two gateways of a cluster that have exchanged their quota reports."""
    key = add_key(keys, "alice", False, None, QuotaLimits(**limits))
    settings: dict[str, Any] = {"api_key": OPERATORS, "api_keys_file": keys}
    async with (
        gateway_case(store, model_dir, **settings) as first,
        gateway_before(first.cluster, model_dir, **settings) as second,
    ):

        async def exchanged() -> bool:
            return len(await store.list_prefix(QUOTAS)) == 2

        await eventually(exchanged)
        # Each reads reports once a second.
        await asyncio.sleep(1.5)
        yield Door(first, key), Door(second, key)


class Load:
    """Requests at a steady rate regardless of outcomes; `served_s`: times of served ones."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self.served_s: list[float] = []
        self.statuses: set[int] = set()

    async def run(self, length_s: float, choose: Callable[[int], Door]) -> None:
        """Send for `length_s`; `choose` selects the gateway of the n-th request."""
        begin_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(length_s * self._per_s)):
                await asyncio.sleep(max(0.0, begin_s + number / self._per_s - time.monotonic()))
                tasks.create_task(self._send(choose(number)))

    async def _send(self, door: Door) -> None:
        answer = await door.complete()
        self.statuses.add(answer.status_code)
        if answer.is_success:
            self.served_s.append(time.monotonic())


async def test_two_gateways_together_keep_the_quota(
    store: Store, tmp_path: Path, keys: Path
) -> None:
    async with pair(store, tmp_path / "model", keys, requests_per_minute=600) as doors:
        load, begin_s = Load(40), time.monotonic()
        await load.run(12, lambda number: doors[number % 2])
        length_s = time.monotonic() - begin_s
    assert load.statuses == {200, 429}
    most = 600 * (BURST + 1.05 * length_s / 60) + 10
    assert len(load.served_s) <= most < 2 * 600 * length_s / 60


async def test_a_gateway_keeps_its_share_while_etcd_is_unreachable(
    etcd: EtcdServer, store: Store, tmp_path: Path, keys: Path
) -> None:
    async with pair(store, tmp_path / "model", keys, requests_per_minute=600) as doors:
        await Load(40).run(4, lambda number: doors[number % 2])
        etcd.kill()
        case, sharing = doors[0].case, "tideserve_gateway_quota_sharing"

        async def sharing_is(wanted: float) -> bool:
            return await metric(case, sharing) == wanted

        await eventually(lambda: sharing_is(0))
        # All traffic goes to a gateway with half of the quota.
        load, begin_s = Load(40), time.monotonic()
        await load.run(8, lambda number: doors[0])
        length_s = time.monotonic() - begin_s
        assert 0 < len(load.served_s) <= 600 * (BURST + 0.7 * length_s / 60) + 10
        etcd.start()
        await eventually(lambda: sharing_is(1))


@pytest.mark.slow
async def test_a_quota_holds_in_any_minute_while_traffic_shifts(
    store: Store, tmp_path: Path, keys: Path
) -> None:
    """Traffic goes to both gateways equally, then to one only, then to the other only."""
    limit = 600
    async with pair(store, tmp_path / "model", keys, requests_per_minute=limit) as doors:
        load = Load(30)
        begin_s = time.monotonic()
        await load.run(50, lambda number: doors[number % 2])
        await load.run(50, lambda number: doors[0])
        await load.run(50, lambda number: doors[1])
        end_s = time.monotonic()
    minutes = []
    from_s = begin_s
    while from_s + 60 <= end_s:
        minutes.append(sum(from_s < time_s <= from_s + 60 for time_s in load.served_s))
        from_s += 0.5
    print(f"of {limit} a minute: {min(minutes)} to {max(minutes)}")
    assert 0.9 * limit <= min(minutes) and max(minutes) <= 1.1 * limit


# --- running outputs

Send = Callable[[Door], Awaitable[bool]]
"""Sends a request for 200 tokens through an API; returns whether it was admitted."""


def by_http(path: str, **fields: Any) -> Send:
    async def send(door: Door) -> bool:
        body = {"model": "m"} | fields
        answer = await door.case.http.post(path, json=body, headers=door.headers)
        assert answer.status_code in (200, 429), answer.text
        return answer.is_success

    return send


async def by_grpc(door: Door) -> bool:
    sampling = gateway_pb2.Sampling(max_tokens=200)
    request = gateway_pb2.CompleteRequest(
        model="m", prompts=[gateway_pb2.Prompt(text="hi")], sampling=sampling
    )
    async with grpc.aio.insecure_channel(door.case.target) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        return await admitted(stub.Complete(request, metadata=tuple(door.headers.items())))


async def by_kserve(door: Door) -> bool:
    request = inference_pb2.ModelInferRequest(model_name="m")
    for name, text in (("text_input", "hi"), ("sampling_parameters", '{"max_tokens": 200}')):
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(text.encode())
    async with grpc.aio.insecure_channel(door.case.target) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        return await admitted(stub.ModelInfer(request, metadata=tuple(door.headers.items())))


async def admitted(call: Awaitable[Any]) -> bool:
    """Whether a gRPC call succeeds; only a quota may fail it."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
        return False
    return True


HI = [{"role": "user", "content": "hi"}]
APIS = {
    "completions": by_http("/v1/completions", prompt="hi", max_tokens=200),
    # 4 outputs of 50 tokens.
    "choices": by_http("/v1/completions", prompt=["hi", "ho"], n=2, max_tokens=50),
    "chat": by_http("/v1/chat/completions", messages=HI, max_tokens=200),
    # Limited by the context only.
    "chat without a maximum": by_http("/v1/chat/completions", messages=HI),
    "responses": by_http("/v1/responses", input="hi", max_output_tokens=200),
    "messages": by_http("/v1/messages", messages=HI, max_tokens=200),
    "grpc": by_grpc,
    "kserve": by_kserve,
}


@pytest.mark.parametrize("api", APIS)
async def test_concurrent_outputs_keep_the_limit(case: Case, keys: Path, api: str) -> None:
    """Short outputs come first, so that short outputs are expected of this owner."""
    alice, limit = await door(case, keys, "alice", tokens_per_minute=1000), 1000
    for _ in range(30):
        assert (await alice.complete()).is_success
    before = await metric(case, "tideserve_gateway_quota_used_total", owner="alice", limit="tokens")
    worker = case.paused(1)
    outcomes: list[bool] = []

    async def send() -> None:
        outcomes.append(await APIS[api](alice))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(12):
            tasks.create_task(send())
        outputs = 4 if api == "choices" else 1
        await eventually(lambda: len(worker.active) / outputs + len(outcomes) == 12)
        assert not any(outcomes)
        worker.go.set()
    assert sum(outcomes) <= 5
    used = await metric(case, "tideserve_gateway_quota_used_total", owner="alice", limit="tokens")
    assert used is not None and before is not None
    assert 400 < used - before <= 1.1 * limit


async def test_an_output_beyond_the_minutes_quota_ends_with_an_error(
    case: Case, keys: Path
) -> None:
    """Short outputs come first, so that eight long ones are admitted."""
    alice = await door(case, keys, "alice", tokens_per_minute=1000)
    for _ in range(30):
        assert (await alice.complete()).is_success
    name, labels = "tideserve_gateway_quota_refusals_total", {"owner": "alice", "limit": "tokens"}
    worker = case.paused(1)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(alice.complete(max_tokens=5))
        await eventually(lambda: len(worker.active) == 1)
        second = tasks.create_task(read_stream(alice, max_tokens=240, n=8))
        await eventually(lambda: len(worker.active) == 9)
        worker.go.set()
    assert first.result().is_success
    text = second.result()
    assert "this output ended early" in text and '"code":"rate_limit_exceeded"' in text
    assert "[DONE]" not in text
    assert await metric(case, name, **labels) == 1
    await eventually(lambda: not worker.active)


async def read_stream(door: Door, **fields: Any) -> str:
    """The text of a streamed completion."""
    answer = await door.complete(stream=True, **fields)
    assert answer.is_success, answer.text
    return answer.text
