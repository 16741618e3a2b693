"""A change-over world in which running requests also move between groups with their KV.

Moves begin at any moment between any two single workers, of any number of requests, and some
requests are handed over after their prompt; groups merge and split, workers die, parts fail and
requests end meanwhile. A client resumes at the worker that has its KV, else at some leader. Besides
the oracle of `World`, the event logs of all engines and of the gateway are audited: a request runs
at one worker at a time (I15).
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

from services.core.changeover import vocabulary
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.core.destination import Destination
from services.core.planner.config import IterationConfig
from services.core.planner.events import EmitToken, RefuseRequest, RequestArrived
from services.core.planner.sequence_ids import request_id_of
from services.core.request import Request
from services.core.shipments.orders import may_move
from services.core.shipments.vocabulary import (
    CancelShipping,
    ShipBlocks,
    ShipmentFrame,
    ShippingAsked,
    ShippingOver,
    ShippingPeerLost,
)
from tests.support.changeover_clients import Clients, Source, Stream
from tests.support.changeover_member import Packet, WorldMember
from tests.support.changeover_world import World
from tests.support.fake_stage import FakeMemory, require
from tests.support.request_logs import RequestLogs

FRAMES = frozenset(get_args(ShipmentFrame))
PART_FAILS = 0.02


class ResumingClients(Clients):
    """Clients whose gateway resumes them after their last token."""

    def __init__(self, logs: RequestLogs) -> None:
        super().__init__()
        self.logs = logs
        self.go_to: dict[str, Destination] = {}  # by request that was just returned
        self.shipped = 0

    def begin(self, worker_id: str, name: str) -> None:
        request_id = request_id_of(name)
        tokens = list(self.streams[request_id].tokens)
        self.sources[worker_id, request_id] = Source(name, tokens)

    def publish(self, worker_id: str, command: EmitToken | RefuseRequest) -> None:
        request_id = request_id_of(command.request_id)
        if isinstance(command, RefuseRequest) and command.go_to is not None:
            self.shipped += 1
            if self.streams[request_id].owner == worker_id:
                self.go_to[request_id] = command.go_to
        super().publish(worker_id, command)

    def start(self, request_id: str, *rest: Any) -> Stream:
        stream = super().start(request_id, *rest)
        self.logs.open(request_id, stream.request.limits.max_tokens)
        self.logs.read_from(request_id, stream.owner, moved=False)
        return stream

    def resume(self, stream: Stream) -> None:
        """Start a request at its new owner."""
        self.logs.read_from(stream.request.request_id, stream.owner, moved=False)

    def _read(self, request_id: str) -> None:
        stream = self.streams[request_id]
        self._note_owner(request_id, stream)
        super()._read(request_id)
        self.logs.forward(request_id, stream.tokens)
        if stream.finished and request_id in self.logs.segments:
            self.logs.end(request_id, "length")

    def _note_owner(self, request_id: str, stream: Stream) -> None:
        """Log that a gateway followed a sequence to its new owner."""
        segments = self.logs.segments.get(request_id)
        if segments and stream.owner and segments[-1].worker_id != stream.owner:
            self.logs.forward(request_id, stream.tokens)
            self.logs.read_from(request_id, stream.owner, moved=True)

    def _lose(self, stream: Stream, ask_again: bool) -> None:
        request_id = stream.request.request_id
        self._note_owner(request_id, stream)
        source = self.sources.get((stream.owner, request_id))
        if source is not None and source.returned:
            self.logs.note_returned(request_id)
        if ask_again:
            stream.lost, stream.owner = True, ""
        else:
            stream.aborted = True


@dataclass
class Part:
    """Blocks of a shipment in flight, `copied` of them in all layers."""

    command: ShipBlocks
    copied: int = 0


@dataclass
class MovingMember(WorldMember):
    """A member that moves requests."""

    parts: list[Part] = field(default_factory=list)
    told_lost: set[str] = field(default_factory=set)
    answers: dict[str, ShippingOver] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._handlers |= {
            ShipBlocks: lambda command: self.parts.append(Part(command)),
            CancelShipping: lambda command: self.fail_part(command.transfer_id),
            ShippingOver: self._note_answer,
        }
        self._logs.start_engine(self.worker_id, self.memory.num_layers)

    def start(self, request: Request) -> None:
        world = self.world
        assert isinstance(world, RebalancedWorld)
        super().start(world.with_target(request, self.worker_id))

    @property
    def _logs(self) -> RequestLogs:
        assert isinstance(self.world, RebalancedWorld)
        return self.world.logs

    def note(self, kind: str, value: Any) -> None:
        self._logs.log(self.worker_id, kind, value)

    def _switch(self, command: vocabulary.SwitchStage) -> vocabulary.StageSwitched:
        self._logs.switch(self.now_s, self.worker_id, command.configuration)
        return super()._switch(command)

    def _note_answer(self, answer: ShippingOver) -> None:
        self.answers[answer.order] = answer

    def take(self, packet: Packet) -> None:
        """Receive a frame; frames of shipments pass between any epochs."""
        if type(packet.frame) in FRAMES:
            self.handle(vocabulary.FrameReceived(self.now_s, packet.peer, packet.frame))
        else:
            super().take(packet)

    def resume(self, stream: Stream) -> None:
        """Resume a request here after its last token."""
        request = replace(stream.request, output_ids=tuple(stream.tokens))
        name = self._names.new_id(request.request_id)
        current = self.machine.seq_id_of(request.request_id)
        adopted = (
            current in self.planner.sequences
            and self.world.clients.sources[self.worker_id, request.request_id].adopted
        )
        if current not in self.planner.sequences or adopted:
            self.world.clients.begin(self.worker_id, name)
        copy = replace(request, request_id=name, arrival_s=self.now_s)
        self.handle(RequestArrived(self.now_s, copy))

    def copy_block(self, part: Part, target: "MovingMember") -> bool:
        """Copy the next block of a part in all layers; False if either end has released it."""
        command, place = part.command, part.command.first + part.copied
        source = self.planner.table.block_ids(command.pin)[place : place + 1]
        landing = target.machine.landing_blocks(command.transfer_id, command.remote_pin, place, 1)
        if not (source and landing):
            return False
        require(self.memory.layers == target.memory.layers, "KV of other layers is sent")
        for layer in self.memory.layers:
            target.memory.unpack(layer, landing[0], self.memory.pack(layer, source[0]))
        part.copied += 1
        return True

    def fail_part(self, transfer_id: str) -> None:
        """Fail a part; both ends are notified."""
        for part in [part for part in self.parts if part.command.transfer_id == transfer_id]:
            self.parts.remove(part)
            failed = TransferOutcome(transfer_id, TransferStatus.FAILED)
            self.events.append(failed)
            peer = self.world.members.get(part.command.peer)
            if peer is not None:
                peer.events.append(failed)


class RebalancedWorld(World):
    """`World` with cached prefixes and longer requests; `moves` counts orders.

    `handed`: share of requests to hand over to another single worker.
    """

    blocks_of_a_worker = (8, 16, 24)
    checks: Counter[str]
    """Number of the audit's checks by invariant, at the end."""

    def __init__(self, seed: int, handed: float = 0.0, **options: Any) -> None:
        self._moves = random.Random(seed)
        self._handed, self._targets = handed, random.Random(-seed)
        self.logs = RequestLogs()
        super().__init__(seed, prefixes=True, **options)
        self.clients = self.resuming = ResumingClients(self.logs)
        self.moves = 0

    def _new_member(self, name: str, memory: FakeMemory, config: IterationConfig) -> WorldMember:
        return MovingMember(self, name, memory, config, *self._slabs(), kv_layout="layout")

    def check_rest(self) -> None:
        super().check_rest()
        findings = self.logs.audit()
        require(not findings.violations, "; ".join(findings.violations))
        self.checks = findings.checks

    def step(self) -> None:
        super().step()
        if self._moves.random() < 0.5:
            self.start()
            self.turns(20)
            self.move()
            # Groups change rarely, so that most moves complete.
            self.turns(self._moves.choice((5, 60, 120)))

    def move(self) -> None:
        """Order a move between two single workers, as the memory manager knows them."""
        single = [group[0].worker_id for group in self.groups if len(group) == 1]
        single = [name for name in single if name in self.members]
        if len(single) < 2:
            return
        source, target = self._moves.sample(single, 2)
        decoding = [name for name in single if self._decodes(name)]
        if decoding and self._moves.random() < 0.9:
            source = self._moves.choice(decoding)
            target = self._moves.choice([name for name in single if name != source])
        self.moves += 1
        place = Destination(target, target, f"g-{target}", self.members[target].epoch)
        limits = self._moves.choice((0, 1, 3)), False, self._moves.choice((0, 2, 5))
        self.members[source].handle(
            ShippingAsked(self.now_s, f"order-{self.moves}", place, *limits)
        )

    def with_target(self, request: Request, source: str) -> Request:
        """A request as sent by the gateway: with the worker that computes its output, if any."""
        if self._targets.random() >= self._handed:
            return request
        single = [group[0].worker_id for group in self.groups if len(group) == 1]
        others = sorted(name for name in single if name in self.members and name != source)
        if not others:
            return request
        target = self._targets.choice(others)
        place = Destination(target, target, f"g-{target}", self.members[target].epoch)
        return replace(request, hand_to=place)

    def _decodes(self, name: str) -> bool:
        """Whether a worker has a movable request."""
        running = self.members[name].planner.running
        return any(may_move(sequence, self.now_s) for sequence in running)

    def lose(self) -> None:
        before = set(self.members)
        members = {name: self._moving(name) for name in before}
        super().lose()
        for lost in before - self.members.keys():
            for part in list(members[lost].parts):
                members[lost].fail_part(part.command.transfer_id)
            for member in map(self._moving, self.members):
                for part in [part for part in member.parts if part.command.peer == lost]:
                    member.fail_part(part.command.transfer_id)

    def _moving(self, name: str) -> MovingMember:
        member = self.members[name]
        assert isinstance(member, MovingMember)
        return member

    def _arrivals(self) -> list[Callable[[], None]]:
        arrivals = super()._arrivals()
        for member in map(self._moving, self.members):
            arrivals += [partial(self._move_part, member, part) for part in member.parts]
            if unknown := sorted(member.noticed - member.told_lost):
                arrivals.append(partial(self._tell_lost, member, unknown[0]))
        return arrivals

    def _tell_lost(self, member: MovingMember, lost: str) -> None:
        member.told_lost.add(lost)
        member.handle(ShippingPeerLost(lost))

    def _move_part(self, source: MovingMember, part: Part) -> None:
        command, chance = part.command, self._moves.random()
        fails = self.faults and chance < PART_FAILS
        if fails or not source.copy_block(part, self._moving(command.peer)):
            source.fail_part(command.transfer_id)
        elif part.copied == command.blocks:
            source.parts.remove(part)
            source.events.append(TransferOutcome(command.transfer_id, TransferStatus.SENT))
            self.members[command.peer].events.append(
                TransferOutcome(command.transfer_id, TransferStatus.RECEIVED)
            )

    def _ask_again(self, stream: Stream) -> None:
        """Resume where the KV is, unless that group has changed; otherwise at a random leader."""
        name = stream.request.request_id
        place = self.resuming.go_to.pop(name, None)
        leaders = [group[0].worker_id for group in self.groups if self._serves(group)]
        stream.lost = False
        if place is not None and self._is_current(place):
            stream.owner = place.worker_id
        elif leaders:
            stream.owner = self.rng.choice(leaders)
        else:
            stream.aborted = True
            return
        self.clients.asked_again += 1
        member, source = self._moving(stream.owner), self.clients.sources.get((stream.owner, name))
        if source is not None and not source.returned:
            member.abort(name)
        self.resuming.resume(stream)
        member.resume(stream)

    def _is_current(self, place: Destination) -> bool:
        member = self.members.get(place.worker_id)
        return member is not None and member.epoch == place.epoch and member.machine.leads
