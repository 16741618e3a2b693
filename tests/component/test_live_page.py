"""The live page in a real Chromium, with real gateway, memory manager and group protocol."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.config import from_mapping
from services.common.etcd import Store
from services.gateway.batches.settings import BatchSettings
from services.gateway.batches.store import BatchStore
from services.scheduler import app as scheduler_app
from services.scheduler.config import SchedulerConfig
from tests.support.admin import admin_port, members
from tests.support.batch_store import OWNER, begun_batch, result
from tests.support.browser import CHROMIUM, Page, open_page
from tests.support.control_plane import (
    LEASE_TTL_S,
    FakeGateway,
    FakeWorker,
    service_address,
    serving,
)
from tests.support.member import FakeMember
from tests.support.waiting import eventually
from tideserve.common.v1 import service_pb2
from tideserve.scheduler.v1 import scheduler_pb2

KEY = "a key of more than sixteen"
TANKS = "document.querySelectorAll('.tank')"
LIVE = "document.querySelector('#link').dataset.state === 'live'"
FOCUS = "(document.activeElement.id || document.activeElement.innerText)"

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium; install one: apt-get install chromium"
)


@asynccontextmanager
async def watched(
    store: Store, tmp_path: Path, **fields: Any
) -> AsyncIterator[tuple[Page, str, tuple[FakeMember, FakeMember]]]:
    """The page of a cluster of two workers, its URL and members; the page must log no error."""
    async with members(store) as pair:
        for fake in pair:
            fake.engine.blocks_total, fake.engine.blocks_free = 100, 100
        async with admin_port(store, tmp_path, **fields) as url, open_page() as page:
            await page.goto(url)
            yield page, url, pair
            assert page.requests
            assert all(request.startswith(f"{url}/") for request in page.requests), page.requests


def height(worker: int, part: str) -> str:
    """The height of a part of a worker's column in percent, as set by the page."""
    return f"parseFloat({TANKS}[{worker}].querySelector('.part.{part}').style.height)"


async def focus_on(page: Page, wanted: str) -> None:
    """Press Tab until the element with that id or text is focused."""
    seen = []
    for _ in range(40):
        await page.press("Tab")
        seen.append(await page.evaluate(FOCUS))
        if seen[-1] == wanted:
            return
    raise AssertionError(f"the keyboard never reaches {wanted}: {seen}")


async def test_the_page_shows_memory_and_changes_groups_by_keyboard(
    store: Store, tmp_path: Path
) -> None:
    async with watched(store, tmp_path) as (page, _, (first, _other)):
        await page.until(f"{TANKS}.length === 2 && {LIVE}")
        assert await page.evaluate("document.querySelector('#no-drops').hidden")
        assert "every worker holds the whole model" in await page.text("#headline")
        whole = await page.until(height(0, "parameters"))
        assert await page.evaluate(height(0, "used")) == 0

        first.engine.blocks_free = 40
        await page.until(f"{height(0, 'used')} > 0")
        used, free = await page.evaluate(f"[{height(0, 'used')}, {height(0, 'free')}]")
        assert used == pytest.approx(1.5 * free, abs=0.01)
        assert "KV in use 8 KiB" in await page.evaluate(
            f"{TANKS}[0].querySelector('.column').getAttribute('aria-label')"
        )

        await focus_on(page, "merge")
        await page.press("Enter")
        await page.until("document.querySelector('#ask').open")
        await page.press("Space")
        assert not await page.evaluate("document.querySelector('#ask').open"), "left it"
        assert first.engine.held == {0, 1, 2, 3}
        await page.press("Enter")
        await page.until("document.querySelector('#ask').open")
        await focus_on(page, "ask-yes")
        await page.press("Enter")
        await page.until("document.querySelector('.group.joined')")
        await page.until(f"Math.abs({height(0, 'parameters')} - {whole / 2}) < 0.01")
        await page.until("document.querySelector('#progress').className === 'stable'")
        assert "layers 0–1 of 4" in await page.text(".tank")
        assert "w0 and w1 share one model" in await page.text("#headline")
        assert "Manual merge" in await page.text("#decisions")

        await focus_on(page, "Split group-w0")
        await page.press("Enter")
        await page.until("document.querySelector('#ask').open")
        await focus_on(page, "ask-yes")
        await page.press("Enter")
        await page.until("document.querySelectorAll('.group').length === 2")
        await page.until(f"Math.abs({height(0, 'parameters')} - {whole}) < 0.01")

        await focus_on(page, "All numbers as a table")
        await page.press("Enter")
        await page.until("document.querySelectorAll('#rows tr').length === 2")
        assert "group-w0" in await page.text("#rows tr")
        assert page.complaints == []


async def test_the_page_marks_workers_that_cannot_drop_layers(store: Store, tmp_path: Path) -> None:
    note = "document.querySelector('#no-drops')"
    lacking = {"capabilities": ["generate"], "no_drops": "UCX cannot be loaded"}
    async with (
        members(store, **lacking),
        admin_port(store, tmp_path) as url,
        open_page() as page,
    ):
        await page.goto(url)
        await page.until(f"{LIVE} && !{note}.hidden")
        assert await page.text("#no-drops") == "w0, w1 cannot drop layers: UCX cannot be loaded."
        assert page.complaints == []


async def test_the_page_shows_batches_until_they_end(store: Store, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/batches.db"
    batches = BatchStore(url)
    token = await batches.lead(1)
    batch_id = await begun_batch(batches, token, 40)
    for line in await batches.lines.claim(token, batch_id, 10):
        ending = result(batch_id, line.line, error=line.line == 1)
        assert await batches.lines.finish(token, ending)
    panel = "document.querySelector('#offline')"
    async with watched(store, tmp_path, batches=BatchSettings(batch_store=url)) as (page, *_):
        await page.until(f"{LIVE} && !{panel}.hidden")
        shown = await page.text("#batches li")
        assert shown.startswith(f"{batch_id} in progress · 10 of 40 lines · 1 failed · ")
        assert "tokens/s" in shown and shown.endswith("min left")
        bar = "document.querySelector('#batches progress')"
        assert await page.evaluate(f"[{bar}.value, {bar}.max]") == [10, 40]
        # The panel is above the numbers, with equal width.
        edges = [
            await page.evaluate(
                f"(b => [b.left, b.right, b.top])({element}.getBoundingClientRect())"
            )
            for element in (panel, "document.querySelector('#numbers')")
        ]
        assert edges[0][:2] == edges[1][:2] and edges[0][2] < edges[1][2]
        await batches.cancel(OWNER, batch_id)
        await page.until(f"{panel}.hidden")
        assert page.complaints == []
    await batches.close()


async def test_the_page_shows_waiting_requests_by_length(store: Store, tmp_path: Path) -> None:
    """A real scheduler queues batch requests of two lengths that no group has room for."""
    panel = "document.querySelector('#lengths')"
    options = {"etcd_url": store.url, "lease_ttl_s": LEASE_TTL_S, "buckets": "on"}
    config = from_mapping(SchedulerConfig, options, "a test")
    batch = service_pb2.Service(service_class=service_pb2.SERVICE_CLASS_BATCH)
    async with watched(store, tmp_path) as (page, _, (first, _other)):
        full = FakeWorker(first.record, epoch=first.engine.epoch)
        full.load.kv_blocks_free = 0
        async with (
            serving(scheduler_app.serve, config),
            full.reporting(address := await service_address(store, "scheduler")),
            FakeGateway.connected(address) as gateway,
        ):
            await eventually(lambda: gateway.heartbeats and gateway.heartbeats[-1].groups_serving)
            for number in range(80):
                prompt_tokens = 40 if number % 4 else 900
                await gateway.ask(f"r{number}", prompt_tokens=prompt_tokens, service=batch)
            await page.until(f"{LIVE} && document.querySelectorAll('#buckets li').length > 1")
            rows = "[...document.querySelectorAll('#buckets li')]"
            counts = f"{rows}.map((r) => r.querySelector('.count').innerText)"
            await page.until(f"String({counts}) === '60,20'")
            # Heartbeats of the page's gateway and of this one are sent at different times.
            (model,) = await eventually(
                lambda: [
                    model
                    for model in gateway.heartbeats[-1].buckets
                    if sum(bucket.requests for bucket in model.buckets) == 80
                ]
            )
            lengths = [bucket.length for bucket in model.buckets]
            ranges = await page.evaluate(f"{rows}.map((r) => r.querySelector('.range').innerText)")
            assert ranges == [
                f"{low + 1:,} to {high:,} tokens" for low, high in pairwise([0, *lengths])
            ]
            widths = await page.evaluate(f"{rows}.map((r) => r.querySelector('.bar').style.width)")
            assert widths == ["100%", "33.3333%"]
            assert f"{100 * model.padding_share:.1f} % of all tokens" in await page.text("#padding")
            for number in range(80):
                withdraw = scheduler_pb2.Withdraw(request_id=f"r{number}")
                await gateway.send(scheduler_pb2.AdmitRequest(withdraw=withdraw))
            await page.until(f"{panel}.hidden")
            assert page.complaints == []


async def test_a_failed_change_is_shown(store: Store, tmp_path: Path) -> None:
    async with watched(store, tmp_path) as (page, _, (_one, other)):
        other.engine.refuse = "it has no room"
        await page.until(f"{TANKS}.length === 2 && {LIVE}")
        await page.until("document.querySelector('#merge').click() ?? true")
        await page.evaluate("document.querySelector('#ask-yes').click()")
        await page.until("document.querySelector('#progress').className === 'failed'")
        assert "it has no room" in await page.text("#progress")


async def test_the_page_needs_the_key(store: Store, tmp_path: Path) -> None:
    async with watched(store, tmp_path, admin_key=KEY) as (page, url, _):
        await page.until("!document.querySelector('#login').hidden")
        assert await page.evaluate("document.querySelector('#main').hidden")
        await page.type("a wrong key")
        await page.press("Enter")
        await page.until("document.querySelector('#login-message').innerText.includes('not valid')")
        await page.type(KEY)
        await page.press("Enter")
        await page.until(f"{TANKS}.length === 2 && {LIVE}")
        assert await page.evaluate("location.href") == f"{url}/", "the key is in no URL"
        assert all("401" in complaint for complaint in page.complaints), page.complaints


async def test_a_lost_feed_is_shown_and_reconnected(store: Store, tmp_path: Path) -> None:
    """A relay in front of the gateway closes and reopens."""
    async with members(store), admin_port(store, tmp_path) as url, open_page() as page:
        relay = Relay(int(url.rpartition(":")[2]))
        await relay.open()
        await page.goto(f"http://127.0.0.1:{relay.port}")
        await page.until(f"{TANKS}.length === 2 && {LIVE}")
        await relay.close()
        await page.until("!document.querySelector('#lost').hidden")
        assert "The feed is lost: the gateway cannot be reached" in await page.until(
            "document.querySelector('#lost').innerText.includes('cannot be reached')"
            " && document.querySelector('#lost').innerText"
        )
        assert await page.text("#link") == "feed lost"
        assert await page.evaluate(f"{TANKS}.length") == 2, "what was known stays in view"
        await relay.open()
        await page.until(f"{LIVE} && document.querySelector('#lost').hidden")
        await relay.close()


async def test_a_page_of_another_site_is_refused(store: Store, tmp_path: Path) -> None:
    """A real browser sends its origin; the guard's unit test covers all headers."""
    async with (
        members(store) as (first, _),
        admin_port(store, tmp_path) as url,
        open_page() as page,
    ):
        foreign = await asyncio.start_server(_hello, "127.0.0.1", 0)
        await page.goto(f"http://localhost:{foreign.sockets[0].getsockname()[1]}")
        await page.until("document.body.innerText === 'hello'")
        for path, options in (
            ("/tideserve/v1/status", {}),
            ("/tideserve/v1/events", {"mode": "no-cors"}),
            ("/tideserve/v1/groups/merge", {"method": "POST", "mode": "no-cors"}),
            (
                "/tideserve/v1/groups/merge",
                {"method": "POST", "headers": {"X-Tideserve-Admin": "1"}},
            ),
        ):
            call = f"fetch({json.dumps(url + path)}, {json.dumps(options)})"
            outcome = await page.evaluate(f"{call}.then((a) => a.type, () => 'refused')")
            assert outcome == "refused", path
        assert first.engine.held == {0, 1, 2, 3}
        async with httpx.AsyncClient() as http:
            answer = await http.get(url, headers={"host": "rebound.example"})
            assert answer.status_code == 403
        foreign.close()


async def _hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: text/html\r\n\r\nhello")
    await writer.drain()


class Relay:
    """Forwards bytes to a local port while open; its own port stays the same."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Listen at the same port as before."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._pass_on, sock=listener)

    async def close(self) -> None:
        """Close all connections."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers |= {writer, there[1]}
        await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))
        self._writers -= {writer, there[1]}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()
