"""A committed configuration from the view of one member: its group, and the groups beside it.

Terms: a *change* commits one or more groups at once; a *stage* is a member with its contiguous
layers; the first stage of a group is its *leader*, which plans microbatches for the group.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.core.groups.layer_map import Stage


@dataclass(frozen=True, slots=True)
class GroupStages:
    """A group of a change with its stages in pipeline order; the first stage leads.

    `draining`: workers of the group that are shutting down.
    """

    group_id: str
    epoch: int
    stages: tuple[Stage, ...]
    draining: frozenset[str] = frozenset()

    @property
    def leader(self) -> str:
        """The worker that plans for the group."""
        return self.stages[0].worker_id

    @property
    def workers(self) -> frozenset[str]:
        """The members of the group."""
        return frozenset(stage.worker_id for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Configuration:
    """The group of the worker `worker_id` at an epoch, among all groups of the same change."""

    worker_id: str
    own: GroupStages
    groups: tuple[GroupStages, ...]

    @classmethod
    def of(cls, worker_id: str, groups: Sequence[GroupStages]) -> "Configuration":
        """The configuration of `worker_id`, which `groups` must contain."""
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
        """The worker that plans for the group."""
        return self.own.leader

    @property
    def leads(self) -> bool:
        """Whether this worker leads its group."""
        return self.leader == self.worker_id

    @property
    def index(self) -> int:
        """The index of this worker's stage in the pipeline."""
        return self.stage_of(self.worker_id)

    @property
    def stage(self) -> Stage:
        """This worker's stage."""
        return self.stages[self.index]

    @property
    def next_worker(self) -> str:
        """The receiver of this stage's output: the next stage, or the leader after the last."""
        return self.stages[(self.index + 1) % len(self.stages)].worker_id

    @property
    def is_last(self) -> bool:
        """Whether this stage is the last, which samples."""
        return self.stages[-1].worker_id == self.worker_id

    @property
    def members(self) -> frozenset[str]:
        """The workers of all groups of the change."""
        return frozenset(worker_id for group in self.groups for worker_id in group.workers)

    @property
    def leaders(self) -> frozenset[str]:
        """The leaders of all groups of the change."""
        return frozenset(group.leader for group in self.groups)

    def leaders_for(self, workers: Collection[str]) -> frozenset[str]:
        """Leaders of the groups of the change that contain any of `workers`.

        Leaves out leaders that shut down, unless all do.
        """
        groups = [group for group in self.groups if not group.workers.isdisjoint(workers)]
        # A leader that shuts down would have to hand the sequences over once more.
        staying = {group.leader for group in groups if group.leader not in group.draining}
        return frozenset(staying or {group.leader for group in groups})

    def stage_of(self, worker_id: str) -> int:
        """The stage index of a member of the group. Raises ValueError for other workers."""
        return [stage.worker_id for stage in self.stages].index(worker_id)
