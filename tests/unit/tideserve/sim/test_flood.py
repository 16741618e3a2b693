"""What the policies make of a flood: the load and the cluster of `bench burst --paced --workers 4`.

A simulation repeats exactly, so a policy that lets requests wait for longer fails here.
"""

import pytest

from benchmarks.against import BUSY_HOST, ONE_HOST
from benchmarks.scenarios import burst
from benchmarks.scenarios.scenario import LoadChoice
from services.common.device_profile import load_profile
from services.core.groups.layer_map import ModelShape
from services.core.planner.config import IterationConfig
from services.core.scheduler.state_config import StateConfig
from tideserve.sim.change_spec import ChangeSpec
from tideserve.sim.cluster import Cluster, ClusterSpec
from tideserve.sim.report import Outcomes
from tideserve.sim.time_model import CostTimeModel
from tideserve.sim.workload import Arrival, OpenLoop

PROFILE = load_profile("A100-14B:2")
WORKERS, BLOCK_TOKENS, BLOCKS, KV_BYTES = 4, 16, 80, 256
# As the model of the paced benchmark: two layers, each as large as 0.6 of a worker's KV.
SHAPE = ModelShape(2, 3072 * KV_BYTES, 0, 0, False, KV_BYTES)
CHANGE = ChangeSpec(
    SHAPE, SHAPE.parameter_bytes(1) + BLOCKS * BLOCK_TOKENS * 2 * KV_BYTES, 512, link=ONE_HOST
)


def flood(rate_per_s: float) -> OpenLoop:
    choice = LoadChoice(
        quick=True, rate_per_s=rate_per_s, paced=True, slowdown=2.0, workers=WORKERS
    )
    (case,) = burst.cases(choice)
    requests = case.workload(0).requests
    return OpenLoop([Arrival(r.arrival_s, len(r.prompt_ids), r.output_tokens) for r in requests])


def simulated(rate_per_s: float, change: ChangeSpec | None) -> Outcomes:
    spec = ClusterSpec(
        WORKERS,
        IterationConfig(BLOCK_TOKENS, BLOCKS, 256, 64, 4096, cost_model=PROFILE.model),
        BLOCKS * BLOCK_TOKENS,
        StateConfig(queue_deadline_s=3600, lateness=0.0),
        delays=BUSY_HOST,
        fast_forward=False,
        change=change,
    )
    return Cluster(spec, CostTimeModel(PROFILE.model), flood(rate_per_s)).run()


def waits_s(outcomes: Outcomes) -> list[float]:
    return sorted(record.first_s - record.sent_s for record in outcomes.records)


@pytest.mark.parametrize("rate_per_s", [2.3, 2.6, 3.0])
def test_merging_bounds_every_wait(rate_per_s: float) -> None:
    outcomes = simulated(rate_per_s, CHANGE)
    assert len(outcomes.records) == 79
    assert waits_s(outcomes)[-1] <= 1.2
    assert outcomes.preemptions <= 24


def test_waits_grow_without_merging() -> None:
    waits = waits_s(simulated(2.6, None))
    assert waits[len(waits) // 2] > 1.2 and waits[-1] > 5
