"""Moves running requests between workers with their KV: by hand, from workers that shut down, and
as the overload monitor decides.

A worker that shuts down decides which of its requests move: those whose KV is sent in less time
than it is computed. It returns the others to the scheduler, and also those for which no worker has
room here.
"""

import asyncio
import logging

from services.common.clock import monotonic_s
from services.common.timeouts import timeout
from services.core.overload.events import Cause
from services.core.overload.manual_change import InvalidChange
from services.core.overload.rebalance import MOVE_MAX_S
from services.core.overload.shipping_pair import ShippingPair, pair_of, targets_of
from services.memmgr.driver import Driver
from services.memmgr.member_client import ShippingFailed
from services.memmgr.overload_watch import LoggedDecision, OverloadWatch
from services.memmgr.worker_memory import MemoryView
from tideserve.worker.v1 import worker_pb2

INTERVAL_S = 0.1
"""Interval at which workers that shut down and decisions are looked for."""
RETRY_S, RETRY_MAX_S = 1.0, 16.0
"""Pause after an order that moved no request; it doubles up to the maximum."""

log = logging.getLogger(__name__)


class Shipper:
    """Orders moves; while `run` runs and this memory manager leads, also of draining workers."""

    def __init__(
        self, driver: Driver, memory: MemoryView, watch: OverloadWatch, *, drained: bool
    ) -> None:
        """`drained`: whether requests of workers that shut down move with their KV."""
        self._driver = driver
        self._memory = memory
        self._watch = watch
        self._drained = drained
        self._under_way: set[str] = set()  # workers that shut down and have an order
        self._retries: dict[str, tuple[float, float]] = {}  # time and pause before it, by worker

    async def ship(
        self, pair: ShippingPair, requests_max: int, cause: Cause
    ) -> worker_pb2.ShipRequestsResponse:
        """Move running requests, at most `requests_max`, 0: all; and record it as a decision.

        Raises:
            ShippingFailed: if the source refuses, or does not answer.
        """
        source, target = pair.source, pair.target
        ids = source.group_id, target.group_id
        logged = self._watch.note_move(source.model, ids, cause)
        logged.note(source.model, "under way")
        outcome = "its caller is gone; requests may still move"
        try:
            answer = await self._driver.ship(pair, requests_max, if_cheaper=cause is Cause.DRAINING)
            outcome = _outcome(answer)
        except ShippingFailed as error:
            outcome = str(error)
            raise
        finally:
            logged.note(source.model, outcome)
        self._watch.moved[cause] += answer.moved
        return answer

    async def run(self) -> None:
        """Move requests of workers that shut down, and as decided, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(INTERVAL_S)
                for logged in self._watch.take_moves():
                    tasks.create_task(self._execute(logged))
                for pair, requests in self._due(monotonic_s()) if self._drained else ():
                    worker_id = pair.source.members[0].worker_id
                    self._under_way.add(worker_id)
                    tasks.create_task(self._empty(worker_id, pair, requests))

    async def _execute(self, logged: LoggedDecision) -> None:
        """Execute a decision of the overload monitor to move requests."""
        decision, driver, moved = logged.decision, self._driver, 0
        if not driver.leads:
            # The pair is not to blame: a back-off would outlast the next election.
            self._watch.end_move(logged, None, "this memory manager does not lead")
            return
        logged.note(decision.model, "under way")
        outcome = "stopped"
        try:
            pair = self._pair(decision.group_ids)
            size = driver.facts[pair.source.members[0].worker_id].block_size
            async with timeout(MOVE_MAX_S):
                answer = await driver.ship(
                    pair, decision.requests_max, blocks_max=max(1, decision.needed_tokens // size)
                )
            moved, outcome = answer.moved, _outcome(answer)
        except (InvalidChange, ShippingFailed) as error:
            outcome = str(error)
        except TimeoutError:
            outcome = f"it has not ended within {MOVE_MAX_S:g} s"
        finally:
            log.info("%s: %s", decision.model, outcome)
            self._watch.end_move(logged, moved, outcome)

    def _pair(self, group_ids: tuple[str, ...]) -> ShippingPair:
        """The groups of a decision. Raises InvalidChange."""
        driver = self._driver
        stable = {group.group_id: group for group in driver.stable_groups}
        missing = [group_id for group_id in group_ids if group_id not in stable]
        if missing:
            raise InvalidChange(f"{missing[0]} serves no more")
        source_id, target_id = (stable[name].members[0].worker_id for name in group_ids)
        return pair_of(list(stable.values()), driver.facts, {}, source_id, target_id)

    def _due(self, now_s: float) -> list[tuple[ShippingPair, int]]:
        """The pairs for which an order is due, with the number of requests."""
        driver = self._driver
        leaving = [name for name, facts in driver.facts.items() if facts.draining]
        if not leaving or not driver.leads:
            return []
        self._retries = {name: at for name, at in self._retries.items() if name in leaving}
        reports = self._memory.fresh(now_s)
        due = []
        for worker_id in leaving:
            report = reports.get(worker_id)
            if report is None or not report.engine.load.running or worker_id in self._under_way:
                continue
            if now_s < self._retries.get(worker_id, (0.0, 0.0))[0]:
                continue
            try:
                groups = driver.stable_groups
                pair = pair_of(groups, driver.facts, reports, worker_id)
                # An even share for each worker that can take requests.
                targets = sum(1 for _ in targets_of(groups, driver.facts, worker_id))
                due.append((pair, -(-report.engine.load.running // targets)))
            except InvalidChange as error:
                log.info("requests of %s do not move with their KV: %s", worker_id, error)
                self._pause(worker_id)
        return due

    def _pause(self, worker_id: str) -> None:
        _, before_s = self._retries.get(worker_id, (0.0, 0.0))
        pause_s = min(max(RETRY_S, 2 * before_s), RETRY_MAX_S)
        self._retries[worker_id] = monotonic_s() + pause_s, pause_s

    async def _empty(self, worker_id: str, pair: ShippingPair, requests: int) -> None:
        moved = 0
        try:
            answer = await self.ship(pair, requests, Cause.DRAINING)
            moved = answer.moved
        except ShippingFailed as error:
            log.info("requests of %s do not move with their KV: %s", worker_id, error)
        finally:
            self._under_way.discard(worker_id)
            if moved:
                self._retries.pop(worker_id, None)
            else:
                self._pause(worker_id)


def _outcome(answer: worker_pb2.ShipRequestsResponse) -> str:
    """The result of an order, for people."""
    return f"{answer.moved} moved, {answer.kept} stay: {answer.reason}"
