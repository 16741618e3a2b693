"""A group's committed configuration, as a simulated member sees it."""

from dataclasses import dataclass

from services.core.groups.layer_map import Stage
from services.core.groups.vocabulary import Group


@dataclass(frozen=True, slots=True)
class Configuration:
    """A worker's group at an epoch; `groups` are all that the same change made."""

    group: Group
    stages: tuple[Stage, ...]
    index: int
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, group: Group, worker_id: str, groups: tuple[Group, ...]) -> "Configuration":
        """The configuration of a member of `group`."""
        stages = tuple(
            Stage(one.worker_id, one.first_layer, one.end_layer) for one in group.members
        )
        index = next(i for i, stage in enumerate(stages) if stage.worker_id == worker_id)
        return cls(group, stages, index, groups)

    @property
    def epoch(self) -> int:
        """Of the group."""
        return self.group.epoch

    @property
    def leader(self) -> str:
        """The member that plans."""
        return self.stages[0].worker_id

    @property
    def leads(self) -> bool:
        """Whether that is this worker."""
        return self.index == 0

    @property
    def layers(self) -> range:
        """This worker's."""
        stage = self.stages[self.index]
        return range(stage.first_layer, stage.end_layer)

    @property
    def everybody(self) -> set[str]:
        """Members of all groups of the change."""
        return {member.worker_id for group in self.groups for member in group.members}

    @property
    def leaders(self) -> set[str]:
        """Of all groups of the change."""
        return {group.members[0].worker_id for group in self.groups}

    def leaders_for(self, workers: set[str]) -> set[str]:
        """Leaders of the groups of the change that have one of these workers."""
        return {
            group.members[0].worker_id
            for group in self.groups
            if any(member.worker_id in workers for member in group.members)
        }
