"""Estimated asks of a real gateway, answered by the real scheduler under overload."""

from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import pytest

from services.common.clock import monotonic_s
from services.common.etcd import Store
from services.core.ask import RefusalReason
from services.core.scheduler.calendar import Booking
from services.core.scheduler.vocabulary import Asked, Event, GatewayGone
from services.core.service import Service, ServiceClass
from services.gateway.cluster import admission_client
from services.scheduler import servicer
from services.scheduler.driver import SchedulerDriver
from services.scheduler.servicer import SchedulerServicer
from tests.support.fake_cluster import running_service
from tests.support.gateway import Case
from tests.support.waiting import eventually
from tests.unit.core.scheduler.test_lateness import Overloaded, waits_of
from tideserve.cli.status import STATUS_PATH, refusal_lines
from tideserve.scheduler.v1 import scheduler_pb2_grpc

FLOOD = 99
"""Stream id of the requests that fill the queue."""


class Driver(SchedulerDriver):
    """Applies asks to a full group, or to an idle group after `relieve`.

    `delay`: an estimated ask is decided "before" or "after" the next ask, when the gateway no
    longer waits for its answer.
    """

    def __init__(self, address: str) -> None:
        self.scheduler = Overloaded(start_s=monotonic_s() - 10.2)
        super().__init__(self.scheduler.state, outbox_limit=1000, gateway_grace_s=1.0)
        self.asks: list[Asked] = []
        self.delay = ""
        self._address = address
        self._relieved = False
        self._delayed: Asked | None = None
        # Due later than the tests' requests, so they may wait longer.
        self.scheduler.flood(600, service=Service(ttft_s=119.0), stream_id=FLOOD)

    def apply(self, event: Event) -> None:
        if not isinstance(event, Asked):
            super().apply(event)
            return
        event = replace(event, now_s=monotonic_s())
        self.asks.append(event)
        if event.estimated and self.delay:
            self._delayed = event
            return
        if self._delayed is not None and self.delay == "before":
            self._decide(replace(self._delayed, now_s=event.now_s))
            self.relieve(event.now_s)
        self._decide(event)
        if self._delayed is not None and self.delay == "after":
            self._decide(replace(self._delayed, now_s=event.now_s))

    def relieve(self, now_s: float) -> None:
        """Drop the waiting requests, and report the group as idle."""
        self._relieved = True
        self.scheduler(GatewayGone(now_s, FLOOD))
        self.scheduler.join(now_s=now_s, address=self._address)

    def bookings(self) -> dict[int, Booking]:
        """The bookings of the asks, by fingerprint."""
        calendar = waits_of(self.scheduler).calendars[ServiceClass.STANDARD]
        known = {b.shape: b for bookings in calendar._bookings.values() for b in bookings}
        prints = {ask.fingerprint for ask in self.asks}
        return {number: known[number,] for number in prints if (number,) in known}

    def waits(self) -> list[int]:
        """Seconds from each ask until its booking."""
        bookings = self.bookings()
        return [bookings[ask.fingerprint].retry_after_s(ask.now_s) for ask in self.asks]

    def refused(self) -> int:
        """Number of requests refused as late."""
        return self.scheduler.state.snapshot(monotonic_s()).refused_total[RefusalReason.TOO_LATE]

    def _decide(self, ask: Asked) -> None:
        """Apply an ask, after a new report of the group."""
        self.scheduler.now_s = ask.now_s
        if self._relieved:
            self.scheduler.report(now_s=ask.now_s, free=100)
        else:
            # Enough starts for a measured rate.
            for _ in range(6):
                self.scheduler.start_next()
        super().apply(ask)


@pytest.fixture
async def driver(
    case: Case, store: Store, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Driver]:
    """A scheduler under overload, as the gateway's only scheduler."""
    monkeypatch.setattr(admission_client, "ESTIMATED_TIMEOUT_S", 30.0)
    monkeypatch.setattr(servicer, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(admission_client, "HEARTBEAT_TIMEOUT_S", 3600.0)
    await case.cluster.stop_scheduler()
    driver = Driver(case.cluster.workers[0].address)

    def add(server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(driver), server)

    async def asks_early() -> bool:
        assert (await case.complete(prompt="before")).status_code == 503
        return bool(driver.asks) and driver.asks[-1].estimated

    async with running_service(store, "scheduler", "real", add):
        await eventually(asks_early)
        driver.asks.clear()
        yield driver


async def test_an_early_ask_is_refused_with_a_booking(case: Case, driver: Driver) -> None:
    answers = [await case.complete(prompt="x" * 40) for _ in range(2)]
    assert [ask.estimated for ask in driver.asks] == [True, True]
    assert {answer.json()["error"]["code"] for answer in answers} == {"too_late"}
    assert len(driver.bookings()) == 1
    assert int(answers[-1].headers["retry-after"]) == driver.waits()[-1]


async def test_the_status_explains_the_last_refusal(case: Case, driver: Driver) -> None:
    refused = await case.complete(prompt="x" * 40)
    status = (await case.admin.get(STATUS_PATH)).json()
    (row,) = status["late_refusals"]
    assert row["left_s"] == pytest.approx(10.0 - driver.asks[-1].waited_s)
    assert row["wait_s"] > row["left_s"] and row["last_minute"] > 1
    assert row["retry_after_s"] == int(refused.headers["retry-after"])
    (line,) = refusal_lines(status)
    assert line.startswith("m, standard: ") and "limited by memory" in line


async def test_a_request_that_may_proceed_is_served(case: Case, driver: Driver) -> None:
    driver.relieve(monotonic_s())
    assert (await case.complete(prompt="x" * 40)).status_code == 200
    early, ask = driver.asks
    assert (early.estimated, ask.estimated) == (True, False)
    assert (early.request_id, early.fingerprint) == (ask.request_id, ask.fingerprint)


async def test_an_early_refusal_books_time_for_every_choice(case: Case, driver: Driver) -> None:
    prompts = ["x" * 40, "y" * 80]
    refused = await case.complete(prompt=prompts, n=2)
    asks = list(driver.asks)
    assert len(driver.bookings()) == len(asks) == 4 and all(ask.estimated for ask in asks)
    first, second, third, fourth = [ask.prompt_tokens for ask in asks]
    assert first == second < third == fourth
    assert int(refused.headers["retry-after"]) == max(driver.waits())
    driver.relieve(monotonic_s())
    assert (await case.complete(prompt=prompts, n=2)).status_code == 200
    real = {(ask.fingerprint, ask.request_id[-2:]) for ask in driver.asks if not ask.estimated}
    assert real == {(ask.fingerprint, ask.request_id[-2:]) for ask in asks}
    assert not driver.bookings(), "they came before their time, which others can use now"


@pytest.mark.parametrize("delay", ["before", "after"])
async def test_a_delayed_early_ask_does_not_affect_the_final_ask(
    case: Case, driver: Driver, delay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_client, "ESTIMATED_TIMEOUT_S", 0.5)
    refused, driver.delay = driver.refused(), delay
    if delay == "after":
        driver.relieve(monotonic_s())
    assert (await case.complete(prompt="x" * 40)).status_code == 200
    assert [ask.estimated for ask in driver.asks] == [True, False]
    assert driver.refused() - refused == (delay == "before")
    assert not driver.bookings()
