"""A simulated worker as a member of its group: drives `core.changeover` with bytes and delays.

The counterpart of worker/engine/pipeline/member.py without a model and without lanes. Each event
goes to the state machine between iterations; its commands are executed in order, and the answer to
a memory command is handled before the next command.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from services.core.changeover import vocabulary
from services.core.changeover.configuration import Configuration, GroupStages
from services.core.changeover.epoch_fence import EpochFence
from services.core.changeover.frames import MemberFrame, Samples
from services.core.changeover.state import Changeover
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.core.groups.fence import (
    AbortCall,
    AbortPreparation,
    MemberState,
    PrepareCall,
    Verdict,
)
from services.core.groups.layer_map import Stage
from services.core.groups.vocabulary import Group, StoredGroup
from services.core.host.vocabulary import HostCommand
from services.core.planner.batch import Microbatch
from services.core.planner.events import EmitToken, MoveBlocks, RefuseRequest
from services.core.shipments.vocabulary import (
    CancelShipping,
    ShipBlocks,
    ShipmentFrame,
    ShippingAsked,
    ShippingOver,
    part_of,
)
from tideserve.sim.change_spec import ChangeSpec
from tideserve.sim.engine import Simulation
from tideserve.sim.instance import Busy, Instance
from tideserve.sim.network import MESSAGE_BYTES, Network
from tideserve.sim.pipeline import ChangeLog, Pipeline, StageRun
from tideserve.sim.stage_memory import MemoryModel
from tideserve.sim.time_model import TimeModel

TURN_S = 0.1
"""Interval of turns of an idle worker during a change, for steps that only a timeout ends."""
_NOTHING_TO_DO = (
    *(MoveBlocks, vocabulary.CancelTransfer),
    *(vocabulary.NoteAborted, vocabulary.NoteAdopted, vocabulary.NoteMoved),
    CancelShipping,
)
"""Commands without effect here: copies within a device take no time, and transfers run to their
end, whose outcome is then ignored."""
_SHIPMENT_FRAMES = frozenset(get_args(ShipmentFrame))
KV_LAYOUT = "simulated"
Answered = Callable[[str, str, bool, str], None]
"""Arguments: attempt, worker, whether it is ready, the refusal or ""."""


@dataclass(slots=True)
class World:
    """State that all members of a cluster share.

    `orders`: what follows the end of an order to move requests, by order.
    """

    simulation: Simulation
    network: Network
    time_model: TimeModel
    spec: ChangeSpec
    log: ChangeLog
    members: dict[str, "SimulatedMember"]
    orders: dict[str, Callable[[ShippingOver], None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message between members: a frame, or the end of a KV transfer; `run` for later stages."""

    peer: str
    content: MemberFrame | ShipmentFrame | TransferOutcome
    run: StageRun | None = None

    @property
    def fenced(self) -> bool:
        """Whether it takes effect in one epoch only; shipments connect groups of any epochs."""
        if isinstance(self.content, TransferOutcome):
            return part_of(self.content.transfer_id) is None
        return type(self.content) not in _SHIPMENT_FRAMES


class SimulatedMember:
    """Connects an instance to the group protocol; `pipeline` is that of the group that it leads."""

    def __init__(self, instance: Instance, world: World, group: Group) -> None:
        shape, self._costs = world.spec.shape, world.spec.costs
        self.instance = instance
        self.name = instance.name
        self.state = instance.state
        self.memory = MemoryModel(shape, world.spec.arena_bytes, self.state.config.block_size)
        self.fence = MemberState(self.name, self.name, group_id=group.group_id, epoch=group.epoch)
        self.changeover = Changeover(
            self.name,
            shape.num_layers,
            self.state,
            tied_embeddings=shape.tied_embeddings,
            link_blocks_per_s=world.spec.link.bytes_per_s / self.memory.block_bytes,
            process=self.name,
            kv_layout=KV_LAYOUT if world.spec.ships else "",
        )
        self.pipeline: Pipeline | None = None
        self._world = world
        self._frames: EpochFence[_Sent] = EpochFence()
        self._answered: dict[str, Answered] = {}  # by attempt
        # Prepares whose records have yet to arrive.
        self._early: list[tuple[PrepareCall, tuple[Group, ...], Answered]] = []
        self._run: StageRun | None = None  # of the frame that is being handled
        self._busy: Busy | None = None  # device time that the commands take
        self._outputs: dict[str, int] = {}  # output tokens of requests before an event
        self._is_changing = False
        self._has_turn = False
        self._handlers: dict[type, Callable[[Any], vocabulary.Event | None]] = {
            vocabulary.SendFrame: self._send,
            vocabulary.RunStage: self._run_stage,
            vocabulary.SwitchStage: self._switch,
            vocabulary.ReleaseDeparted: self._release_departed,
            vocabulary.SendBlocks: self._send_blocks,
            vocabulary.ConnectMembers: self._connect,
            vocabulary.MeasureRestore: self._measure,
            vocabulary.ShrinkKv: self._shrink,
            vocabulary.RestoreSlab: self._restore,
            vocabulary.MapKv: lambda _command: vocabulary.KvMapped(),
            vocabulary.UndoRestore: self._undo_restore,
            vocabulary.EndPreparation: self._end_preparation,
            EmitToken: instance.emit,
            RefuseRequest: self._refuse,
            ShipBlocks: self._ship_blocks,
            ShippingOver: self._note_shipped,
        }
        self._handlers |= dict.fromkeys(get_args(HostCommand), instance.copy)
        self._handlers |= dict.fromkeys(_NOTHING_TO_DO, lambda _command: None)
        self._handle(vocabulary.ConfigurationCommitted(self._now_s, _stages_of((group,))))
        self._handle(vocabulary.TurnTaken(self._now_s))
        instance.member = self

    @property
    def configuration(self) -> Configuration:
        """The present configuration."""
        assert self.changeover.configuration is not None
        return self.changeover.configuration

    @property
    def _now_s(self) -> float:
        return self._world.simulation.now_s

    def check_invariants(self) -> None:
        """Check the state machine, the memory, and their agreement."""
        self.fence.check_invariants()
        self.changeover.check_invariants()
        self.memory.check_invariants()
        assert self.state.pool.num_blocks <= self.memory.blocks

    # --- coordinator and store

    def ask(self, asked: PrepareCall, groups: tuple[Group, ...], answered: Answered) -> None:
        """Prepare for `asked.target`, one of `groups`, on a coordinator's request."""
        answer = self.fence.judge(asked)
        if answer.verdict is Verdict.FUTURE:
            self._early.append((asked, groups, answered))
            return
        if answer.verdict is not Verdict.ACCEPTED:
            answered(asked.attempt, self.name, False, answer.reason)
            return
        self._answered[asked.attempt] = answered
        self.instance.post(
            self.apply, vocabulary.PreparationAsked(asked.attempt, _stages_of(groups))
        )

    def abort(self, asked: AbortCall) -> None:
        """Abort an attempt on a coordinator's request."""
        aborted = self.fence.abort(asked)
        if aborted is not None:
            self._abort(aborted.attempt)

    def observe(self, stored: tuple[StoredGroup, ...]) -> None:
        """Handle new group records of the store, written in one transaction."""
        for action in self.fence.observe(stored):
            if isinstance(action, AbortPreparation):
                self._abort(action.attempt)
                continue
            groups = tuple(record.group for record in stored if record.group.members)
            self.instance.reporter.epoch = action.group.epoch
            self.instance.post(self._commit, _stages_of(groups))
        early, self._early = self._early, []
        for call in early:
            self.ask(*call)

    def _abort(self, attempt: str) -> None:
        self._answered.pop(attempt, None)
        self.instance.post(self.apply, vocabulary.PreparationAborted(attempt))

    # --- events, between iterations

    def apply(self, event: vocabulary.Event) -> Busy | None:
        """Pass an event to the state machine and execute its commands; returns the device time."""
        self._handle(event)
        busy, self._busy = self._busy, None
        return busy

    def take_turn(self) -> Busy | None:
        """Continue a change as far as possible without waiting."""
        changeover, busy = self.changeover, None
        while changeover.needs_turn(self._now_s) and busy is None:
            self._note_outputs()
            commands = changeover.handle(vocabulary.TurnTaken(self._now_s))
            if not commands:
                self._take_another_turn()
                break
            self._carry_out(commands)
            busy, self._busy = self._busy, None
        if self._is_changing and changeover.settled:
            self._is_changing = False
            self._world.log.note_settled(self.name, self._now_s)
            if (due_s := changeover.parked_due_s) is not None:
                self._world.simulation.at(due_s, self.instance.wake)
        return busy

    def run_first(self, microbatch: Microbatch) -> Busy:
        """Run the leader's stage of a microbatch."""
        if self.pipeline is None:
            spec = self._world.spec
            shares = [spec.shape.time_share(stage) for stage in self.configuration.stages]
            execution = self.state.config.execution
            self.pipeline = Pipeline(shares, self._world.time_model, spec.hidden_bytes, execution)
        return self._running(self.pipeline.run_of(microbatch))

    def _commit(self, groups: tuple[GroupStages, ...]) -> Busy | None:
        self._is_changing = True
        return self.apply(vocabulary.ConfigurationCommitted(self._now_s, groups))

    def _take(self, epoch: int, sent: _Sent) -> Busy | None:
        """Handle a message of another member, or of this member to itself."""
        content = sent.content
        if sent.fenced and not self._frames.admits(epoch, sent):
            return None
        if isinstance(content, TransferOutcome):
            ended = TransferOutcome(content.transfer_id, TransferStatus.SENT, self.name)
            self._world.members[sent.peer].post(ended)
            return self.apply(content)
        if isinstance(content, Samples):
            # A shortcut for the most frequent frame: as the state machine, but without token ids.
            self.instance.finish(content.number)
            return None
        self._run = sent.run
        return self.apply(vocabulary.FrameReceived(self._now_s, sent.peer, content))

    def post(self, event: vocabulary.Event) -> None:
        """Pass an event to the state machine after the running iteration."""
        self.instance.post(self.apply, event)

    def _take_another_turn(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            self._world.simulation.after(TURN_S, self._wake)

    def _wake(self) -> None:
        self._has_turn = False
        self.instance.wake()

    # --- commands

    def _handle(self, event: vocabulary.Event) -> None:
        self._note_outputs(isinstance(event, ShippingAsked))
        self._carry_out(self.changeover.handle(event))

    def _note_outputs(self, begins: bool = False) -> None:
        """Note the outputs of requests that may move away: then they have left the planner."""
        if begins or self.changeover.shipping.outgoing.active:
            self._outputs = {seq.seq_id: seq.output_count for seq in self.state.running}

    def _carry_out(self, commands: list[vocabulary.Command]) -> None:
        for command in commands:
            answer = self._handlers[type(command)](command)
            if answer is not None:
                self._handle(answer)

    def _send(self, command: vocabulary.SendFrame[Any]) -> None:
        epoch = self._frames.epoch if command.group is None else command.group.epoch
        self._transmit(command.peer, epoch, _Sent(self.name, command.frame))

    def _transmit(
        self, peer: str, epoch: int, sent: _Sent, size_bytes: int = MESSAGE_BYTES
    ) -> None:
        member = self._world.members[peer]
        if member is self:  # handled in the next turn, as in an engine's loop
            self._world.simulation.after(0.0, self.instance.post, self._take, epoch, sent)
            return
        arguments = (member.instance.post, member._take, epoch, sent)
        self._world.network.send(self.name, size_bytes, *arguments)

    def _run_stage(self, _command: vocabulary.RunStage) -> None:
        assert self._run is not None and self._busy is None
        self._busy = self._running(self._run)

    def _running(self, run: StageRun) -> Busy:
        stage = self.configuration.index
        return Busy(run.pipeline.seconds(stage, run), self._pass_on, (stage, run, self._now_s))

    def _pass_on(self, stage: int, run: StageRun, started_s: float) -> None:
        """Send activations to the next stage, or samples to the leader."""
        run.pipeline.note_run(stage, run, (started_s, self._now_s))
        configuration, size_bytes = self.configuration, run.size_bytes
        sent = _Sent(self.name, run.frame, run)
        if configuration.is_last:
            sent, size_bytes = _Sent(self.name, Samples(run.frame.number, {})), MESSAGE_BYTES
        self._transmit(configuration.next_worker, self._frames.epoch, sent, size_bytes)

    def _switch(self, command: vocabulary.SwitchStage) -> vocabulary.StageSwitched:
        new = command.configuration
        early = self._frames.enter(new.epoch)
        for sent in reversed(early):  # before messages that arrived later
            self.instance.post_first(self._take, new.epoch, sent)
        if self.changeover.configuration is None:
            return vocabulary.StageSwitched(self.state.pool.num_blocks, departed=False)
        if self.pipeline is not None:
            self._world.log.note_pipelines([self.pipeline])
            self.pipeline = None
        self.memory.switch(range(new.stage.first_layer, new.stage.end_layer))
        self._busy = Busy(self._costs.pause_s, _nothing, ())
        return vocabulary.StageSwitched(self.memory.blocks, bool(self.memory.departed_layers))

    def _release_departed(self, command: vocabulary.ReleaseDeparted) -> vocabulary.DepartedReleased:
        self.memory.release_departed(command.blocks)
        return vocabulary.DepartedReleased(self.memory.blocks, bool(self.memory.departed_layers))

    def _send_blocks(self, command: vocabulary.SendBlocks) -> None:
        transfer = command.transfer
        layers = transfer.end_layer - transfer.first_layer
        size_bytes = command.blocks * self.memory.block_bytes * layers
        self._world.log.note_moved(self.name, size_bytes)
        member = self._world.members[transfer.destination]
        received = TransferOutcome(command.transfer_id, TransferStatus.RECEIVED, self.name)
        sent = _Sent(self.name, received)
        arguments = (member.instance.post, member._take, self._frames.epoch, sent)
        self._world.network.send_bulk(self.name, size_bytes, *arguments)

    # --- commands of shipments

    def _refuse(self, command: RefuseRequest) -> None:
        if command.go_to is None:
            self.instance.emit(command)
        else:
            self._world.log.shipped += 1
            self.instance.pass_on(command, self._outputs[command.request_id])

    def _ship_blocks(self, command: ShipBlocks) -> None:
        member = self._world.members[command.peer]
        size_bytes = command.blocks * self.memory.block_bytes * self.memory.shape.num_layers
        self._world.log.shipped_bytes += size_bytes
        arguments = (member.instance.post, member._land, self, command)
        self._world.network.send_bulk(self.name, size_bytes, *arguments)

    def _land(self, source: "SimulatedMember", command: ShipBlocks) -> Busy | None:
        """Take a part of a shipment from the member `source`."""
        transfer_id, count = command.transfer_id, command.blocks
        arguments = (transfer_id, command.remote_pin, command.first, count)
        intact = bool(self.changeover.landing_blocks(*arguments))
        sent, received = TransferStatus.SENT, TransferStatus.RECEIVED
        if not intact:
            sent = received = TransferStatus.FAILED
        source.post(TransferOutcome(transfer_id, sent, self.name))
        return self.apply(TransferOutcome(transfer_id, received, source.name))

    def _note_shipped(self, command: ShippingOver) -> None:
        self._world.orders.pop(command.order)(command)

    # --- commands of a preparation

    def _connect(self, command: vocabulary.ConnectMembers) -> None:
        connected = vocabulary.MembersConnected(command.attempt)
        self._world.simulation.after(self._costs.connect_s, self.post, connected)

    def _measure(self, command: vocabulary.MeasureRestore) -> vocabulary.RestoreMeasured:
        memory, layers = self.memory, range(command.first_layer, command.end_layer)
        held = memory.slabs_of(memory.layers)
        return vocabulary.RestoreMeasured(
            memory.blocks_after_adding(layers),
            tuple(slab for slab in memory.slabs_of(layers) if slab not in held),
            tuple(sorted(set(layers) - set(memory.layers))),
        )

    def _shrink(self, command: vocabulary.ShrinkKv) -> vocabulary.KvShrunk:
        self.memory.shrink(command.blocks)
        return vocabulary.KvShrunk(command.attempt)

    def _restore(self, command: vocabulary.RestoreSlab) -> None:
        if not command.holder:
            self._verify(command)
            return
        holder = self._world.members[command.holder]
        arguments = (holder.instance.post, holder._send_slab, self, command)
        self._world.network.send(self.name, MESSAGE_BYTES, *arguments)

    def _send_slab(self, asker: "SimulatedMember", command: vocabulary.RestoreSlab) -> None:
        """Send a slab to the member `asker`, which restores it."""
        network, memory = self._world.network, self.memory
        if command.slab in memory.slabs_of(memory.layers):
            size_bytes = memory.slab_bytes(command.slab)
            network.send_bulk(self.name, size_bytes, asker._verify, command)
        else:
            lacking = vocabulary.SlabVerified(command.attempt, command.slab, intact=False)
            network.send(self.name, MESSAGE_BYTES, asker.post, lacking)

    def _verify(self, command: vocabulary.RestoreSlab) -> None:
        verified = vocabulary.SlabVerified(command.attempt, command.slab, intact=True)
        seconds = self.memory.slab_bytes(command.slab) / self._costs.verify_bytes_per_s
        self._world.simulation.after(seconds, self.post, verified)

    def _undo_restore(self, _command: vocabulary.UndoRestore) -> vocabulary.RestoreUndone:
        self.memory.abandon_restore()
        return vocabulary.RestoreUndone(self.memory.blocks)

    def _end_preparation(self, command: vocabulary.EndPreparation) -> None:
        answered = self._answered.pop(command.attempt, None)
        if answered is not None:
            ready = command.refusal is None
            answered(command.attempt, self.name, ready, command.refusal or "")
        if command.refusal is not None:
            self.fence.abort_own(command.attempt)


def _stages_of(groups: tuple[Group, ...]) -> tuple[GroupStages, ...]:
    return tuple(
        GroupStages(
            group.group_id,
            group.epoch,
            tuple(Stage(m.worker_id, m.first_layer, m.end_layer) for m in group.members),
        )
        for group in groups
    )


def _nothing() -> None:
    """No action at the end of a pause."""
