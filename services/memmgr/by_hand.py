"""Changes of groups that a person asks for by naming groups."""

from collections.abc import Callable, Sequence

from services.core.memory.group_vocabulary import Group, Targets
from services.core.memory.reconfiguration import merged, split_up

NumLayers = Callable[[str], int]
"""Layers of a worker's model."""
CanDrop = Callable[[str], bool]
"""Whether a worker can run part of the layers."""


class InvalidChange(ValueError):
    """What is asked for names no groups that can be changed so; one sentence."""


def merge_of(
    groups: Sequence[Group],
    group_ids: Sequence[str],
    num_layers: NumLayers,
    can_drop: CanDrop,
) -> Targets:
    """One group of those in `group_ids`, in that order; of all `groups` if none is named.

    Raises:
        InvalidChange: if there is no such group, one is named twice, or there is nothing to merge.
    """
    chosen = [_find(groups, group_id) for group_id in group_ids] or list(groups)
    if len(chosen) != len({group.group_id for group in chosen}):
        raise InvalidChange("a group is named twice; name each once")
    if len({group.model for group in chosen}) > 1:
        raise InvalidChange("the groups serve different models; name groups of one model")
    if len(chosen) < 2:
        raise InvalidChange("there is one group only; a merge needs two")
    names = [member.worker_id for group in chosen for member in group.members]
    fixed = [name for name in names if not can_drop(name)]
    if fixed:
        raise InvalidChange(
            f"{', '.join(fixed)} cannot drop layers, for want of a transport; name other groups"
        )
    layers = num_layers(names[0])
    if len(names) > layers:
        raise InvalidChange(
            f"{len(names)} workers cannot share {layers} layers; merge fewer groups at a time"
        )
    return merged(chosen, layers)


def split_of(groups: Sequence[Group], group_id: str, num_layers: NumLayers) -> Targets:
    """A group for each member of `group_id`; "" is the only one with several members.

    Raises:
        InvalidChange: if there is no such group, or it has one member only.
    """
    merged_groups = [group for group in groups if len(group.members) > 1]
    if group_id:
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
    return split_up(group, num_layers(group.members[0].worker_id))


def _find(groups: Sequence[Group], group_id: str) -> Group:
    for group in groups:
        if group.group_id == group_id:
            return group
    known = ", ".join(group.group_id for group in groups) or "none"
    raise InvalidChange(f"there is no group '{group_id}' that serves; the groups are: {known}")
