"""Under any sequence of leaders each line ends once, and none is left behind."""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, select

from services.gateway.batches import leadership, line_store
from services.gateway.batches.errors import Fenced
from services.gateway.batches.schema import leadership as leaders
from services.gateway.batches.store import BatchStore
from tests.support.batch_store import OWNER, begun_batch, result
from tests.support.batch_takeover import Takeovers

SEEDS = 10
Patch = pytest.MonkeyPatch


async def test_each_line_ends_once(store_url: str) -> None:
    await take_over_often(store_url, SEEDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_each_line_ends_once_in_a_thousand_runs(store_url: str) -> None:
    await take_over_often(store_url, 1000)


async def take_over_often(store_url: str, runs: int) -> None:
    stores = (BatchStore(store_url), BatchStore(store_url))
    elections = itertools.count(1)
    try:
        for seed in range(runs):
            await Takeovers(stores, seed, elections).run()
    finally:
        for store in stores:
            await store.close()


async def late_claim(store: BatchStore) -> None:
    """The former leader claims a line before it learns that it is replaced."""
    first = await store.lead(1)
    batch_id = await begun_batch(store, first, 2)
    second = await store.lead(2)
    with contextlib.suppress(Fenced):
        await store.lines.claim(first, batch_id, 1)
    await finish_all(store, second, batch_id)


async def lost_leader(store: BatchStore) -> None:
    """The former leader ends with lines that it claimed."""
    first = await store.lead(1)
    batch_id = await begun_batch(store, first, 2)
    await store.lines.claim(first, batch_id, 1)
    await finish_all(store, await store.lead(2), batch_id)


async def repeated_result(store: BatchStore) -> None:
    """A leader repeats a result, as after a timeout."""
    token = await store.lead(1)
    batch_id = await begun_batch(store, token, 1)
    await store.lines.claim(token, batch_id, 1)
    assert await store.lines.finish(token, result(batch_id, 1))
    await store.lines.finish(token, result(batch_id, 1))
    assert (await store.get(OWNER, batch_id)).completed == 1, "the line counts twice"


async def stale_campaign(store: BatchStore) -> None:
    """A gateway that was suspended after its election campaigns when another one leads."""
    token = await store.lead(2)
    with contextlib.suppress(Fenced):
        await store.lead(1)
    await store.advance(token)


async def finish_all(store: BatchStore, token: int, batch_id: str) -> None:
    for line in await store.lines.claim(token, batch_id, 9):
        assert await store.lines.finish(token, result(batch_id, line.line))
    assert (await store.get(OWNER, batch_id)).open == 0, "a line is left behind"


def without_check(patch: Patch) -> None:
    patch.setattr(line_store, "check_token", lambda connection, token: None)


def without_take_over(patch: Patch) -> None:
    patch.setattr(leadership, "_take_over", lambda connection, token: None)


def without_state(patch: Patch) -> None:
    def any_state(connection: Connection, token: int, calls: Any) -> set[tuple[str, int]]:
        return {(result.batch_id, result.line) for _, result in calls}

    patch.setattr(line_store, "_running", any_state)


def without_order(patch: Patch) -> None:
    patch.setattr(leadership, "SILENT_S", -1000.0)


CASES = [
    pytest.param(late_claim, without_check, id="claims compare the token"),
    pytest.param(lost_leader, without_take_over, id="a leader takes lines over"),
    pytest.param(repeated_result, without_state, id="only running lines end"),
    pytest.param(stale_campaign, without_order, id="the later election wins"),
]


@pytest.mark.parametrize(("scene", "remove"), CASES)
async def test_each_rule_is_needed(
    store: BatchStore,
    scene: Callable[[BatchStore], Any],
    remove: Callable[[Patch], None],
    monkeypatch: Patch,
) -> None:
    await scene(store)
    remove(monkeypatch)
    with pytest.raises((AssertionError, Fenced)):
        await scene(store)


@pytest.mark.parametrize("locked", [True, False])
async def test_a_leader_waits_for_the_claims_of_the_former(
    store_url: str, monkeypatch: Patch, locked: bool
) -> None:
    """A claim that has compared the token delays the next leader until it is committed."""
    if not locked and store_url.startswith("sqlite"):
        pytest.skip("SQLite has one writer at a time")
    compared, led = threading.Event(), threading.Event()
    check = leadership.check_token

    def check_and_wait(connection: Connection, token: int) -> None:
        if locked:
            check(connection, token)
        else:
            assert connection.scalar(select(leaders.c.token)) == token
        compared.set()
        # Without the lock the other gateway leads meanwhile; with it, it waits for this claim.
        led.wait(1.0 if locked else 60.0)

    former, store = BatchStore(store_url), BatchStore(store_url)
    first = await former.lead(1)
    batch_id = await begun_batch(former, first, 1)
    monkeypatch.setattr(line_store, "check_token", check_and_wait)
    claim = asyncio.create_task(former.lines.claim(first, batch_id, 1))
    assert await asyncio.to_thread(compared.wait, 60.0)
    second = await store.lead(2)
    led.set()
    await claim
    monkeypatch.setattr(line_store, "check_token", check)
    # Without the lock the claim followed the take-over, so no gateway runs the line.
    assert len(await store.lines.claim(second, batch_id, 1)) == (1 if locked else 0)
    await former.close()
    await store.close()
