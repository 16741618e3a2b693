"""What the parts of a member's change-over share: its planner, its configuration, its commands."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.changeover.configuration import Configuration
from services.core.changeover.frames import MemberFrame
from services.core.changeover.vocabulary import Command, SendFrame
from services.core.groups.layer_map import Stage
from services.core.planner.block_table import StageTable
from services.core.planner.events import BlocksFreed, Event
from services.core.planner.sequence_names import SequenceNames
from services.core.planner.state import PlannerState


@dataclass(slots=True)
class MemberContext:
    """One member. `configuration` is None until the first one: the worker serves alone then.

    `commands` collects what the driver has to do; `now_s` is the time of the newest event.
    """

    worker_id: str
    num_layers: int
    tied_embeddings: bool
    planner: PlannerState
    names: SequenceNames
    configuration: Configuration | None = None
    now_s: float = 0.0
    commands: list[Command] = field(default_factory=list)
    announced_blocks: int | None = None  # to the leader, which may still use more

    @property
    def table(self) -> StageTable:
        """The blocks of this worker, by sequence."""
        return self.planner.table

    @property
    def capacity(self) -> int:
        """The blocks that the leader may count on, without those that were announced to go."""
        usable = self.table.pool.usable
        return usable if self.announced_blocks is None else min(usable, self.announced_blocks)

    @property
    def leads(self) -> bool:
        """Whether this worker plans."""
        return self.configuration is None or self.configuration.leads

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the present group."""
        if self.configuration is None:
            return (Stage(self.worker_id, 0, self.num_layers),)
        return self.configuration.stages

    @property
    def leader(self) -> str:
        """The leader of the present group."""
        return self.stages[0].worker_id

    def send(self, peer: str, frame: MemberFrame) -> None:
        """Send a frame of the present epoch."""
        self.commands.append(SendFrame(peer, frame))

    def send_along(self, frame: MemberFrame) -> None:
        """Send a frame to the next stage, as microbatches go, if there is one."""
        configuration = self.configuration
        if configuration is not None and not configuration.is_last:
            self.send(configuration.next_worker, frame)

    def change(self, event: Event) -> None:
        """Have the planner apply an event; add its commands for clients of current sequences."""
        for command in self.planner.handle(event):
            if isinstance(command, BlocksFreed):
                raise AssertionError("names of released requests would be lost")
            if self.names.keeps(command):
                self.commands.append(command)

    def take_freed(self, event: Event) -> tuple[str, ...]:
        """Have the planner apply an event; returns the requests whose blocks are free by it."""
        (freed,) = self.planner.handle(event)
        assert isinstance(freed, BlocksFreed)
        return freed.request_ids

    def highest_block(self, request_ids: Iterable[str]) -> int:
        """The highest block here that one of these has; -1 if they have none."""
        return self.table.highest_block(request_ids)
