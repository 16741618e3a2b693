"""Each rule of partial splits is needed: without it, a check of random clusters fails."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from services.core.groups.layer_map import MemberMemory, ModelShape, SplitError, Stage, split_layers
from services.core.overload import monitor, partial_split
from services.core.overload.events import Action, Cause, GroupUse, PartialSplit
from services.core.overload.partial_split import partial_splits_of, partial_targets
from services.core.overload.split_choice import SplitChoice, choose_splits
from tests.unit.core.overload.test_partial_split import UNMERGED, Cluster, facts_of, group_of
from tests.unit.core.overload.test_partial_split_shapes import (
    check_stages,
    merged_by_chance,
    random_shape,
)

SEEDS = range(8)


def kv_in_use_fits() -> None:
    """`Cluster` checks that each member of the new groups has room for the group's KV."""
    for seed in SEEDS:
        rng = Random(seed)
        cluster = Cluster(8)
        # Two groups of four would be due at all of these loads, four of two only at the lowest.
        cluster.used = round(UNMERGED * rng.uniform(2.9, 4.0))
        cluster.run(8.0)
        assert max(cluster.sizes) < 8


def members_keep_their_layers() -> None:
    """Stages after a partial split contain those before it; groups of equal members split."""
    for seed in SEEDS:
        rng = Random(seed)
        shape, workers = random_shape(rng), rng.randint(4, 8)
        shape = replace(shape, num_layers=max(workers, shape.num_layers))
        arena = int(shape.parameter_bytes(1) * rng.uniform(1.05, 4))
        present = merged_by_chance(rng, shape, {f"w{n}": arena for n in range(workers)})
        group, facts = group_of(present), facts_of([arena] * workers, shape)
        splits, reason = partial_splits_of(group, facts)
        assert splits, reason
        before = {stage.worker_id: stage for stage in present}
        for split in splits:
            for target in partial_targets(group, facts, split.parts):
                check_stages(shape, target, [before[stage.worker_id] for stage in target])


def a_leaving_member_leaves() -> None:
    """Its group splits into single workers, whatever the load."""
    for seed in SEEDS:
        rng = Random(seed)
        cluster = Cluster(4)
        leaving = rng.choice(list(cluster.facts))
        cluster.facts[leaving] = replace(cluster.facts[leaving], draining=True)
        cluster.used, cluster.executes = round(UNMERGED * rng.uniform(1.1, 2.5)), False
        for decision in cluster.run(20.0):
            assert (decision.action, decision.reason.cause) == (Action.SPLIT, Cause.DRAINING)
            assert decision.parts == ()


def requests_wait_for_no_split() -> None:
    """A split that leaves no room for waiting requests is cancelled, at any load."""
    for seed in SEEDS:
        rng = Random(seed)
        cluster = Cluster(8)
        cluster.used, cluster.executes = round(UNMERGED * rng.uniform(2.1, 2.9)), False
        (split,) = cluster.run(8.0)
        assert split.parts == (4,)
        cluster.limits = {"group-w0": 3 * UNMERGED}
        cluster.stuck = {"group-w0": round(UNMERGED * rng.uniform(1.0, 4.0))}
        assert Action.CALL_OFF in {decision.action for decision in cluster.run(2.0)}


def _ignore_full_splits_at_low_demand(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(monitor.OverloadMonitor, "_crowded", lambda *_: frozenset())


def _ignore_kv_in_use(patch: pytest.MonkeyPatch) -> None:
    def first(self: GroupUse) -> PartialSplit | None:
        return next(iter(self.partial_splits), None)

    patch.setattr(GroupUse, "partial_split", property(first))


def _divide_as_fast_as_possible(patch: pytest.MonkeyPatch) -> None:
    def fastest(
        shape: ModelShape, memories: Sequence[MemberMemory], present: Sequence[Stage]
    ) -> tuple[Stage, ...]:
        return split_layers(shape, memories, 0)

    patch.setattr(partial_split, "grow_stages", fastest)


def _keep_neighbours_together(patch: pytest.MonkeyPatch) -> None:
    def neighbours(shape: ModelShape, members: Sequence[object], parts: int) -> list[object]:
        ends = [len(members) * number // parts for number in range(parts + 1)]
        return [
            partial_split._part(shape, members[ends[number] : ends[number + 1]])  # type: ignore[arg-type]
            for number in range(parts)
        ]

    patch.setattr(partial_split, "_divide", neighbours)


def _split_groups_with_leaving_members(patch: pytest.MonkeyPatch) -> None:
    def choose(groups: Sequence[GroupUse], *options: object) -> SplitChoice:
        staying = [replace(group, draining=False) for group in groups]
        return choose_splits(staying, *options)  # type: ignore[arg-type]

    patch.setattr(monitor, "choose_splits", choose)


RULES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = {
    "a group splits into parts that its KV in use fits": (_ignore_kv_in_use, kv_in_use_fits),
    "a part keeps the layers of its members": (
        _divide_as_fast_as_possible,
        members_keep_their_layers,
    ),
    "parts interleave": (_keep_neighbours_together, members_keep_their_layers),
    "a split without room for its requests is called off": (
        _ignore_full_splits_at_low_demand,
        requests_wait_for_no_split,
    ),
    "a group with a leaving member does not split partially": (
        _split_groups_with_leaving_members,
        a_leaving_member_leaves,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, check = RULES[rule]
    partial_split._partial_splits.cache_clear()
    check()
    partial_split._partial_splits.cache_clear()
    remove(monkeypatch)
    try:
        with pytest.raises((AssertionError, SplitError, ValueError)):
            check()
    finally:
        partial_split._partial_splits.cache_clear()
