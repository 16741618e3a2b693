"""Simulated workers behind one scheduler: how many prompt tokens are cached, by dispatch.

Every worker is a planner of core with its prefix cache; the device is an estimate that is shipped.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from services.common.device_profile import load_profile
from services.core.planner.config import IterationConfig
from services.core.scheduler.dispatch import PREFIX
from services.core.scheduler.state_config import StateConfig
from tideserve.sim.cluster import Cluster, ClusterSpec
from tideserve.sim.conversations import AGENTS, CHATS
from tideserve.sim.report import Outcome, percentile
from tideserve.sim.time_model import CostTimeModel
from tideserve.sim.workload import Arrival, OpenLoop

WORKERS = 8
CAPACITIES = (500_000, 1_000_000)
"""Tokens of KV of each worker."""
LEAST_LOADED = "least_loaded"
DEVICE = "A100-14B"
BLOCK_SIZE = 16
CHATS_PER_S, AGENTS_PER_S = 1.0, 0.8
"""Conversations that begin, for all workers."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a dispatch made of a load; times in seconds of the simulation."""

    load: str
    dispatch: str
    capacity_tokens: int
    hit_share: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    unfinished: int

    def figures(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def generated(duration_s: float, seed: int) -> dict[str, list[Arrival]]:
    """Conversations of people and of agents that begin within `duration_s`."""
    return {
        "chats": CHATS.arrivals(CHATS_PER_S, duration_s, Random(f"chats {seed}")),
        "agents": AGENTS.arrivals(AGENTS_PER_S, duration_s, Random(f"agents {seed}")),
    }


def serve(load: str, arrivals: Sequence[Arrival], dispatch: str, capacity_tokens: int) -> Served:
    """Simulate one dispatch."""
    model = load_profile(DEVICE).model
    spec = ClusterSpec(
        instances=WORKERS,
        iteration=IterationConfig(
            BLOCK_SIZE,
            capacity_tokens // BLOCK_SIZE,
            max_batch_tokens=2048,
            max_running=256,
            max_waiting=10_000,
            prefix_caching=True,
        ),
        max_model_len=capacity_tokens,
        scheduler=StateConfig(1_000_000, 1e6, dispatch, ttft=model if dispatch == PREFIX else None),
    )
    outcomes = Cluster(spec, CostTimeModel(model), OpenLoop(arrivals)).run()
    done = [one for one in outcomes.records if one.outcome is Outcome.COMPLETED]
    ttfts_s = [one.ttft_s for one in done]
    return Served(
        load,
        dispatch,
        capacity_tokens,
        outcomes.prefix_hits / max(1, outcomes.prefix_queries),
        percentile(ttfts_s, 0.5),
        percentile(ttfts_s, 0.99),
        len(outcomes.records) - len(done),
    )
