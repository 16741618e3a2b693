"""Random events on real engines: both request classes, interruptions, shelves, deaths."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.core.cost.model import Coefficients, CostModel
from services.core.planner.batch import Microbatch
from services.core.planner.preemption import Preempt, PreemptedWork
from services.core.planner.victims import VictimRule
from services.core.queue_order import Scheduling
from services.core.request import Request
from services.core.service import DEFAULT_SERVICE, Service, ServiceClass
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.engine_networks import QueueNetwork
from tests.support.group_scenario import LAYERS, Scenario
from tests.support.undisturbed import Oracle

SERVICES = (
    DEFAULT_SERVICE,
    Service(ServiceClass.INTERACTIVE, ttft_s=0.5, tpot_s=0.1),
    Service(ServiceClass.INTERACTIVE, ttft_s=2.0, tpot_s=2.0),
    *(Service(ServiceClass.BATCH),) * 3,
)
SCHEDULINGS = (
    Scheduling.PRIORITY,
    *(Scheduling.SLO,) * 4,
    Scheduling.ROUND_ROBIN,
    Scheduling.BROS,
    Scheduling.WAITING_TIME,
)
MODEL = CostModel(
    alpha=1e-5, beta=1e-3, gamma=1e-2, lam=9e-3, decode=Coefficients(alpha=1e-5, beta=0, gamma=3e-2)
)
"""Step time of the cost model: five decodes exceed the inter-token target."""
ENGINES_MIN = 2
"""Workers die only while more than this many are alive."""


class ClassScenario(Scenario):
    """Requests that lose their worker are resumed after their last token.

    `seen` counts what has happened: "suspended", "resumed", "discarded", "yielded", "shared",
    "lost tails", "rested" and "killed".
    """

    WORKERS = (3,)

    def __init__(
        self,
        config: RunnerConfig,
        requests: list[Request],
        seed: int,
        scheduling: Scheduling | None = None,
        event_logs: Path | None = None,
        block_sharing: bool = False,
        **more: Any,
    ) -> None:
        """`scheduling`: random by default. `event_logs`: folder for a log of each engine.

        `more`: options of the `GROUP`.
        """
        self.seen: Counter[str] = Counter()
        self.seed = seed
        self._chances = chances = random.Random(seed)
        self._work = chances.choice(list(PreemptedWork))
        chosen = chances.choice(SCHEDULINGS)
        scheduling = scheduling or chosen
        planner = {
            "scheduling": scheduling,
            "block_sharing": block_sharing,
            "cost_model": chances.choice([None, MODEL]),
            "packing": chances.random() < 0.5,
            "adaptive_slots": chances.random() < 0.5,
            "victims": chances.choice(list(VictimRule)),
            "preempt": Preempt.ALWAYS,
            "preempted_work": self._work,
            "shelf_max_s": chances.choice([0.5, 3.0, 60.0]),
        }
        network = QueueNetwork()
        options = {
            "planner": planner,
            "interrupts": self._interrupts,
            "event_logs": event_logs,
            **more,
        }
        super().__init__(config, requests, seed, network, **options)
        self.group.gateway.asks_again = self.group.gateway.resumes = True

    def run(self, events: int) -> None:
        """Run random events, then let all requests end."""
        for _ in range(events):
            self._chances.choices(
                [self.arrive, self.abort, self._reorder, self.wait, self._kill, self._flood],
                [5, 1, 3, 3, 2, 1],
            )[0]()
            self.group.check_tables()
            self._look()
        self.group.finish()
        self.group.check_at_rest()
        self._look()

    def check_streams(self, oracle: Oracle) -> None:
        """Check that no request was refused, and that outputs equal those of an undisturbed run."""
        for stream in self.group.streams.values():
            assert not stream.refused, f"{self.seed}: {stream.refused}"
            oracle.check(stream)
            tokens = oracle.tokens(stream.request)
            assert stream.aborted or stream.tokens == tokens, self.seed

    def arrive(self) -> None:
        """Submit a request of a random class."""
        kept = self.requests
        service = self._chances.choice(SERVICES)
        self.requests = [replace(self._chances.choice(kept), service=service)]
        super().arrive()
        self.requests = kept

    def _flood(self) -> None:
        for _ in range(6):
            self.arrive()
        self.wait()

    def _reorder(self) -> None:
        if len(self.group.groups) > 1 or any(len(stages) > 1 for stages in self.group.groups):
            self.arrive()
            self.change()

    def _kill(self) -> None:
        """Kill a worker, possibly one with a shelf or a suspended iteration."""
        names = sorted(self.group.engines)
        if len(names) > ENGINES_MIN:
            members = {name: self.group.engines[name].member for name in names}
            special = [
                name
                for name, member in members.items()
                if member.changeover.parked_due_s or member.state.sequence_table.suspended
            ]
            self.group.lose(self._chances.choice(special or names))
            self.seen["killed"] += 1
            self.seen["killed, special"] += bool(special)
            self.group.restore()

    def _interrupts(self, microbatch: Microbatch) -> Callable[[], bool] | None:
        """An interrupt before a random layer, or none."""
        often = 0.6 if microbatch.preemptible else 0.1
        if self._chances.random() > often:
            return None
        layer = self._chances.randrange(LAYERS)
        asked = iter(range(LAYERS + 1))
        suspends = microbatch.preemptible and self._work is PreemptedWork.RESUME
        self.seen["suspended" if suspends else "discarded"] += 1
        return lambda: next(asked) == layer

    def _look(self) -> None:
        for engine in self.group.engines.values():
            state = engine.member.state
            self.seen["resumed"] += state.resumed_iterations_total
            self.seen["yielded"] += state.preemptions_total
            self.seen["shared"] += state.sequence_table.tails.shared_total
            self.seen["lost tails"] += state.sequence_table.tails.lost_tokens_total > 0
            self.seen["rested"] += engine.member.changeover.parked_due_s is not None
