"""The admin port of a real gateway: the feed, its producer, and which callers it admits."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.gateway.admin import feed as feed_module
from tests.support.etcd_server import EtcdServer
from tests.support.gateway import Case
from tests.support.waiting import eventually

EVENTS = "/tideserve/v1/events"


async def states(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def test_the_feed_follows_the_cluster(case: Case) -> None:
    async with case.admin.stream("GET", EVENTS) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        seen = states(response)
        # The gateway registers itself only once it serves.
        async for first in seen:
            if len(first["services"]) == 4:
                break
        assert [row["id"] for row in first["workers"]] == ["w0"]
        assert (first["model"], first["queued"], first["missing"]) == ("m", 0, [])
        assert {row["name"] for row in first["services"]} == {
            "gateway",
            "scheduler",
            "memmgr",
            "w0",
        }
        case.cluster.scheduler.queued = 7
        async for state in seen:
            if state["queued"] == 7:
                break
        answering = asyncio.create_task(case.complete(max_tokens=8))
        async for state in seen:
            if state["tokens_per_s"] > 0:
                assert state["ttft_s"] > 0
                break
        assert (await answering).status_code == 200
        await case.cluster.stop_memmgr()
        async for state in seen:
            if state.get("errors"):
                assert state["workers"] == []
                break


async def test_a_drain_ends_the_feed(case: Case) -> None:
    async with case.admin.stream("GET", EVENTS) as response:
        seen = states(response)
        await anext(seen)
        case.stop.set()
        async for _ in seen:
            pass


async def test_viewers_beyond_the_limit_are_refused(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "VIEWERS_MAX", 1)
    async with case.admin.stream("GET", EVENTS) as response:
        await anext(states(response))
        refused = await case.admin.get(EVENTS)
        assert refused.status_code == 503
        assert "viewers; close a page" in refused.json()["error"]["message"]

    async def viewer_admitted() -> bool:
        async with case.admin.stream("GET", EVENTS) as again:
            return again.status_code == 200

    await eventually(viewer_admitted)


async def test_operator_routes_are_on_the_admin_port_only(case: Case) -> None:
    for path in ("/tideserve/v1/groups/merge", "/tideserve/v1/groups/split"):
        assert (await case.http.post(path, json={})).status_code == 404
        bare = {"x-tideserve-admin": ""}
        assert (await case.admin.post(path, json={}, headers=bare)).status_code == 403
        assert (await case.admin.post(path, json={})).status_code == 503, "a fake memory manager"
    for path in ("/", "/page.js", "/draw.js", "/feed.js", "/text.js", "/page.css", "/icon.svg"):
        answer = await case.admin.get(path)
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert (await case.http.get(path)).status_code == 404
    assert "tideserve_gateway" in (await case.admin.get("/metrics")).text


async def test_the_status_names_the_etcd_in_use(case: Case, etcd: EtcdServer) -> None:
    async def version() -> str | None:
        return (await case.admin.get("/tideserve/v1/status")).json()["etcd"]["version"]

    assert re.fullmatch(r"3\.\d+\.\d+", await version() or "")
    etcd.kill()
    assert await version() is None
    etcd.start()
