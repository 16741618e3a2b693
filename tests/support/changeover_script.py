"""Members of a change-over driven by hand: the test delivers each frame explicitly.

Real: `Changeover`, the planner, the fence. Memory is that of `FakeMemory` for the workers named
`remembering`; the others have unlimited blocks, and no KV departs there.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Self

from services.core.changeover import vocabulary
from services.core.changeover.configuration import GroupStages
from services.core.changeover.epoch_fence import EpochFence
from services.core.changeover.frames import Activations, MemberFrame, Samples, activations
from services.core.changeover.state import Changeover, MemberConfig
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.core.groups.layer_map import Stage
from services.core.planner.config import IterationConfig
from services.core.planner.events import IterationFinished, MoveBlocks, RequestArrived
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling
from services.core.service import DEFAULT_SERVICE, Service
from tests.support.fake_stage import FakeMemory

LAYERS = 4
BLOCK_SIZE = 4
TOKEN = 7
TURNS_MAX = 300

Groups = tuple[GroupStages, ...]


def groups(epoch: int, *members: str) -> Groups:
    """Groups by their workers: "ab" is a pipeline of "a" and "b", with equal shares of layers."""
    built = []
    for names in members:
        cuts = [LAYERS * number // len(names) for number in range(len(names) + 1)]
        stages = tuple(Stage(name, cuts[i], cuts[i + 1]) for i, name in enumerate(names))
        built.append(GroupStages(f"g-{names[0]}", epoch, stages))
    return tuple(built)


class Script:
    """Workers with names of one letter. `ways`: frames by sender and receiver, with their epochs.

    `stopped`: ways on which `settle` delivers nothing. `sending`: transfers in progress. `steps`:
    pending background work of a preparation, by worker.
    """

    def __init__(
        self,
        workers: str,
        blocks: int = 16,
        remembering: str = "",
        scheduling: Scheduling = Scheduling.FCFS,
        shelf_max_s: float = 60.0,
    ) -> None:
        config = IterationConfig(
            BLOCK_SIZE,
            blocks,
            max_batch_tokens=64,
            max_running=4,
            max_waiting=9,
            scheduling=scheduling,
            shelf_max_s=shelf_max_s,
        )
        self.members = {
            name: Changeover.of(MemberConfig(name, LAYERS, tied_embeddings=False, planner=config))
            for name in workers
        }
        self.memories = {name: FakeMemory(LAYERS, blocks, slab_units=5) for name in remembering}
        self.ways: dict[tuple[str, str], deque[tuple[int, MemberFrame]]] = defaultdict(deque)
        self.stopped: set[tuple[str, str]] = set()
        self.sending: dict[str, vocabulary.SendBlocks] = {}
        self.transfers_run = True
        self.steps: dict[str, vocabulary.Command] = {}
        self.now_s = 0.0
        self._blocks = blocks
        self._fences: dict[str, EpochFence[tuple[str, MemberFrame]]] = {
            name: EpochFence() for name in workers
        }
        self._lost: frozenset[str] = frozenset()

    # --- inputs of a member; each returns its commands except those that send frames

    def do(self, name: str, event: vocabulary.Event) -> list[vocabulary.Command]:
        """Feed an event to a member and execute its commands."""
        commands = self._handle(name, event)
        self.members[name].check_invariants()
        return commands

    def turn(self, name: str) -> list[vocabulary.Command]:
        """Let a member take a turn."""
        return self.do(name, vocabulary.TurnTaken(self.now_s))

    def hear(self, new: Groups, *names: str) -> None:
        """Deliver a commit to the named members, or to all."""
        for name in names or sorted({worker for group in new for worker in group.workers}):
            self.do(name, vocabulary.ConfigurationCommitted(self.now_s, new))

    def change(self, new: Groups, *names: str) -> Self:
        """Deliver a commit to the named members, or to all, and settle."""
        self.hear(new, *names)
        self.settle()
        return self

    def advance(self, leader: str) -> None:
        """Launch a microbatch, and settle."""
        self.launch(leader)
        self.settle()

    def reconnect(self) -> None:
        """Resume delivery on all stopped ways."""
        self.stopped.clear()
        self.settle()

    def ask(
        self,
        leader: str,
        name: str,
        tokens: int,
        most: int = 4,
        service: Service = DEFAULT_SERVICE,
        *,
        resumable: bool = False,
    ) -> list[vocabulary.Command]:
        """Submit a request with `tokens` prompt tokens and up to `most` output tokens."""
        prompt, limits = (5,) * tokens, Limits(most)
        request = Request(name, prompt, Sampling(), limits, self.now_s, service=service)
        request = replace(request, resumable=resumable)
        return self.do(leader, RequestArrived(self.now_s, request))

    def receive(self, peer: str, name: str, frame: MemberFrame) -> list[vocabulary.Command]:
        """Deliver a frame of the current epoch from `peer` to `name`."""
        return self.do(name, vocabulary.FrameReceived(self.now_s, peer, frame))

    def deliver(self, source: str, peer: str) -> list[vocabulary.Command]:
        """Deliver the next frame on a way."""
        epoch, frame = self.ways[source, peer].popleft()
        if not self._fences[peer].admits(epoch, (source, frame)):
            return []
        return self.receive(source, peer, frame)

    def launch(self, leader: str) -> bool:
        """Run what the leader plans as its first stage; False if there is nothing."""
        member = self.members[leader]
        microbatch = member.plan(self.now_s)
        if microbatch is None:
            return False
        frame = activations(microbatch, 0.0)
        if member.planner.stages > 1:
            configuration = member.configuration
            assert configuration is not None
            self._send(leader, vocabulary.SendFrame(configuration.next_worker, frame))
        else:
            self.do(leader, IterationFinished(self.now_s, _sampled(frame), frame.number))
        return True

    def run(self, leader: str, microbatches: int = 40) -> None:
        """Launch and settle until there is nothing to run, at most `microbatches` times."""
        for _ in range(microbatches):
            if not self.launch(leader):
                return
            self.settle()

    def lose(self, lost: str) -> None:
        """Kill a worker; all others notice."""
        del self.members[lost]
        self._lost |= {lost}
        for way in [way for way in self.ways if lost in way]:
            del self.ways[way]
        for name in self.members:
            self.do(name, vocabulary.PeersLost(self.now_s, self._lost))

    def go_on(
        self, name: str, *, unreachable: str = "", intact: bool = True
    ) -> list[vocabulary.Command]:
        """Finish the background work of a member's preparation."""
        match self.steps.pop(name):
            case vocabulary.ConnectMembers(attempt=attempt):
                return self.do(name, vocabulary.MembersConnected(attempt, unreachable))
            case vocabulary.ShrinkKv(attempt=attempt):
                return self.do(name, vocabulary.KvShrunk(attempt))
            case vocabulary.RestoreSlab(attempt=attempt, slab=slab):
                if intact:
                    self.memories[name].finish_slab(slab)
                return self.do(name, vocabulary.SlabVerified(attempt, slab, intact))
        raise AssertionError("nothing of that kind goes on")

    def settle(self) -> None:
        """Deliver frames and KV and take turns until nothing changes."""
        idle = 0
        for _ in range(TURNS_MAX):
            if self._bring_frame() or self._end_transfer():
                continue
            members, now_s = self.members, self.now_s
            busy = [name for name in members if members[name].needs_turn(now_s)]
            moved = [self.turn(name) for name in busy]
            idle = 0 if any(moved) or self._open_ways else idle + 1
            if idle == 2:
                return
        raise AssertionError("no end of it")

    # --- queries

    def names_at(self, name: str) -> list[str]:
        """Names of a member's sequences."""
        return list(self.members[name].planner.sequences)

    def taken_at(self, name: str) -> int:
        """Number of a member's blocks in use."""
        return self.members[name].planner.pool.taken_count

    # ---

    @property
    def _open_ways(self) -> list[tuple[str, str]]:
        return [way for way, queue in self.ways.items() if queue and way not in self.stopped]

    def _bring_frame(self) -> bool:
        for way in self._open_ways[:1]:
            self.deliver(*way)
            return True
        return False

    def _end_transfer(self) -> bool:
        if not (self.sending and self.transfers_run):
            return False
        self.end_transfer(next(reversed(self.sending)))
        return True

    def end_transfer(self, transfer_id: str) -> None:
        """Complete a KV transfer, if both ends are still in its epoch."""
        command = self.sending.pop(transfer_id)
        source, peer = command.transfer.source, command.transfer.destination
        epoch = int(transfer_id.split("/")[0])
        ends = [name for name in (source, peer) if name in self.members]
        intact = [self._fences[name].epoch for name in ends] == [epoch, epoch]
        for name in ends:
            status = TransferStatus.SENT if name == source else TransferStatus.RECEIVED
            status = status if intact else TransferStatus.FAILED
            self.do(name, TransferOutcome(transfer_id, status))

    def _handle(self, name: str, event: vocabulary.Event) -> list[vocabulary.Command]:
        frames: list[vocabulary.Command] = []
        for command in self.members[name].handle(event):
            if isinstance(command, vocabulary.SendFrame):
                self._send(name, command)
                continue
            frames.append(command)
            if isinstance(command, vocabulary.SwitchStage):
                frames += self._switch(name, command)
            elif (answer := self._answer(name, command)) is not None:
                frames += self._handle(name, answer)
        return frames

    def _send(self, name: str, command: vocabulary.SendFrame) -> None:
        epoch = self._fences[name].epoch if command.group is None else command.group.epoch
        if command.peer in self.members:
            self.ways[name, command.peer].append((epoch, command.frame))

    def _switch(self, name: str, command: vocabulary.SwitchStage) -> list[vocabulary.Command]:
        stage, memory = command.configuration.stage, self.memories.get(name)
        answer = vocabulary.StageSwitched(self._blocks, departed=False)
        if memory is not None:
            answer = memory.set_stage(stage.first_layer, stage.end_layer)
        early = self._fences[name].enter(command.configuration.epoch)
        self.steps.pop(name, None)
        commands = self._handle(name, answer)
        for peer, frame in early:
            commands += self._handle(name, vocabulary.FrameReceived(self.now_s, peer, frame))
        if self._lost:
            commands += self._handle(name, vocabulary.PeersLost(self.now_s, self._lost))
        return commands

    def _answer(self, name: str, command: vocabulary.Command) -> vocabulary.Event | None:
        match command:
            case vocabulary.RunStage(frame=frame):
                self._run(name, frame)
            case vocabulary.SendBlocks(transfer_id=transfer_id):
                self.sending[transfer_id] = command
            case vocabulary.CancelTransfer(transfer_id=transfer_id):
                self.sending.pop(transfer_id, None)
            case vocabulary.ConnectMembers():
                self.steps[name] = command
            case vocabulary.NoteAborted():
                self.steps.pop(name, None)
            case vocabulary.MeasureRestore() if name not in self.memories:
                return vocabulary.RestoreMeasured(self._blocks, (), ())
            case _ if name in self.memories:
                return self._remember(name, self.memories[name], command)
        return None

    def _remember(
        self, name: str, memory: FakeMemory, command: vocabulary.Command
    ) -> vocabulary.Event | None:
        match command:
            case vocabulary.ShrinkKv(blocks=blocks, used=used):
                memory.shrink(blocks, used)
                self.steps[name] = command
            case vocabulary.RestoreSlab(slab=slab):
                memory.map_slab(slab)
                self.steps[name] = command
            case MoveBlocks(moves=moves):
                memory.relocate(moves)
            case vocabulary.MeasureRestore(first_layer=first_layer, end_layer=end_layer):
                return memory.measure(first_layer, end_layer)
            case vocabulary.ReleaseDeparted(blocks=blocks):
                return memory.release_departed(blocks)
            case vocabulary.MapKv(layers=layers):
                return memory.map_kv(layers)
            case vocabulary.UndoRestore():
                return memory.undo()
        return None

    def _run(self, name: str, frame: Activations) -> None:
        configuration = self.members[name].configuration
        assert configuration is not None
        passed_on = Samples(frame.number, _sampled(frame)) if configuration.is_last else frame
        self._send(name, vocabulary.SendFrame(configuration.next_worker, passed_on))


def _sampled(frame: Activations) -> dict[str, int]:
    return {chunk.seq_id: TOKEN for chunk in frame.chunks if chunk.sample is not None}


def kinds(commands: Iterable[vocabulary.Command]) -> list[type]:
    """Types of commands."""
    return [type(command) for command in commands]
