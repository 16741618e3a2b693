"""Converts groups to inputs of a drop plan, and the plan's merges to target groups.

A *drop plan* selects groups to merge. A target group has a *layer map*, the layers of each member
(stage), and a KV capacity in tokens, which its smallest stage limits.
"""

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
    """The group that results from a merge."""

    merge: Merge
    stages: tuple[Stage, ...]
    tokens_before: int  # total KV capacity of the groups that merge
    tokens_after: int  # KV capacity of this group


_Layers = tuple[tuple[int, ...], int]
"""Number of layers of each stage, and the KV capacity of the group in tokens."""


def plan_members(group: Group) -> tuple[PlanMember, ...]:
    """The members of a group, as drop plans describe them."""
    return tuple(PlanMember(m.worker_id, m.first_layer, m.end_layer) for m in group.members)


def plan_group(
    group_id: str,
    key: MergeKey,
    members: tuple[PlanMember, ...],
    locations: Sequence[Location],
    used_bytes: Iterable[int],
) -> PlanGroup:
    """A group that may merge; `used_bytes`: KV in use at each stage, scaled to all layers."""
    return PlanGroup(group_id, key, members, shared_location(locations), max(used_bytes))


def shared_location(locations: Sequence[Location]) -> Location:
    """The common prefix of all locations, widest part first."""
    parts = takewhile(lambda part: len(set(part)) == 1, zip(*locations, strict=False))
    return tuple(part[0] for part in parts)


def targets_of(
    plan: DropPlan, shapes: Mapping[str, ModelShape], arena_bytes: Mapping[str, int]
) -> tuple[Target, ...]:
    """Compute the layer map of each merged group; `arena_bytes` is by worker.

    Each merge aims at its share of the needed bytes. In an insufficient plan this is more than the
    merge can gain, so that it gains as much as possible.

    Raises:
        SplitError: if the parameters do not fit into the memory of the members.
    """
    # Memoize, because most groups and merges of a large cluster have equal shapes.
    layers_cache: dict[tuple[str, tuple[int, ...], int], _Layers] = {}
    tokens_cache: dict[tuple[str, tuple[tuple[int, ...], ...]], int] = {}

    def tokens_of(group: PlanGroup) -> int:
        model, members = group.key.model, group.members
        kind = model, tuple([(arena_bytes[member[0]], *member[1:]) for member in members])
        if kind not in tokens_cache:
            tokens_cache[kind] = group_tokens(shapes[model], members, arena_bytes)
        return tokens_cache[kind]

    targets = []
    for merge in plan.merges:
        shape = shapes[merge.key.model]
        before = sum(map(tokens_of, merge.groups))
        # This merge's share of the need, in proportion to the bytes that it frees; rounded up.
        share_bytes = plan.needed_bytes * merge.freed_bytes // max(1, plan.freed_bytes)
        needed = before + -(-share_bytes // (shape.num_layers * shape.kv_bytes))
        members = [MemberMemory(m.worker_id, arena_bytes[m.worker_id]) for m in merge.members]
        kind = merge.key.model, tuple(member.arena_bytes for member in members), needed
        if kind not in layers_cache:
            stages = split_layers(shape, members, needed)
            counts = tuple(stage.num_layers for stage in stages)
            layers_cache[kind] = counts, min(capacity_tokens(shape, members, stages))
        counts, after = layers_cache[kind]
        targets.append(Target(merge, stages_of(members, counts), before, after))
    return tuple(targets)


def group_tokens(
    shape: ModelShape, members: Sequence[PlanMember], arena_bytes: Mapping[str, int]
) -> int:
    """Current KV capacity in tokens of a group of these members."""
    memories = [MemberMemory(m.worker_id, arena_bytes[m.worker_id]) for m in members]
    return min(capacity_tokens(shape, memories, [Stage(*member) for member in members]))
