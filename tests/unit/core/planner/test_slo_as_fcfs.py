"""Without classes and targets, `slo` plans the same microbatches as `fcfs`.

A single worker differs where a started prompt has overtaken a waiting request, which `slo` starts
before the rest of that prompt; so `overtaken_max` is 0 there.
"""

import random
from collections import deque
from dataclasses import replace

import pytest

from services.core.planner.batch import Microbatch
from services.core.planner.block_ledger import Follower
from services.core.planner.config import IterationConfig
from services.core.planner.configuration_events import StagesConfigured
from services.core.planner.events import Event, IterationFinished, RequestAborted, RequestArrived
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling
from tests.support.modelled_pipeline import A100

STEPS = 250


class Twins:
    """A planner with `slo` and one with `fcfs` that get the same events."""

    def __init__(self, rng: random.Random, stages: int) -> None:
        config = random_config(rng, overtaken_max=8 if stages > 1 else 0)
        self.rng, self.now_s, self.number = rng, 0.0, 0
        self.planners = [
            PlannerState(replace(config, scheduling=scheduling))
            for scheduling in (Scheduling.SLO, Scheduling.FCFS)
        ]
        if stages > 1:
            self.handle(StagesConfigured((Follower(config.num_blocks),) * (stages - 1)))
        self.in_flight: deque[Microbatch] = deque()

    def handle(self, event: Event) -> None:
        by_deadline, by_arrival = [planner.handle(event) for planner in self.planners]
        assert by_deadline == by_arrival

    def arrive(self) -> None:
        """A request arrives, as long before at the gateway as all others."""
        rng, self.number = self.rng, self.number + 1
        prompt = tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 40)))
        request = Request(
            *(f"r{self.number}", prompt, Sampling(), Limits(rng.randint(1, 40)), self.now_s),
            waited_s=0.25,
        )
        self.handle(RequestArrived(self.now_s, request))

    def abort(self) -> None:
        if names := list(self.planners[0].sequences):
            self.handle(RequestAborted(self.now_s, self.rng.choice(names)))

    def plan(self) -> bool:
        """Plan the next microbatch; returns whether there is any."""
        if not self.planners[0].has_slot:
            return False
        by_deadline, by_arrival = [planner.plan(self.now_s) for planner in self.planners]
        assert by_deadline == by_arrival
        if by_deadline is None:
            return False
        self.in_flight.append(by_deadline)
        return True

    def finish(self) -> None:
        microbatch = self.in_flight.popleft()
        chunks = microbatch.batch.chunks
        sampled = {chunk.seq_id: self.rng.randint(0, 1) for chunk in chunks if chunk.sample}
        self.handle(IterationFinished(self.now_s, sampled, microbatch.number))

    def check(self) -> None:
        for planner in self.planners:
            planner.check_invariants()


def random_config(rng: random.Random, overtaken_max: int) -> IterationConfig:
    max_running = rng.choice([1, 3, 8])
    return IterationConfig(
        block_size=rng.choice([4, 16]),
        num_blocks=rng.choice([24, 40, 100]),
        max_batch_tokens=max_running + rng.choice([4, 20, 60]),
        max_running=max_running,
        max_waiting=1000,
        prefix_caching=rng.random() < 0.5,
        cost_model=rng.choice([None, A100]),
        overtaken_max=overtaken_max,
    )


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("seed", range(15))
def test_the_microbatches_are_equal(seed: int, stages: int) -> None:
    rng = random.Random(seed)
    twins = Twins(rng, stages)
    for _ in range(STEPS):
        twins.now_s += rng.choice([0.001, 0.03, 1.0])
        match rng.choice(["arrive", "plan", "plan", "plan", "finish", "finish", "finish", "abort"]):
            case "arrive":
                twins.arrive()
            case "abort" if rng.random() < 0.2:
                twins.abort()
            case "plan":
                twins.plan()
            case "finish" if twins.in_flight:
                twins.finish()
        twins.check()
    while twins.planners[0].sequences:
        twins.now_s += 0.03
        assert twins.plan() or twins.in_flight, "the requests advance"
        twins.finish()
        twins.check()
