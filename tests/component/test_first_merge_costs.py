"""A cluster without any profile: its first merge forms microbatches by cost."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.event_log import LogEntry, read_config, read_entries
from services.core.audit.record import BATCH, EVENT
from services.core.changeover.state import Changeover, MemberConfig
from services.core.planner.config import MICROBATCH_TOKENS, BatchFormation
from services.core.planner.events import CostModelLearned
from tests.support.client import gather_bounded, numbered_completion
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model
from tideserve.cli.groups import drop
from tideserve.sim.replay import WORKER_TYPES, replay

REQUESTS = 64


async def flood(cluster: Cluster) -> None:
    """Send prompts of many lengths, several of which wait at any time."""

    def job(number: int) -> Callable[[], Any]:
        prompt = 40 + 37 * number % 500
        return lambda: numbered_completion(cluster.url, number, prompt_tokens=prompt, max_tokens=40)

    await gather_bounded([job(number) for number in range(REQUESTS)], REQUESTS)


def merged_prefills(config: MemberConfig, entries: list[LogEntry]) -> list[bool]:
    """For each microbatch with a prompt chunk of a merged group, whether it had a cost model."""
    state = Changeover.of(config)
    planned = []
    for entry in entries:
        if entry.kind == EVENT:
            state.handle(entry.value)
        elif entry.kind == BATCH:
            microbatch = state.plan(entry.value.now_s)
            if state.planner.stages > 1 and microbatch is not None:
                prompts = any(len(chunk.token_ids) > 1 for chunk in microbatch.batch.chunks)
                planned += [state.planner.config.cost_model is not None] if prompts else []
    return planned


@pytest.mark.cluster
def test_the_first_merge_without_a_profile_forms_batches_by_cost(tmp_path: Path) -> None:
    """A first start with default planner options: the log replays, but not with token counts."""
    logs = tmp_path / "logs"
    with Cluster(
        model_dir=make_tiny_model(tmp_path / "model", seed=3, layers=4),
        memory="14MiB",
        chunk_size="64KiB",
        environment={"TIDESERVE_CACHE": str(tmp_path / "cache")},
        services={"event_log": str(logs)},
        scheduler={"lateness": 0.0},  # no queueing deadline
    ) as cluster:
        cluster.eventually(
            lambda: [row["cost_model"] for row in cluster.workers()] == ["start"] * 2
        )
        # Not a burst, as its overflow of the KV cache would depend on the machine's speed.
        drop(cluster.admin_url, None, [])
        asyncio.run(flood(cluster))
        assert "measured a rough cost model" in cluster.log("worker-0")
    by_cost, differs = [], []
    for path in sorted(logs.glob("worker-*")):
        config = read_config(path, MemberConfig)
        assert config.planner.batch_formation is BatchFormation.LOOKAHEAD
        entries = list(read_entries(path, WORKER_TYPES))
        assert replay(Changeover.of(config), entries).difference == ""
        by_cost += merged_prefills(config, entries)
        counted = replace(
            config,
            planner=replace(
                config.planner, cost_model=None, min_microbatch_tokens=MICROBATCH_TOKENS
            ),
        )
        unlearned = [e for e in entries if not isinstance(e.value, CostModelLearned)]
        differs.append(replay(Changeover.of(counted), unlearned).difference)
    assert by_cost and all(by_cost), "a microbatch of the merged group was formed by token counts"
    assert any(differs), "token counts would have formed the same microbatches"
