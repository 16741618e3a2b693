"""Stages of merged groups, and their gain."""

from services.core.groups.layer_map import MemberMemory, ModelShape, capacity_tokens, split_layers
from services.core.overload.drop_plan import MergeKey, PlanGroup, PlanMember, plan_drop
from services.core.overload.target import targets_of

SHAPE = ModelShape(10, 100, 50, 20, False, 1)
KEY = MergeKey("m")


def test_each_merge_gets_its_share_and_matches_the_split() -> None:
    groups = [
        PlanGroup(f"g{number}", KEY, (PlanMember(f"w{number}", 0, 10),)) for number in range(6)
    ]
    arenas = {f"w{number}": 2000 + 500 * (number % 2) for number in range(6)}
    plan = plan_drop(groups, {"m": SHAPE}, 2000)
    targets = targets_of(plan, {"m": SHAPE}, arenas)
    assert len(targets) == len(plan.merges) == 2
    for target, merge in zip(targets, plan.merges, strict=True):
        rooms = [
            MemberMemory(member.worker_id, arenas[member.worker_id]) for member in merge.members
        ]
        before = (2000 - 1070) // 10 + (2500 - 1070) // 10
        assert target.tokens_before == before
        assert target.stages == split_layers(SHAPE, rooms, before + 100)
        assert target.tokens_after == min(capacity_tokens(SHAPE, rooms, target.stages))
        assert target.tokens_after > before


def test_a_plan_without_merges_has_no_targets() -> None:
    assert targets_of(plan_drop([], {}, 1), {}, {}) == ()
