"""What a plan is made for, and the groups that it makes: stages, tokens of KV before and after."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from services.core.groups.layer_map import (
    MemberMemory,
    ModelShape,
    Stage,
    capacity_tokens,
    split_layers,
    stages_of,
)
from services.core.groups.vocabulary import Group
from services.core.overload.drop_plan import (
    DropPlan,
    Location,
    Merge,
    MergeKey,
    PlanGroup,
    PlanMember,
)


@dataclass(frozen=True, slots=True)
class Target:
    """A target group. Capacities in tokens: of its sources together, and of itself."""

    merge: Merge
    stages: tuple[Stage, ...]
    tokens_before: int
    tokens_after: int


_Layers = tuple[tuple[int, ...], int]
"""Layers of each stage, and the tokens of KV that the smallest holds."""


def plan_members(group: Group) -> tuple[PlanMember, ...]:
    """The members of a group with their layers."""
    return tuple(PlanMember(one.worker_id, one.first_layer, one.end_layer) for one in group.members)


def plan_group(
    group_id: str,
    key: MergeKey,
    members: tuple[PlanMember, ...],
    locations: Sequence[Location],
    used_bytes: Iterable[int],
) -> PlanGroup:
    """A group where all its members are; `used_bytes` of KV, of the whole model, at each stage."""
    return PlanGroup(group_id, key, members, shared_location(locations), max(used_bytes))


def shared_location(locations: Sequence[Location]) -> Location:
    """The parts that all locations share, from the widest on."""
    parts = takewhile(lambda part: len(set(part)) == 1, zip(*locations, strict=False))
    return tuple(part[0] for part in parts)


def targets_of(
    plan: DropPlan, shapes: Mapping[str, ModelShape], arena_bytes: Mapping[str, int]
) -> tuple[Target, ...]:
    """Divide the layers of each merged group; `arena_bytes`: of each worker.

    Each group shall gain its share of what the plan needs, and as much as it can if the plan is
    not sufficient.

    Raises:
        SplitError: if the parameters do not fit into the memory of the members.
    """
    # In a large cluster most groups and most merges are alike.
    divided: dict[tuple[str, tuple[int, ...], int], _Layers] = {}
    held: dict[tuple[str, tuple[tuple[int, ...], ...]], int] = {}

    def tokens_of(group: PlanGroup) -> int:
        model, members = group.key.model, group.members
        kind = model, tuple([(arena_bytes[one[0]], *one[1:]) for one in members])
        if kind not in held:
            held[kind] = group_tokens(shapes[model], members, arena_bytes)
        return held[kind]

    found = []
    for merge in plan.merges:
        shape = shapes[merge.key.model]
        before = sum(map(tokens_of, merge.groups))
        share_bytes = plan.needed_bytes * merge.freed_bytes // max(1, plan.freed_bytes)
        needed = before + -(-share_bytes // (shape.num_layers * shape.kv_bytes))
        rooms = [MemberMemory(one.worker_id, arena_bytes[one.worker_id]) for one in merge.members]
        kind = merge.key.model, tuple(room.arena_bytes for room in rooms), needed
        if kind not in divided:
            stages = split_layers(shape, rooms, needed)
            counts = tuple(stage.num_layers for stage in stages)
            divided[kind] = counts, min(capacity_tokens(shape, rooms, stages))
        counts, after = divided[kind]
        found.append(Target(merge, stages_of(rooms, counts), before, after))
    return tuple(found)


def group_tokens(
    shape: ModelShape, members: Sequence[PlanMember], arena_bytes: Mapping[str, int]
) -> int:
    """Tokens of KV that a group of these members holds now."""
    rooms = [MemberMemory(one.worker_id, arena_bytes[one.worker_id]) for one in members]
    return min(capacity_tokens(shape, rooms, [Stage(*one) for one in members]))
