"""Changes of groups that a person asks for by naming groups."""

import sys
from collections.abc import Mapping, Sequence

from services.core.groups.layer_map import (
    MemberMemory,
    ModelShape,
    SplitError,
    capacity_tokens,
    split_layers,
)
from services.core.groups.vocabulary import Group
from services.core.overload.action_plan import Change, splits
from services.core.overload.target import group_tokens, plan_members
from services.core.overload.worker_facts import WorkerFacts

AS_MANY_AS_FIT = sys.maxsize
"""Tokens of KV that a merge by hand is to hold: people who merge want memory first, then speed."""


class InvalidChange(ValueError):
    """The request names groups that cannot be changed like that; one sentence says why."""


def merge_of(
    groups: Sequence[Group], group_ids: Sequence[str], facts: Mapping[str, WorkerFacts]
) -> Change:
    """One group of those in `group_ids`, in that order; of all `groups` if none is named.

    `facts`: of each registered worker. The layers are divided as those of any other merge.

    Raises:
        InvalidChange: if there is no such group, one is named twice, or they cannot merge.
    """
    chosen = [_find(groups, group_id) for group_id in group_ids] or list(groups)
    if len(chosen) != len({group.group_id for group in chosen}):
        raise InvalidChange("a group is named twice; name each once")
    if len({group.model for group in chosen}) > 1:
        raise InvalidChange("the groups serve different models; name groups of one model")
    if len(chosen) < 2:
        raise InvalidChange("there is one group only; a merge needs two")
    names = [member.worker_id for group in chosen for member in group.members]
    shape = _shape(names, facts)
    arena_bytes = {name: facts[name].arena_bytes for name in names}
    rooms = [MemberMemory(name, arena_bytes[name]) for name in names]
    try:
        stages = split_layers(shape, rooms, AS_MANY_AS_FIT)
    except SplitError as error:
        raise InvalidChange(str(error)) from error
    before = sum(group_tokens(shape, plan_members(group), arena_bytes) for group in chosen)
    after = min(capacity_tokens(shape, rooms, stages))
    ids = tuple(group.group_id for group in chosen)
    text = f"{', '.join(ids)} merge: room for {after:,} tokens of KV instead of {before:,}"
    return Change(ids, (stages,), text)


def split_of(groups: Sequence[Group], group_id: str | None) -> Change:
    """A group for each member of `group_id`; without an id, of the only one with several members.

    Raises:
        InvalidChange: if there is no such group, or it has one member only.
    """
    merged_groups = [group for group in groups if len(group.members) > 1]
    if group_id is not None:
        group = _find(groups, group_id)
    elif len(merged_groups) == 1:
        group = merged_groups[0]
    elif merged_groups:
        names = ", ".join(group.group_id for group in merged_groups)
        raise InvalidChange(f"there are several merged groups; name one of {names}")
    else:
        raise InvalidChange("no groups are merged; there is nothing to restore")
    if len(group.members) < 2:
        raise InvalidChange(f"{group.group_id} has one member and all layers; nothing to restore")
    (change,) = splits([group])
    return change


def _shape(names: Sequence[str], facts: Mapping[str, WorkerFacts]) -> ModelShape:
    """The sizes of the model that all of these workers serve. Raises InvalidChange."""
    known = [facts.get(name) for name in names]
    fixed = [
        name for name, one in zip(names, known, strict=True) if one is None or not one.can_drop
    ]
    if fixed:
        raise InvalidChange(
            f"{', '.join(fixed)} cannot drop layers, for want of a transport or of an engine that"
            " can; name other groups"
        )
    leaving = [one.worker_id for one in known if one is not None and one.draining]
    if leaving:
        raise InvalidChange(f"{', '.join(leaving)} is leaving; name other groups")
    for one in known:
        if one is not None and one.shape is not None:
            return one.shape
    raise InvalidChange("no worker of these groups tells the sizes of its model; restart them")


def _find(groups: Sequence[Group], group_id: str) -> Group:
    for group in groups:
        if group.group_id == group_id:
            return group
    known = ", ".join(group.group_id for group in groups) or "none"
    raise InvalidChange(f"there is no group '{group_id}' that serves; the groups are: {known}")
