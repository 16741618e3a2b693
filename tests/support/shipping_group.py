"""Engines in one process that ship running requests to each other."""

from functools import partial
from typing import Any

from services.core.destination import Destination
from services.core.report import ShipmentCounts
from services.worker.ipc import Lane as LanePlan
from services.worker.ipc import MemberPlan, Shipped, ShipRequests
from tests.support.engine_group import EngineGroup
from tests.support.engines import Engine

INTRODUCED_S = 600.0


class ShippingGroup(EngineGroup):
    """Single-worker groups with prefix caching and a gateway that resumes requests."""

    ships = True

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, prefix_caching=True, **options)
        self.gateway.asks_again = self.gateway.resumes = True
        self._orders = 0

    def introduce(self, first: str, other: str) -> None:
        """Connect two workers, as the memory manager does."""
        self._orders += 1
        plans = [self._introduced(name) for name in (first, other)]
        for name in (first, other):
            self.engines[name].member.introduce(plans, INTRODUCED_S)

    def ship(self, source: str, target: str, requests_max: int = 0) -> str:
        """Move requests; returns the order."""
        self._orders += 1
        order = f"order-{self._orders}"
        place = Destination(target, f"address of {target}", f"group-{target}", self.epoch)
        self.engines[source].member.ship(ShipRequests(order, place, requests_max))
        return order

    def move(self, source: str, target: str, requests_max: int = 0) -> Shipped:
        """Introduce and ship, and wait for the end of the order."""
        self.introduce(source, target)
        order = self.ship(source, target, requests_max)
        self.run_until(lambda: order in self.shipped)
        return self.shipped[order]

    def carry(self, turns: int) -> None:
        """Deliver frames and parts, which engines answer, without running iterations."""
        for _ in range(turns):
            self.now_s = self.network.now_s()
            actions = [*self.network.deliveries()]
            actions += [partial(self._answer, engine) for engine in self.engines.values()]
            actions += [partial(self._step_mover, engine) for engine in self.engines.values()]
            self.rng.choice(actions)()

    def _answer(self, engine: Engine) -> None:
        engine.member.take()
        self._hear(engine)

    def counts(self, worker_id: str) -> ShipmentCounts:
        return self.engines[worker_id].member.shipments

    def finish(self) -> None:
        super().finish()
        self.run_until(lambda: not any(e.member.shipping for e in self.engines.values()))

    def _introduced(self, worker_id: str) -> MemberPlan:
        engine = self.engines[worker_id]
        nonce = f"what {worker_id} expects in introduction {self._orders}"
        return MemberPlan(
            worker_id,
            engine.identity.incarnation,
            0,
            self.num_layers,
            LanePlan(engine.member.links.lane.address, nonce),
            LanePlan(engine.bulk.address, nonce),
            f"address of {worker_id}",
        )
