"""The state that all parts of the change-over state machine of a member share (`Changeover`)."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.changeover.configuration import Configuration
from services.core.changeover.frames import MemberFrame
from services.core.changeover.vocabulary import Command, SendFrame
from services.core.groups.layer_map import Stage
from services.core.planner.block_table import StageTable
from services.core.planner.events import BlocksFreed, Event
from services.core.planner.sequence_ids import AnsweringSequences
from services.core.planner.state import PlannerState
from services.core.shipments.vocabulary import ShipmentFrame


@dataclass(slots=True)
class MemberContext:
    """A group member: its identity, planner, configuration and the commands of an event."""

    worker_id: str
    num_layers: int  # of the model
    tied_embeddings: bool  # the first and the last stage both need the embedding
    planner: PlannerState  # plans while this worker leads; its block table is used at every stage
    answering: AnsweringSequences  # which sequence answers a request here
    configuration: Configuration | None = None  # None before the first: no other worker is involved
    now_s: float = 0.0  # time of the newest event with a time
    commands: list[Command] = field(default_factory=list)  # for the driver, in order
    announced_blocks: int | None = None  # a reduced capacity that the leader has yet to confirm

    @property
    def table(self) -> StageTable:
        """The block table of this worker's stage."""
        return self.planner.table

    @property
    def capacity(self) -> int:
        """The blocks that the leader may use, without those that a preparation will remove."""
        usable = self.table.pool.usable
        return usable if self.announced_blocks is None else min(usable, self.announced_blocks)

    @property
    def leads(self) -> bool:
        """Whether this worker leads its group; without a configuration it leads itself."""
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

    def send(self, peer: str, frame: MemberFrame | ShipmentFrame) -> None:
        """Send a frame of the present epoch."""
        self.commands.append(SendFrame(peer, frame))

    def emit(self, command: Command) -> None:
        """Queue a command for the driver."""
        self.commands.append(command)

    def send_along(self, frame: MemberFrame) -> None:
        """Send a frame to the next stage, in order with microbatches; the last stage has none."""
        configuration = self.configuration
        if configuration is not None and not configuration.is_last:
            self.send(configuration.next_worker, frame)

    def apply(self, event: Event) -> None:
        """Apply an event to the planner, and queue the planner's commands.

        Discards commands to clients if another sequence answers the request by now.
        """
        for command in self.planner.handle(event):
            if isinstance(command, BlocksFreed):
                raise AssertionError("ids of released requests would be lost")
            if self.answering.filter_command(command):
                self.commands.append(command)

    def take_freed(self, event: Event) -> tuple[str, ...]:
        """Apply an event to the planner that frees blocks; returns the sequences' ids."""
        *others, freed = self.planner.handle(event)
        assert isinstance(freed, BlocksFreed)
        for command in others:  # jobs of host copies that end
            assert not isinstance(command, BlocksFreed)
            self.commands.append(command)
        return freed.seq_ids

    def highest_block(self, seq_ids: Iterable[str]) -> int:
        """The highest block id of these sequences here; -1 without blocks."""
        return self.table.highest_block(seq_ids)
