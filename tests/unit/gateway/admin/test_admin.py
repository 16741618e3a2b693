"""Parts of the admin port that need no cluster."""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from services.common.errors import ConfigError
from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.core.report import EngineReport, Load
from services.core.service import ServiceClass
from services.gateway.admin import feed as feed_module
from services.gateway.admin import port as admin_port
from services.gateway.admin.feed import HEARTBEAT, VIEWERS_MAX, Feed
from services.gateway.admin.guard import SECURITY_HEADERS, AdminGuard, host_name
from services.gateway.admin.live_state import WINDOW_S, RateWindow, sentence
from services.gateway.cluster.cluster_client import cluster_rows
from services.gateway.config import GatewayConfig
from services.gateway.keys.key_ring import KeyRing
from services.gateway.records.metrics import EndpointTotals, Metrics
from services.gateway.vocabulary.errors import ServiceUnavailable
from services.gateway.vocabulary.message import ClusterStatus
from tests.support.asgi import answer_ok
from tests.support.control_plane import worker_record
from tests.support.reports import memory_report
from tests.support.waiting import settle
from tideserve.common.v1 import record_pb2

KEY = "k" * 32
API = "/tideserve/v1/status"


def client(host: str = "127.0.0.1", names: str = "", key: str | None = None) -> httpx.AsyncClient:
    guard = AdminGuard(answer_ok, host, names, KeyRing(admin_key=key), frozenset({"/"}))
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=guard), base_url="http://127.0.0.1:8001"
    )


@pytest.mark.parametrize(
    ("listens", "asked", "status"),
    [
        ("127.0.0.1", "127.0.0.1:8001", 200),
        ("127.0.0.1", "localhost:8001", 200),
        ("127.0.0.1", "LOCALHOST", 200),
        ("127.0.0.1", "[::1]:8001", 200),
        ("127.0.0.1", "rebound.example:8001", 403),
        ("127.0.0.1", "127.0.0.1.rebound.example", 403),
        ("127.0.0.1", "10.0.0.7:8001", 403),
        ("127.0.0.1", "", 403),
        ("0.0.0.0", "10.0.0.7:8001", 200),
        ("0.0.0.0", "tide.example", 200),
        ("0.0.0.0", "rebound.example", 403),
    ],
)
async def test_only_known_host_names_are_served(listens: str, asked: str, status: int) -> None:
    async with client(listens, names="Tide.example, other.example") as http:
        for path in ("/", API):
            answer = await http.get(path, headers={"host": asked})
            assert answer.status_code == status
            assert SECURITY_HEADERS.items() <= dict(answer.headers).items()
            if status == 403:
                assert "add the name to 'admin_names'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://127.0.0.1:8001"}, 200),
        ({"origin": "http://127.0.0.1:8002"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
async def test_cross_origin_requests_are_refused(headers: dict[str, str], status: int) -> None:
    async with client() as http:
        assert (await http.get(API, headers=headers)).status_code == status


async def test_mutating_requests_need_the_header() -> None:
    async with client() as http:
        for headers, status in (({}, 403), ({"x-tideserve-admin": "1"}, 200)):
            for method in ("POST", "PUT", "DELETE", "OPTIONS"):
                answer = await http.request(method, API, headers=headers)
                assert answer.status_code == status


async def test_the_key_guards_all_but_the_page() -> None:
    async with client(key=KEY) as http:
        assert (await http.get("/")).status_code == 200
        for given in ("", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", KEY):
            answer = await http.get(API, headers={"authorization": given})
            assert answer.status_code == 401
            assert "admin key" in answer.json()["error"]["message"]
        assert (await http.get(f"{API}?key={KEY}")).status_code == 401, "never in the URL"
        answer = await http.get(API, headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200


async def test_only_changes_and_refusals_leave_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with client() as http:
        await http.get(API)
        await http.post(API, headers={"x-tideserve-admin": "1"})
        await http.post(API)
    lines = [record.message for record in caplog.records if record.name.startswith("services.")]
    assert lines == ["other 200", "other 403"]


def test_allowed_hosts() -> None:
    assert host_name("Example.COM:80") == "example.com"
    assert host_name("[::1]:80") == "::1"
    assert host_name("[::1") == "::1"


def config(**fields: Any) -> GatewayConfig:
    return GatewayConfig(etcd_url="e:1", model_name="m", model_dir=Path("m"), **fields)


def test_a_port_for_the_network_needs_a_key() -> None:
    assert config(admin_host="0.0.0.0").admin_port is None, "off by itself"
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        assert config(admin_host=host, admin_port=1).admin_key is None
    for host in ("0.0.0.0", "::", "10.1.1.1", "gateway"):
        with pytest.raises(ConfigError, match=f"{host} would be exposed .* set 'admin_key_file'"):
            config(admin_host=host, admin_port=1)
        assert config(admin_host=host, admin_port=1, admin_key=KEY).admin_key == KEY
        config(admin_host=host, admin_port=1, api_keys_file=Path("keys.jsonl"))
    with pytest.raises(ConfigError, match="shorter than 16"):
        config(admin_port=1, admin_key="short           ")


def test_rates_cover_a_recent_window() -> None:
    pulse = RateWindow()
    assert (pulse.tokens_per_s, pulse.ttft_s) == (0.0, None)
    pulse.add(100.0, EndpointTotals(5, 1, 9.0))
    assert (pulse.tokens_per_s, pulse.ttft_s) == (0.0, None)
    pulse.add(101.0, EndpointTotals(25, 3, 10.0))
    assert (pulse.tokens_per_s, pulse.ttft_s) == (20.0, 0.5)
    for second in range(102, 110):
        pulse.add(float(second), EndpointTotals(25, 3, 10.0))
    assert (pulse.tokens_per_s, pulse.ttft_s) == (0.0, None), f"older than {WINDOW_S} s"


def test_totals_match_the_metrics() -> None:
    metrics = Metrics(("m",), CollectorRegistry())
    for service_class in (ServiceClass.INTERACTIVE, ServiceClass.BATCH):
        metrics.of("m").by_class.of(service_class).ttft.observe(0.25)
    metrics.of("m").by_class.tokens.total += 4
    assert metrics.totals() == {"m": EndpointTotals(4, 2, 0.5)}


DECISION = {
    "action": "merge",
    "cause": "overload",
    "group_ids": [],
    "parts": [],
    "needed_tokens": 900,
    "threshold_tokens": 2048,
    "demand_tokens": 2900,
    "forecast_tokens": 400,
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "need 3,300 tokens of KV cache, the threshold is 2,048"),
        ({"cause": "manual", "group_ids": ["g", "h"]}, "Manual merge: g, h merge"),
        ({"action": "restore", "cause": "relief", "group_ids": ["g"]}, "2,048: g splits"),
        ({"action": "restore", "cause": "draining", "group_ids": ["g"]}, "worker of g is draining"),
        ({"action": "restore", "cause": "manual", "group_ids": ["g"]}, "Manual split: g splits"),
        (
            {"action": "restore", "cause": "manual", "group_ids": ["g", "h"], "parts": [2, 3]},
            "Manual split: g (into 2), h (into 3) splits",
        ),
        ({"action": "call_off", "cause": "overload", "group_ids": ["g"]}, "g does not split"),
        ({"action": "exhausted"}, "need 900 more tokens of KV cache"),
        ({"action": "new", "cause": "unknown"}, "new (unknown)"),
    ],
)
def test_decisions_are_rendered_as_sentences(changes: dict[str, Any], reason: str) -> None:
    assert reason in sentence(DECISION | changes)


def test_kv_of_a_worker_depends_on_its_layers() -> None:
    shape = record_pb2.ModelShape(num_layers=4)
    records = {name: worker_record(name, shape=shape) for name in ("a", "b", "c")}
    workers = tuple(
        memory_report(name, EngineReport(Load(0, 0, 2, 0, kv_blocks_total=8)), kv_block_bytes=400)
        for name in ("a", "b", "c")
    )
    merged = Member("a", "i", 0, 1), Member("b", "i", 1, 4)
    groups = (
        Group("g", 1, GroupPhase.STABLE, merged, "m"),
        Group("h", 1, GroupPhase.STABLE, (Member("c", "i"),), "m"),
    )
    rows = cluster_rows(ClusterStatus(workers, groups), records)["workers"]
    assert [row["kv_used_bytes"] for row in rows] == [600, 1800, 2400]
    assert [row["kv_free_bytes"] for row in rows] == [200, 600, 800]


async def state() -> dict[str, Any]:
    return {"workers": []}


async def test_a_shared_producer_stops_without_viewers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "PERIOD_S", 0.0)
    looks = 0

    async def look() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        return {"workers": [], "looks": looks}

    feed = Feed(look)
    running = asyncio.create_task(feed.run())
    await settle(100)
    assert looks == 0
    with feed.viewer() as first, feed.viewer() as other:
        await settle(100)
        assert 0 < looks <= 101
        newest = f'data: {{"workers":[],"looks":{looks}}}\n\n'.encode()
        assert [await anext(first), await anext(other)] == [newest, newest]
    await settle(100)
    rested = looks
    await settle(100)
    assert looks == rested
    running.cancel()


async def test_viewers_are_limited_and_free_their_place() -> None:
    feed = Feed(state)
    with ExitStack() as stack:
        for _ in range(VIEWERS_MAX):
            stack.enter_context(feed.viewer())
        with pytest.raises(ServiceUnavailable, match="already has 32 viewers"):
            stack.enter_context(feed.viewer())
    with feed.viewer() as frames:
        assert await anext(frames) == HEARTBEAT
        feed.close()
        assert [frame async for frame in frames] == []
    with pytest.raises(ServiceUnavailable, match="shutting down"), feed.viewer():
        raise AssertionError("it is closed")


async def test_a_failed_producer_restarts_and_logs_a_single_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admin_port, "RETRY_S", 0)
    monkeypatch.setattr(feed_module, "PERIOD_S", 0)
    looks = 0

    async def look() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        if looks <= 3:
            raise ValueError("of a later release")
        return await state()

    feed = Feed(look)
    running = asyncio.create_task(admin_port.restart_on_failure(feed.run, "the feed"))
    with feed.viewer() as frames:
        async for frame in frames:
            if frame.startswith(b"data: "):
                break
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled() and looks > 3
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_a_failure_is_shown_only_in_its_own_section(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise OSError("no more sockets")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(admin_port.log_failure(fails(), "the port"))
    assert "restart this gateway" in caplog.text and "no more sockets" in caplog.text
