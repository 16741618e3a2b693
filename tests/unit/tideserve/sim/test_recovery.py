"""Simulated workers that a burst merges, with steady streams after it: when do groups split?

The streams keep a part of the unmerged KV in use; see `tideserve bench recovery`.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from services.core.cost.model import CostModel
from services.core.groups.layer_map import ModelShape
from services.core.overload.events import OverloadConfig
from services.core.planner.config import IterationConfig
from tideserve.sim.change_spec import ChangeSpec
from tideserve.sim.cluster import Cluster, ClusterSpec
from tideserve.sim.report import Outcome
from tideserve.sim.time_model import CostTimeModel
from tideserve.sim.workload import Arrival, ClosedLoop, CoServed, OpenLoop, UniformLength

DEVICE = CostTimeModel(CostModel(alpha=1e-8, beta=1e-4, gamma=0.02, lam=0.0195))
BLOCK_SIZE, BLOCKS = 16, 200
# Parameters take 55 % of the memory; eight workers can form a single group.
SHAPE = ModelShape(
    num_layers=8,
    layer_bytes=1_560_000,
    embedding_bytes=0,
    head_bytes=0,
    tied_embeddings=False,
    kv_bytes=400,
)
CHANGE = ChangeSpec(
    SHAPE,
    arena_bytes=SHAPE.parameter_bytes(1) + BLOCKS * BLOCK_SIZE * SHAPE.num_layers * 400,
    hidden_bytes=1000,
)
ITERATION = IterationConfig(
    block_size=BLOCK_SIZE,
    num_blocks=BLOCKS,
    max_batch_tokens=512,
    max_running=128,
    max_waiting=1000,
)
PROMPT, OUTPUT = UniformLength(96, 160), UniformLength(200, 300)
BURST_PROMPT, BURST_OUTPUT = UniformLength(300, 400), UniformLength(60, 100)
BURST_S, END_S = 5.0, 50.0
BURST_SHARE = 2.2
BOUND_S = 5.0 + 15.0
"""The dwell time, and a margin."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """Sizes of the groups over time."""

    sizes: Sequence[tuple[float, tuple[int, ...]]]
    burst_end_s: float

    @property
    def largest(self) -> int:
        """Members of the largest group ever."""
        return max(max(sizes) for _, sizes in self.sizes)

    def after_s(self, members_max: int) -> float | None:
        """Time from the end of the burst until no group has more members; None if never."""
        times = (t for t, s in self.sizes if t >= self.burst_end_s and max(s) <= members_max)
        first_s = next(times, None)
        return None if first_s is None else first_s - self.burst_end_s


def recovered(workers: int, share: float, seed: int, partial_splits: bool = True) -> Recovered:
    """Simulate `workers` whose streams keep `share` of the unmerged KV in use."""
    rng = random.Random(seed)
    unmerged = workers * BLOCKS * BLOCK_SIZE
    clients = round(share * unmerged / (128 + 125 + BLOCK_SIZE / 2))
    in_burst = round(BURST_SHARE * unmerged / 430)
    burst = [
        Arrival(BURST_S + rng.uniform(0, 1.0), BURST_PROMPT.draw(rng), BURST_OUTPUT.draw(rng))
        for _ in range(in_burst)
    ]
    last = Arrival(END_S, 16, 1)
    steady = (
        # Staggered ends of the first requests keep the KV in use even.
        Arrival(0.0, PROMPT.draw(rng), max(2, OUTPUT.draw(rng) * min(n + 1, clients) // clients))
        for n in itertools.count()
    )
    load = CoServed(OpenLoop([*sorted(burst), last]), ClosedLoop(steady, clients))
    change = replace(CHANGE, monitor=OverloadConfig(partial_splits=partial_splits))
    cluster = Cluster(ClusterSpec(workers, ITERATION, 8192, change=change), DEVICE, load)
    sizes: list[tuple[float, tuple[int, ...]]] = []
    for_checks: Iterator[int] = itertools.count()

    def progress(now_s: float) -> None:
        assert cluster.coordinator is not None
        groups = cluster.coordinator.stable_groups
        sizes.append((now_s, tuple(sorted(len(group.members) for group in groups))))

    def check() -> None:
        if next(for_checks) % 512 == 0:
            cluster.check_invariants()

    outcomes = cluster.run(progress, check)
    online = [r for r in outcomes.records if r.prompt_tokens in range(300, 401)]
    assert {record.outcome for record in online} == {Outcome.COMPLETED}
    return Recovered(sizes, max(record.end_s for record in online))


@pytest.mark.parametrize(("workers", "share", "seed"), [(4, 0.4, 0), (4, 0.48, 1), (8, 0.45, 2)])
def test_groups_split_in_time_under_load(workers: int, share: float, seed: int) -> None:
    seen = recovered(workers, share, seed)
    assert seen.largest == workers, "the burst merged all"
    split_s = seen.after_s(workers // 2)
    assert split_s is not None and split_s <= BOUND_S


def test_without_partial_splits_the_group_stays_whole() -> None:
    seen = recovered(4, 0.45, 3, partial_splits=False)
    assert seen.largest == 4
    assert seen.after_s(3) is None
