"""The live page of a real cluster during and after a flood; screenshots are in build/."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.systems.system import Deployment
from benchmarks.systems.tideserve import Tideserve
from tests.support.browser import CHROMIUM, Page, open_page
from tests.support.cluster import REPOSITORY
from tideserve.cli.cache import cache_root
from tideserve.cli.demo import (
    DEVICE,
    FLOOD_LIMIT_S,
    MEMORY_BYTES,
    MODEL_NAME,
    OPTIONS,
    WORKERS,
    requests_of_flood,
)
from tideserve.cli.model_store import resolve_model
from tideserve.cli.tiny_model import DEEP, write_tiny_model
from tideserve.load.client import Job, LoadClient

PICTURES = REPOSITORY / "build"
HEIGHTS = (
    "[...document.querySelectorAll('.part.parameters')].map((p) => parseFloat(p.style.height))"
)
MERGED = (
    "document.querySelector('.group.joined') && !document.querySelector('.note.turning')"
    f" && Math.max(...{HEIGHTS}) < 40"
)
# Lets the columns' animation finish before the screenshot.
SETTLE_S = 1.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.skipif(
        CHROMIUM is None, reason="there is no chromium; install one: apt-get install chromium"
    ),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Tideserve]:
    """The demo's cluster with padded iterations, so that a flood lasts long enough."""
    tokenizer_dir = resolve_model(None, cache_root(), print, "auto")
    deployment = Deployment(
        model_dir=write_tiny_model(tmp_path / "model", tokenizer_dir, DEEP),
        model_name=MODEL_NAME,
        cache=cache_root(),
        workers=WORKERS,
        memory_bytes=MEMORY_BYTES,
        dtype="float32",
        paced=DEVICE,
        options=OPTIONS,
    )
    system = Tideserve("drop", (), deployment)
    try:
        system.start(print)
        yield system
    finally:
        system.stop()


async def picture(page: Page, name: str) -> None:
    """Write build/live-page-NAME.png."""
    await asyncio.sleep(SETTLE_S)
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / f"live-page-{name}.png").write_bytes(await page.screenshot())


async def test_the_page_shows_dropped_and_restored_parameters(cluster: Tideserve) -> None:
    async with open_page(1280, 960) as page:
        await page.goto(cluster.admin_url)
        await page.until("document.querySelectorAll('.tank').length === 2")
        await picture(page, "rest")
        whole = await page.evaluate(HEIGHTS)
        job = Job((cluster.urls[0],), MODEL_NAME, requests_of_flood(), FLOOD_LIMIT_S)
        flood = asyncio.create_task(LoadClient(job).run())
        await page.until(MERGED)
        await picture(page, "flood")
        assert "share one model" in await page.text("#headline")
        assert "Requests need" in await page.text("#decisions")
        await flood
        await page.until("document.querySelectorAll('.group').length === 2")
        await page.until(f"{HEIGHTS}.every((one) => Math.abs(one - {whole[0]}) < 1)")
        await picture(page, "recovery")
        assert "Demand fell" in await page.text("#decisions")
        assert page.complaints == []
