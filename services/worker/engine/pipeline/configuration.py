"""A group's committed configuration, as an engine sees it."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.core.groups.layer_map import Stage
from services.worker.ipc import GroupPlan, MemberPlan


@dataclass(frozen=True, slots=True)
class Configuration:
    """This worker's group at an epoch, and all members of the change that led to it.

    `stages` are in order, the first leads; `index` is this worker's among them. `leaders` and
    `everybody` include the groups that the same change made beside this one.
    """

    group_id: str
    epoch: int
    stages: tuple[Stage, ...]
    index: int
    groups: tuple[GroupPlan, ...]

    @classmethod
    def of(cls, groups: Sequence[GroupPlan], worker_id: str) -> "Configuration":
        """The configuration of `worker_id`, which one of `groups` has as a member."""
        mine = next(g for g in groups if any(m.worker_id == worker_id for m in g.members))
        stages = stages_of(mine)
        index = next(i for i, stage in enumerate(stages) if stage.worker_id == worker_id)
        return cls(mine.group_id, mine.epoch, stages, index, tuple(groups))

    @property
    def leader(self) -> str:
        """The member that plans."""
        return self.stages[0].worker_id

    @property
    def leads(self) -> bool:
        """Whether this worker leads."""
        return self.index == 0

    def serves(self, num_layers: int) -> bool:
        """Whether the group has all layers; a group that lost a member has not."""
        return (self.stages[0].first_layer, self.stages[-1].end_layer) == (0, num_layers)

    @property
    def stage(self) -> Stage:
        """This worker's stage."""
        return self.stages[self.index]

    @property
    def next_worker(self) -> str:
        """The member that gets this stage's activations; after the last stage, the leader."""
        return self.stages[(self.index + 1) % len(self.stages)].worker_id

    @property
    def is_last(self) -> bool:
        """Whether this stage samples."""
        return self.index == len(self.stages) - 1

    @property
    def members(self) -> dict[str, MemberPlan]:
        """All members of the change, by worker id."""
        return {member.worker_id: member for group in self.groups for member in group.members}


def stages_of(group: GroupPlan) -> tuple[Stage, ...]:
    """The stages of a group, in order."""
    return tuple(
        Stage(member.worker_id, member.first_layer, member.end_layer) for member in group.members
    )
