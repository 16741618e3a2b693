"""A committed configuration, as a member sees it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.core.groups.layer_map import Stage


@dataclass(frozen=True, slots=True)
class GroupStages:
    """A group that a change makes, with its stages in order; the first leads.

    `draining`: its leaving workers.
    """

    group_id: str
    epoch: int
    stages: tuple[Stage, ...]
    draining: frozenset[str] = frozenset()

    @property
    def leader(self) -> str:
        """The member that plans."""
        return self.stages[0].worker_id

    @property
    def workers(self) -> frozenset[str]:
        """Its members."""
        return frozenset(stage.worker_id for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Configuration:
    """The group of the worker `worker_id` at an epoch, among all groups of the same change."""

    worker_id: str
    own: GroupStages
    groups: tuple[GroupStages, ...]

    @classmethod
    def of(cls, worker_id: str, groups: Sequence[GroupStages]) -> "Configuration":
        """The configuration of a worker that one of `groups` has as a member."""
        own = next(group for group in groups if worker_id in group.workers)
        return cls(worker_id, own, tuple(groups))

    @property
    def epoch(self) -> int:
        """The epoch of the group."""
        return self.own.epoch

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the group; the first leads."""
        return self.own.stages

    @property
    def leader(self) -> str:
        """The member that plans."""
        return self.own.leader

    @property
    def leads(self) -> bool:
        """Whether that is this worker."""
        return self.leader == self.worker_id

    @property
    def index(self) -> int:
        """This worker's number among the stages."""
        return self.stage_of(self.worker_id)

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
        return self.stages[-1].worker_id == self.worker_id

    @property
    def members(self) -> frozenset[str]:
        """All members of the change."""
        return frozenset(name for group in self.groups for name in group.workers)

    @property
    def leaders(self) -> frozenset[str]:
        """The leaders of all groups of the change."""
        return frozenset(group.leader for group in self.groups)

    def leaders_for(self, workers: Collection[str]) -> frozenset[str]:
        """Leaders of the groups that have one of `workers`.

        A worker that is leaving is none of them, unless there is no other.
        """
        found = [group for group in self.groups if not group.workers.isdisjoint(workers)]
        staying = {group.leader for group in found if group.leader not in group.draining}
        return frozenset(staying or {group.leader for group in found})

    def stage_of(self, worker_id: str) -> int:
        """The number of a member of the group among the stages. Raises ValueError."""
        return [stage.worker_id for stage in self.stages].index(worker_id)
