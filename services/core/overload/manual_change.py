"""Plans changes of groups that an operator requests: a merge or a split of named groups."""

from collections.abc import Mapping, Sequence

from services.core.groups.layer_map import (
    MemberMemory,
    ModelShape,
    SplitError,
    capacity_tokens,
    split_layers,
)
from services.core.groups.vocabulary import Group
from services.core.overload.action_plan import AS_MANY_AS_FIT, Change, NoPlan, splits
from services.core.overload.target import group_tokens, plan_members
from services.core.overload.worker_facts import WorkerFacts


class InvalidChange(ValueError):
    """The requested change is invalid; the message is a sentence for the operator."""


def merge_of(
    groups: Sequence[Group], group_ids: Sequence[str], facts: Mapping[str, WorkerFacts]
) -> Change:
    """The merge of the groups `group_ids`, in that order; of all `groups` if `group_ids` is empty.

    `facts` is by worker id.

    Raises:
        InvalidChange: if a group is unknown or named twice, or the groups cannot merge.
    """
    chosen = [_find(groups, group_id) for group_id in group_ids] or list(groups)
    if len(chosen) != len({group.group_id for group in chosen}):
        raise InvalidChange("a group is named twice; name each once")
    if len({group.model for group in chosen}) > 1:
        raise InvalidChange("the groups serve different models; name groups of one model")
    if len(chosen) < 2:
        raise InvalidChange("there is only one group; a merge needs two")
    names = [member.worker_id for group in chosen for member in group.members]
    shape = _shape(names, facts)
    arena_bytes = {name: facts[name].arena_bytes for name in names}
    members = [MemberMemory(name, arena_bytes[name]) for name in names]
    # The operator's order of groups is the order of stages; only the layers are computed.
    try:
        stages = split_layers(shape, members, AS_MANY_AS_FIT)
    except SplitError as error:
        raise InvalidChange(str(error)) from error
    before = sum(group_tokens(shape, plan_members(group), arena_bytes) for group in chosen)
    after = min(capacity_tokens(shape, members, stages))
    ids = tuple(group.group_id for group in chosen)
    text = f"{', '.join(ids)} merge: room for {after:,} tokens of KV instead of {before:,}"
    return Change(ids, (stages,), text)


def split_of(
    groups: Sequence[Group],
    group_id: str | None,
    facts: Mapping[str, WorkerFacts],
    parts: int | None = None,
) -> Change:
    """The split of `group_id` into `parts` groups; None: of the only merged group, into workers.

    Raises:
        InvalidChange: if there is no such group, or it cannot split into so many groups.
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
    if parts is not None and not 1 < parts <= len(group.members):
        raise InvalidChange(
            f"{group.group_id} cannot split into {parts} groups; name 2 to {len(group.members)}"
        )
    try:
        (change,) = splits([group], facts, {group.group_id: parts or len(group.members)})
    except NoPlan as error:
        raise InvalidChange(str(error)) from error
    return change


def _shape(names: Sequence[str], facts: Mapping[str, WorkerFacts]) -> ModelShape:
    """The shape of the model that these workers serve. Raises InvalidChange."""
    known = [facts.get(name) for name in names]
    cannot_drop = [
        name
        for name, worker in zip(names, known, strict=True)
        if worker is None or not worker.can_drop
    ]
    if cannot_drop:
        raise InvalidChange(
            f"{', '.join(cannot_drop)} cannot drop layers: a transport or an engine with support"
            " for it is missing; name other groups"
        )
    leaving = [worker.worker_id for worker in known if worker is not None and worker.draining]
    if leaving:
        raise InvalidChange(f"{', '.join(leaving)} is leaving; name other groups")
    for worker in known:
        if worker is not None and worker.shape is not None:
            return worker.shape
    raise InvalidChange("no worker of these groups reports the sizes of its model; restart them")


def _find(groups: Sequence[Group], group_id: str) -> Group:
    for group in groups:
        if group.group_id == group_id:
            return group
    known = ", ".join(group.group_id for group in groups) or "none"
    raise InvalidChange(f"no group '{group_id}' is serving; the groups are: {known}")
