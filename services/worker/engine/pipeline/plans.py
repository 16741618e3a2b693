"""The servicer's plans of groups, in the words of `core.changeover`."""

from collections.abc import Sequence

from services.core.changeover.configuration import GroupStages
from services.core.groups.layer_map import Stage
from services.worker.ipc import GroupPlan, MemberPlan


def stages_of(groups: Sequence[GroupPlan]) -> tuple[GroupStages, ...]:
    """The groups without addresses."""
    return tuple(
        GroupStages(
            group.group_id,
            group.epoch,
            tuple(Stage(one.worker_id, one.first_layer, one.end_layer) for one in group.members),
            frozenset(one.worker_id for one in group.members if one.draining),
        )
        for group in groups
    )


def members_of(groups: Sequence[GroupPlan]) -> dict[str, MemberPlan]:
    """All members of the groups, by worker id."""
    return {member.worker_id: member for group in groups for member in group.members}
