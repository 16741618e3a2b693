"""A member of a change-over world: drives the state machine as an engine does, without a model."""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from services.core.audit.record import BATCH, COMMAND, EVENT
from services.core.changeover import vocabulary
from services.core.changeover.epoch_fence import EpochFence
from services.core.changeover.frames import Activations, MemberFrame, Samples, activations
from services.core.changeover.state import DRAIN_TIMEOUT_S, Changeover
from services.core.groups.layer_map import Stage
from services.core.planner.batch import SampleSpec
from services.core.planner.config import IterationConfig
from services.core.planner.events import (
    EmitToken,
    IterationDropped,
    IterationFinished,
    MoveBlocks,
    Planned,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.sequence_ids import SequenceIdSource, request_id_of
from services.core.planner.state import PlannerState
from services.core.request import Request
from tests.support.changeover_clients import next_token
from tests.support.fake_stage import Content, FakeMemory, require

if TYPE_CHECKING:
    from tests.support.changeover_world import World

Payload = Mapping[str, tuple[int, ...]]
"""The tokens of a microbatch's chunks, which stand in for hidden states."""


@dataclass
class Packet:
    """A frame in flight."""

    peer: str
    epoch: int
    frame: MemberFrame
    payload: Payload


@dataclass
class Sending:
    """A KV transfer in flight. `packed`: the piece that was read and not yet written."""

    command: vocabulary.SendBlocks
    epoch: int
    had: tuple[int, ...]
    pieces: deque[tuple[int, int]]  # layer, place in the table
    packed: Content | None = None


@dataclass
class WorldMember:
    """A worker's state machine, its memory, and its pending events."""

    world: "World"
    worker_id: str
    memory: FakeMemory
    config: IterationConfig
    slabs_at_once: int = 1
    weights: int = 0  # workers whose slabs are reported as mismatching
    kv_layout: str = ""  # requests move between workers of equal layouts only
    fence: EpochFence[Packet] = field(default_factory=EpochFence)
    ripe: deque[Packet] = field(default_factory=deque)
    control: deque[vocabulary.Event] = field(default_factory=deque)
    events: deque[vocabulary.Event] = field(default_factory=deque)  # of finished transfers
    sending: dict[str, Sending] = field(default_factory=dict)
    restoring: list[vocabulary.Command] = field(default_factory=list)  # of a preparation
    restored: Counter[str] = field(default_factory=Counter)  # slabs by source
    noticed: set[str] = field(default_factory=set)  # lost workers it has noticed
    known: set[str] = field(default_factory=set)  # sequences the sampler knows
    heard_s: float = 0.0  # when it received the newest change

    def __post_init__(self) -> None:
        self.planner = PlannerState(self.config)
        self.machine = Changeover(
            self.worker_id,
            self.memory.num_layers,
            self.planner,
            slabs_at_once=self.slabs_at_once,
            process=f"{self.worker_id}-1",
            kv_layout=self.kv_layout,
        )
        self._names = SequenceIdSource(f"{self.worker_id}-1")
        self._told_lost: frozenset[str] = frozenset()
        self._payload: Payload = {}
        self._later: list[vocabulary.Command] = []
        self._handlers: dict[type, Callable[[Any], vocabulary.Event | None]] = {
            vocabulary.SendFrame: self._send,
            vocabulary.SwitchStage: self._switch,
            vocabulary.ReleaseDeparted: lambda command: self.memory.release_departed(
                command.blocks
            ),
            vocabulary.MeasureRestore: lambda command: self.memory.measure(
                command.first_layer, command.end_layer
            ),
            vocabulary.ShrinkKv: self._shrink,
            vocabulary.MapKv: lambda command: self.memory.map_kv(command.layers),
            vocabulary.UndoRestore: lambda _one: self.memory.undo(),
            MoveBlocks: lambda command: self.memory.relocate(command.moves),
            vocabulary.ConnectMembers: self._begin_restoring,
            vocabulary.RestoreSlab: self._restore,
            vocabulary.EndPreparation: self._end_preparation,
            vocabulary.NoteAborted: self._stop_restoring,
            vocabulary.NoteAdopted: lambda command: self.world.clients.adopt(
                self.worker_id, command
            ),
            vocabulary.NoteMoved: lambda command: self.world.clients.move(self.worker_id, command),
            EmitToken: lambda command: self.world.clients.publish(self.worker_id, command),
            RefuseRequest: lambda command: self.world.clients.publish(self.worker_id, command),
        }

    # --- inputs

    def handle(self, event: vocabulary.Event) -> None:
        """Feed an event to the state machine and execute its commands."""
        self._handle(event)
        later, self._later = self._later, []
        for command in later:
            self._carry_out_later(command)
        self.machine.check_invariants()
        self.memory.check_invariants()
        require(self.planner.pool.num_blocks <= self.memory.num_blocks, "blocks without memory")

    def start(self, request: Request) -> None:
        """Submit a request."""
        name = self._names.new_id(request.request_id)
        if self.machine.seq_id_of(request.request_id) not in self.planner.sequences or (
            self.world.clients.sources[self.worker_id, request.request_id].adopted
        ):
            self.world.clients.begin(self.worker_id, name)
        copy = replace(request, request_id=name, arrival_s=self.now_s)
        self.handle(RequestArrived(self.now_s, copy))

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self.handle(RequestAborted(self.now_s, request_id))

    def take(self, packet: Packet) -> None:
        """Receive a frame: drop it if its epoch is old, hold it if its epoch is newer."""
        if self.fence.admits(packet.epoch, packet):
            self._payload = packet.payload
            self.handle(vocabulary.FrameReceived(self.now_s, packet.peer, packet.frame))

    @property
    def epoch(self) -> int:
        """The epoch of the current configuration."""
        return self.fence.epoch

    def take_control(self) -> None:
        """Handle the next message of the coordinator."""
        event = self.control.popleft()
        if isinstance(event, vocabulary.ConfigurationCommitted):
            self.heard_s = self.now_s
            event = vocabulary.ConfigurationCommitted(self.now_s, event.groups)
        self.handle(event)

    def supersede(self, left: vocabulary.ConfigurationCommitted) -> None:
        """Receive this commit, which replaces an unread one, as members read current records."""
        if self.world.rng.random() < 0.5:
            known = (
                commit
                for commit in self.control
                if isinstance(commit, vocabulary.ConfigurationCommitted)
            )
            for commit in tuple(known):
                self.control.remove(commit)
        self.control.append(left)

    def take_turn(self) -> None:
        """Take a turn: continue changes and transfers in progress."""
        if self.has_lost:
            self._told_lost = self._lost
            self.handle(vocabulary.PeersLost(self.now_s, self._lost))
        if self.machine.needs_turn(self.now_s):
            self.handle(vocabulary.TurnTaken(self.now_s))

    @property
    def has_lost(self) -> bool:
        """Whether the loss of a member of the change is not yet reported to the state machine."""
        if self.ripe:
            return False  # messages sent before the loss come first
        return self._lost != self._told_lost

    @property
    def _lost(self) -> frozenset[str]:
        configuration = self.machine.configuration
        return frozenset(self.noticed & (configuration.members if configuration else set()))

    def launch(self) -> None:
        """Launch a microbatch as first stage, if the planner has one."""
        microbatch = self.machine.plan(self.now_s)
        self.machine.check_invariants()
        if microbatch is None:
            return
        self.note(BATCH, Planned(self.now_s, microbatch))
        sampled, payload = {}, {}
        for chunk in microbatch.batch.chunks:
            payload[chunk.seq_id] = chunk.token_ids
            token = self._run(chunk.seq_id, chunk.start, chunk.token_ids, chunk.sample)
            if token is not None:
                sampled[chunk.seq_id] = token
        if self.planner.stages > 1:
            assert self.machine.configuration is not None
            after = self.machine.configuration.next_worker
            self._send(vocabulary.SendFrame(after, activations(microbatch, 0.0)), payload)
        elif self.world.rng.random() < 0.1:
            self.handle(IterationDropped(self.now_s))
        else:
            self.handle(IterationFinished(self.now_s, sampled, microbatch.number))

    @property
    def may_launch(self) -> bool:
        """Whether the planner might return a microbatch."""
        planner = self.planner
        work = bool(planner.running or planner.waiting)
        if planner.stages > 1 and not planner.in_flight:
            work = work or bool(planner.sequence_table.released)
        return work and self.machine.may_plan and planner.has_slot

    @property
    def now_s(self) -> float:
        return self.world.now_s

    # --- a preparation

    def end_restoring(self) -> None:
        """Finish the background work of a preparation."""
        last = len(self.restoring) - 1
        command = self.restoring.pop(self.world.rng.randint(0, last) if last else 0)
        chance = self.world.rng.random() if self.world.faults else 1.0
        match command:
            case vocabulary.ConnectMembers(attempt=attempt):
                members = self.world.members_of(attempt)
                gone = sorted(members - self.world.members.keys())
                late = sorted(members) if chance < 0.03 else gone
                self.handle(vocabulary.MembersConnected(attempt, late[0] if late else ""))
            case vocabulary.ShrinkKv(attempt=attempt):
                self.handle(vocabulary.KvShrunk(attempt))
            case vocabulary.RestoreSlab(attempt=attempt, slab=slab, holder=holder):
                source = self.world.members.get(holder)
                intact = not holder or (
                    source is not None
                    and slab in source.memory.slabs
                    and source.weights == self.weights
                )
                if not holder and chance < 0.03:
                    self.handle(vocabulary.RestoreFailed("the folder has other parameters"))
                    return
                intact = intact and (not holder or chance > 0.2)
                if intact:
                    self.restored["disk" if not holder else "peer"] += 1
                    self.memory.finish_slab(slab)
                self.handle(vocabulary.SlabVerified(attempt, slab, intact))

    def _begin_restoring(self, command: vocabulary.Command) -> None:
        slabs = [command, *self.restoring]
        alone = not self.restoring or all(isinstance(c, vocabulary.RestoreSlab) for c in slabs)
        require(alone, "two steps of a preparation at once")
        require(len(slabs) <= self.slabs_at_once, "too many slabs at once")
        self.restoring.append(command)

    def _shrink(self, command: vocabulary.ShrinkKv) -> None:
        self.memory.shrink(command.blocks, command.used)
        self._begin_restoring(command)

    def _restore(self, command: vocabulary.RestoreSlab) -> None:
        self.memory.map_slab(command.slab)
        self._begin_restoring(command)

    def _stop_restoring(self, _command: vocabulary.NoteAborted | None = None) -> None:
        self.restoring.clear()

    def _end_preparation(self, command: vocabulary.EndPreparation) -> None:
        self.world.note_answer(command.attempt, self.worker_id, command.refusal)

    # --- commands

    def note(self, kind: str, value: Any) -> None:
        """Hook for what an engine writes into its event log."""

    def _handle(self, event: vocabulary.Event) -> None:
        self.note(EVENT, event)
        for command in self.machine.handle(event):
            self.note(COMMAND, command)
            carry_out = self._handlers.get(type(command))
            if carry_out is None:
                self._later.append(command)
            elif (answer := carry_out(command)) is not None:
                self._handle(answer)

    def _carry_out_later(self, command: vocabulary.Command) -> None:
        match command:
            case vocabulary.RunStage(frame=frame):
                self._follow(frame)
            case vocabulary.SendBlocks():
                self._send_blocks(command)
            case vocabulary.CancelTransfer(transfer_id=transfer_id):
                self.world.fail(self, transfer_id)

    def _send(self, command: vocabulary.SendFrame, payload: Payload | None = None) -> None:
        epoch = self.epoch if command.group is None else command.group.epoch
        self.world.post(command.peer, Packet(self.worker_id, epoch, command.frame, payload or {}))

    def _switch(self, command: vocabulary.SwitchStage) -> vocabulary.StageSwitched:
        new = command.configuration
        waited_s = self.now_s - self.heard_s
        require(waited_s <= DRAIN_TIMEOUT_S or self.world.disturbed, f"it waited {waited_s} s")
        answer = self.memory.set_stage(new.stage.first_layer, new.stage.end_layer)
        self.restoring.clear()
        early = [packet for _, packet in self.fence.early]
        self.fence.enter(new.epoch)
        self.fence.early.clear()
        self.ripe.extend(early)  # each is checked again when it is delivered
        self._told_lost = frozenset()
        return answer

    # --- a stage runs

    def _follow(self, frame: Activations) -> None:
        sampled = {}
        payload, self._payload = self._payload, {}
        for chunk in frame.chunks:
            tokens = payload[chunk.seq_id]
            token = self._run(chunk.seq_id, chunk.start, tokens, chunk.sample)
            if token is not None:
                sampled[chunk.seq_id] = token
        configuration = self.machine.configuration
        assert configuration is not None
        passed_on = Samples(frame.number, sampled) if configuration.is_last else frame
        self._send(vocabulary.SendFrame(configuration.next_worker, passed_on), payload)

    def _run(
        self, name: str, start: int, tokens: tuple[int, ...], sample: SampleSpec | None
    ) -> int | None:
        """Run a chunk through this stage's layers; at the last stage, return the sampled token."""
        truth, kv = self.world.clients.truth(name), self.world.clients.kv(name)
        owner = (
            "" if self.config.prefix_caching else name
        )  # shared KV may have been written by another sequence
        end = start + len(tokens)
        require(tokens == truth[start:end], f"{name} runs tokens that are not its own")
        block_ids = self.planner.table.block_ids(name)
        for layer in self.memory.layers:
            before = self.memory.read(layer, block_ids, owner, start)
            require(before == kv[:start], f"{name} reads {before} at {self.worker_id}")
            self.memory.write(layer, block_ids, owner, start, kv[start:end])
        is_last = self.memory.layers.stop == self.memory.num_layers
        return self._sample(name, truth[:end], sample) if sample and is_last else None

    def _sample(self, name: str, tokens: tuple[int, ...], sample: SampleSpec) -> int:
        self.known = {seq_id for seq_id in self.known if seq_id in self.planner.table}
        require(sample.terms is not None or name in self.known, f"{name} has no terms")
        self.known.add(name)
        prompt = self.world.clients.streams[request_id_of(name)].request.prompt_ids
        require(sample.index == len(tokens) - len(prompt), f"{name} samples {sample.index}")
        return next_token(tokens)

    # --- KV leaves

    def _send_blocks(self, command: vocabulary.SendBlocks) -> None:
        layers = range(command.transfer.first_layer, command.transfer.end_layer)
        pieces = deque((layer, place) for layer in layers for place in range(command.blocks))
        had = self.planner.table.block_ids(command.seq_id)
        self.sending[command.transfer_id] = Sending(command, self.epoch, had, pieces)

    def pack(self, sending: Sending) -> bool:
        """Read the next piece; False if the sequence no longer exists."""
        layer, place = sending.pieces[0]
        ids = self.planner.table.block_ids(sending.command.seq_id)
        if len(ids) <= place or ids[place] != sending.had[place] or sending.epoch != self.epoch:
            return False
        sending.packed = self.memory.pack(layer, ids[place])
        return True

    def unpack(self, sending: Sending) -> bool:
        """Store the piece that was read; False if the receiver no longer expects it."""
        command, (layer, place) = sending.command, sending.pieces[0]
        ids = self.machine.kv_blocks_for(command.transfer_id, command.seq_id)
        if place >= len(ids) or sending.epoch != self.epoch:
            return False
        assert sending.packed is not None
        self.memory.unpack(layer, ids[place], sending.packed)
        sending.pieces.popleft()
        sending.packed = None
        return True

    def alone(self) -> Stage:
        """A stage of all layers."""
        return Stage(self.worker_id, 0, self.memory.num_layers)
