"""Simulated groups that merge in a flood and split after it: nobody's request is lost."""

import itertools
import random

import pytest

from services.core.cost.model import CostModel
from services.core.groups.layer_map import ModelShape
from services.core.planner.config import IterationConfig
from tideserve.sim.change_spec import ChangeSpec
from tideserve.sim.cluster import Cluster, ClusterSpec
from tideserve.sim.report import Outcome, figures
from tideserve.sim.time_model import CostTimeModel
from tideserve.sim.workload import Length, OpenLoop, gamma_times, with_lengths

DEVICE = CostTimeModel(CostModel(alpha=1e-8, beta=1e-4, gamma=0.02, lam=0.0195))
BLOCKS = 150
# Parameters take 60 % of the memory, as in KunServe Table 1.
SHAPE = ModelShape(
    num_layers=4,
    layer_bytes=1_440_000,
    embedding_bytes=0,
    head_bytes=0,
    tied_embeddings=False,
    kv_bytes=400,
)
CHANGE = ChangeSpec(
    SHAPE, arena_bytes=SHAPE.parameter_bytes(1) + BLOCKS * 16 * 4 * 400, hidden_bytes=1000
)
FLOOD_S, TRICKLE_S = 12.0, 25.0


def flood_and_trickle(seed: int, instances: int) -> OpenLoop:
    rng = random.Random(seed)
    flood = list(gamma_times(4.5 * instances, 1.0, FLOOD_S, rng))
    trickle = [FLOOD_S + time_s for time_s in gamma_times(0.5, 1.0, TRICKLE_S, rng)]
    lengths = (Length(120, 0.5, most=400), Length(120, 0.5, most=400))
    return OpenLoop(list(with_lengths(flood + trickle, *lengths, rng)))


@pytest.mark.parametrize(("seed", "instances"), [(0, 2), (1, 2), (2, 3), (3, 4)])
def test_groups_merge_in_a_flood_and_split_after_it(seed: int, instances: int) -> None:
    iteration = IterationConfig(
        block_size=16, num_blocks=BLOCKS, max_batch_tokens=512, max_running=64, max_waiting=1000
    )
    spec = ClusterSpec(instances, iteration, 8192, change=CHANGE)
    workload = flood_and_trickle(seed, instances)
    cluster = Cluster(spec, DEVICE, workload)
    events = itertools.count()

    def check() -> None:
        if next(events) % 8 == 0:  # after each, it takes longer than all the rest
            cluster.check_invariants()

    outcomes = cluster.run(check=check)
    assert {record.outcome for record in outcomes.records} == {Outcome.COMPLETED}
    assert len(outcomes.records) == len(workload.arrivals)
    changes = figures(outcomes)["changes"]
    assert changes["merges"] >= 1 and changes["splits"] >= 1
    for instance in cluster.instances.values():
        assert instance.state.stages == 1
        assert not instance.state.sequences
        assert instance.state.pool.free_count == instance.state.pool.usable == BLOCKS
