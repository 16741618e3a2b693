"""Converts the servicer's group plans to the types of `core.changeover`."""

from collections.abc import Sequence

from services.core.changeover.configuration import GroupStages
from services.core.groups.layer_map import Stage
from services.worker.ipc import GroupPlan, MemberPlan


def stages_of(groups: Sequence[GroupPlan]) -> tuple[GroupStages, ...]:
    """Return the stages of the groups, without network addresses."""
    return tuple(
        GroupStages(
            group.group_id,
            group.epoch,
            tuple(map(stage_of, group.members)),
            frozenset(member.worker_id for member in group.members if member.draining),
        )
        for group in groups
    )


def stage_of(member: MemberPlan) -> Stage:
    """Return the layers of a member, or those that a holder runs."""
    return Stage(member.worker_id, member.first_layer, member.end_layer)


def members_of(groups: Sequence[GroupPlan]) -> dict[str, MemberPlan]:
    """Return all members of the groups, by worker id."""
    return {member.worker_id: member for group in groups for member in group.members}
