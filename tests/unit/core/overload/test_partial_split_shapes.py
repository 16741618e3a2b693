"""Groups of random shapes split partially, for any layers and memory."""

from collections.abc import Sequence
from dataclasses import astuple
from itertools import pairwise
from random import Random

from services.core.groups.layer_map import MemberMemory, ModelShape, Stage, split_layers
from services.core.groups.vocabulary import Group
from services.core.overload.drop_plan import Merge, MergeKey, PlanGroup, PlanMember
from services.core.overload.events import GroupsSeen
from services.core.overload.group_use import group_uses
from services.core.overload.monitor import OverloadMonitor
from services.core.overload.partial_split import (
    _partial_splits,
    partial_splits_of,
    partial_targets,
)
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import EngineReport, Load
from tests.unit.core.overload.test_partial_split import ARENA, facts_of, group_of, pipeline

SHAPES = 1000


def test_the_partial_splits_of_a_large_cluster_are_computed_once() -> None:
    count = 10_000 // 3
    groups = []
    for number in range(count):
        facts = facts_of([ARENA + number] * 3)
        groups.append((pipeline(3), facts))
    for _ in range(2):
        before = _partial_splits.cache_info().misses
        for group, facts in groups:
            partial_splits_of(group, facts)
    assert _partial_splits.cache_info().misses == before


def random_shape(rng: Random) -> ModelShape:
    layer_bytes = rng.randint(1000, 100_000) * 4096
    embedding, tied = int(layer_bytes * rng.uniform(0, 6)), rng.random() < 0.5
    return ModelShape(
        rng.randint(4, 80),
        layer_bytes,
        embedding,
        4096 + (0 if tied else embedding),
        tied,
        rng.randint(1, 64) * 512,
        embedding_cost=rng.uniform(0, 1),
        head_cost=rng.uniform(0, 2),
    )


def merged_by_chance(rng: Random, shape: ModelShape, arenas: dict[str, int]) -> list[Stage]:
    """Stages after random merges of two or more groups, ordered as a drop plan does."""
    groups = [[PlanMember(name, 0, shape.num_layers)] for name in arenas]
    while len(groups) > 1:
        rng.shuffle(groups)
        count = rng.randint(2, len(groups))
        chosen = [PlanGroup("g", MergeKey("m"), tuple(members)) for members in groups[:count]]
        members = Merge(tuple(chosen), 0).members
        memories = [MemberMemory(m.worker_id, arenas[m.worker_id]) for m in members]
        stages = split_layers(shape, memories, rng.choice([0, 10**4, 10**9]))
        groups = [*groups[count:], [PlanMember(*astuple(stage)) for stage in stages]]
    return [Stage(*member) for member in groups[0]]


def test_all_groups_of_four_or_more_split_partially_and_most_of_three() -> None:
    """Unequal memory, tied embeddings, odd sizes, repeated and uneven merges."""
    rng, whole = Random(46), 0
    for number in range(SHAPES):
        shape, equal = random_shape(rng), number % 3 == 0
        workers = rng.randint(3, min(8, shape.num_layers))
        scale = [rng.uniform(1.05, 4) for _ in range(workers)]
        arenas = [int(shape.parameter_bytes(1) * scale[0 if equal else n]) for n in range(workers)]
        facts = facts_of(arenas, shape)
        present = merged_by_chance(rng, shape, dict(zip(facts, arenas, strict=True)))
        group = group_of(present)
        splits, reason = partial_splits_of(group, facts)
        limits = [min(worker.kv_blocks_total for worker in facts.values())]
        limits += [split.limit_tokens for split in splits]
        assert limits == sorted(set(limits)), "each has more room than the next finer split"
        for split in splits:
            for first, target in enumerate(partial_targets(group, facts, split.parts)):
                check_stages(shape, target, present[first :: split.parts])
        if not splits:
            whole += 1
            alone = present[1].worker_id
            assert workers == 3 and facts[alone].kv_blocks_total == limits[0]
            assert reason in obstacle_of(group, facts)
    assert whole <= 0.2 * SHAPES, f"{whole} stay whole"


def obstacle_of(group: Group, facts: dict[str, WorkerFacts]) -> str:
    """The status text for a group whose KV in use does not fit single workers."""
    used = 1 + min(worker.kv_blocks_total for worker in facts.values())
    report = EngineReport(Load(1, 0, 0, 0, kv_blocks_total=used), group.epoch)
    monitor = OverloadMonitor()
    monitor.handle(GroupsSeen(0.0, group_uses([group], dict.fromkeys(facts, report), facts)))
    return monitor.split_obstacles(0.0, {})[group.group_id]


def check_stages(shape: ModelShape, stages: Sequence[Stage], present: Sequence[Stage]) -> None:
    """They have all layers in order, and each stage includes its previous ones."""
    assert (stages[0].first_layer, stages[-1].end_layer) == (0, shape.num_layers)
    for left, right in pairwise(stages):
        assert left.end_layer == right.first_layer
    for stage, before in zip(stages, present, strict=True):
        assert stage.first_layer <= before.first_layer < before.end_layer <= stage.end_layer
