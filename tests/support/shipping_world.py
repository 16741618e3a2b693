"""Workers that ship requests to each other: core state machines and a KV that records tokens.
tokens.

A seeded random order decides which frame arrives next, which part moves on and who takes a turn, so
that tests explore interleavings reproducibly. Every token that runs checks the KV
before it: KV of other tokens, or of another salt, fails the test.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from services.core.changeover import vocabulary
from services.core.changeover.move_window import LINK_BLOCKS_PER_S
from services.core.changeover.state import Changeover
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.core.destination import Destination
from services.core.planner.config import IterationConfig
from services.core.planner.events import (
    EmitToken,
    IterationFinished,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.sequence_ids import SequenceIdSource, request_id_of
from services.core.planner.state import PlannerState
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass
from services.core.shipments.vocabulary import (
    CancelShipping,
    ShipBlocks,
    ShippingAsked,
    ShippingOver,
    ShippingPeerLost,
)

BLOCK_SIZE = 4
VOCABULARY = 50
TURN_S = 0.01
TURNS_MAX = 100_000
GREEDY = Sampling(temperature=0.0)

Content = tuple[str, tuple[int, ...]]
"""The KV of a position: the salt, and the tokens up to it."""


def next_token(tokens: tuple[int, ...]) -> int:
    return (sum((place + 1) * token for place, token in enumerate(tokens)) + 7 * len(tokens)) % 47


def output_of(request: Request) -> list[int]:
    """The output of an undisturbed run."""
    tokens = request.prompt_ids
    for _ in range(request.limits.max_tokens):
        tokens = (*tokens, next_token(tokens))
    return list(tokens[len(request.prompt_ids) :])


@dataclass
class Client:
    """A request and the tokens that its gateway has received."""

    request: Request
    worker: str
    tokens: list[int] = field(default_factory=list)
    over: bool = False
    moves: int = 0


@dataclass
class Part:
    """A transfer in flight."""

    source: str
    command: ShipBlocks
    copied: int = 0
    ends: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class Node:
    """A worker."""

    name: str
    world: "ShippingWorld"
    machine: Changeover
    ids: SequenceIdSource
    kv: dict[tuple[int, int], Content] = field(default_factory=dict)
    ran: int = 0  # tokens

    @property
    def planner(self) -> PlannerState:
        return self.machine.planner

    def handle(self, event: Any) -> None:
        for command in self.machine.handle(event):
            self.world.carry_out(self, command)
        self.machine.check_invariants()

    def turn(self) -> None:
        """A turn of the engine: its work between iterations, then an iteration."""
        if self.machine.needs_turn(self.world.now_s):
            self.handle(vocabulary.TurnTaken(self.world.now_s))
        microbatch = self.machine.plan(self.world.now_s)
        if microbatch is None:
            return
        sampled = {}
        for chunk in microbatch.batch.chunks:
            sequence = self.planner.sequences[chunk.seq_id]
            salt, tokens = sequence.request.cache_salt, tuple(sequence.token_ids)
            end = chunk.start + len(chunk.token_ids)
            slots = [(block, slot) for block in chunk.block_ids for slot in range(BLOCK_SIZE)]
            for place in range(chunk.start):
                assert self.kv[slots[place]] == (salt, tokens[: place + 1]), "KV of other tokens"
            for place in range(chunk.start, end):
                self.kv[slots[place]] = salt, tokens[: place + 1]
            self.ran += len(chunk.token_ids)
            if chunk.sample is not None:
                sampled[chunk.seq_id] = next_token(tokens)
        self.handle(IterationFinished(self.world.now_s, sampled, microbatch.number))


class ShippingWorld:
    """`workers` single-worker groups w0, w1, …, with `num_blocks` KV blocks each."""

    def __init__(
        self,
        seed: int,
        workers: int = 2,
        num_blocks: int = 64,
        layouts: tuple[str, ...] = (),
        layer_blocks_per_s: float = LINK_BLOCKS_PER_S,
    ) -> None:
        """`layouts`: the KV layout of each worker, equal by default."""
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.clients: dict[str, Client] = {}
        self.answers: dict[str, ShippingOver] = {}
        self.frames: dict[tuple[str, str], deque[Any]] = {}
        self.parts: list[Part] = []
        self.nodes: dict[str, Node] = {}
        self._orders = 0
        config = IterationConfig(BLOCK_SIZE, num_blocks, 16, 8, 100, prefix_caching=True)
        for number in range(workers):
            name = f"w{number}"
            layout = layouts[number] if layouts else "layout"
            machine = Changeover(
                *(name, 1, PlannerState(config)),
                process=f"{name}-1",
                kv_layout=layout,
                link_blocks_per_s=layer_blocks_per_s,
            )
            self.nodes[name] = Node(name, self, machine, SequenceIdSource(f"{name}-1"))

    # --- clients and orders

    def start(
        self,
        name: str,
        prompt: tuple[int, ...],
        tokens: int,
        worker: str,
        salt: str = "",
        classes: tuple[ServiceClass, ...] = (ServiceClass.STANDARD,),
        hand_to: str = "",
        resumable: bool = True,
        stops: bool = False,
    ) -> Client:
        """`hand_to`: worker to hand it over to. `stops`: ends at its first token."""
        service = Service(self.rng.choice(classes))
        ends = frozenset({next_token(prompt)}) if stops else frozenset[int]()
        limits = Limits(tokens, stop_token_ids=ends)
        request = Request(name, prompt, GREEDY, limits, 0.0, service=service, cache_salt=salt)
        place = self.place_of(hand_to) if hand_to else None
        request = replace(request, resumable=resumable, hand_to=place)
        client = self.clients[name] = Client(request, worker)
        self._start(client)
        return client

    def abort(self, name: str) -> None:
        client = self.clients[name]
        client.over = True
        self.nodes[client.worker].handle(RequestAborted(self.now_s, name))

    def ship(self, source: str, target: str, requests_max: int = 0, blocks_max: int = 0) -> str:
        self._orders += 1
        order = f"order-{self._orders}"
        place = self.place_of(target)
        self.nodes[source].handle(
            ShippingAsked(self.now_s, order, place, requests_max, blocks_max=blocks_max)
        )
        return order

    def place_of(self, worker: str) -> Destination:
        return Destination(worker, f"address of {worker}", f"group-{worker}", 1)

    def part(self, name_a: str, name_b: str) -> None:
        """Break the connection of a pair, losing all in flight; a later connection is new."""
        for pair in ((name_a, name_b), (name_b, name_a)):
            self.frames.pop(pair, None)
        for part in [p for p in self.parts if {p.source, p.command.peer} == {name_a, name_b}]:
            self._fail(part)
        for name, peer in ((name_a, name_b), (name_b, name_a)):
            self.nodes[name].handle(ShippingPeerLost(peer))

    def _start(self, client: Client) -> None:
        node, request = self.nodes[client.worker], client.request
        seq_id = node.ids.new_id(request.request_id)
        started = replace(
            request, request_id=seq_id, output_ids=tuple(client.tokens), arrival_s=self.now_s
        )
        node.handle(RequestArrived(self.now_s, started))

    # --- steps

    def carry_out(self, node: Node, command: Any) -> None:
        match command:
            case vocabulary.SendFrame(peer=peer, frame=frame):
                self.frames.setdefault((node.name, peer), deque()).append(frame)
            case ShipBlocks():
                self.parts.append(Part(node.name, command))
            case CancelShipping(transfer_id=transfer_id):
                for part in [p for p in self.parts if p.command.transfer_id == transfer_id]:
                    self._fail(part)
            case ShippingOver(order=order):
                self.answers[order] = command
            case EmitToken():
                self._note_token(node, command)
            case RefuseRequest():
                self._note_refusal(node, command)
            case _:
                raise AssertionError(command)

    def turn(self) -> None:
        """Run a random possible step."""
        self.now_s += TURN_S
        actions = [node.turn for node in self.nodes.values()]
        actions += [partial(self._deliver, pair) for pair, row in self.frames.items() if row]
        actions += [partial(self._move, part) for part in self.parts]
        self.rng.choice(actions)()

    def run_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(TURNS_MAX):
            if condition():
                return
            self.turn()
        raise AssertionError(f"stuck: {self.clients}, {self.parts}, {self.frames}")

    def finish(self) -> None:
        """Run until all requests end; check that all blocks are free and all outputs right."""
        self.run_until(lambda: all(client.over for client in self.clients.values()))
        self.run_until(lambda: not any(n.machine.shipping.active for n in self.nodes.values()))
        for node in self.nodes.values():
            pool = node.planner.pool
            assert not node.planner.table.seq_ids and pool.free_count == pool.usable
        for client in self.clients.values():
            assert client.tokens == output_of(client.request)[: len(client.tokens)]

    def _deliver(self, pair: tuple[str, str]) -> None:
        source, target = pair
        frame = self.frames[pair].popleft()
        self.nodes[target].handle(vocabulary.FrameReceived(self.now_s, source, frame))

    def _move(self, part: Part) -> None:
        """Copy a block of a part, or report its end at a worker."""
        command = part.command
        if part.ends:
            part.ends.pop(self.rng.randrange(len(part.ends)))()
            if not part.ends:
                self.parts.remove(part)
            return
        place = command.first + part.copied
        here, there = self.nodes[part.source], self.nodes[command.peer]
        source = here.planner.table.block_ids(command.pin)[place : place + 1]
        target = there.machine.landing_blocks(command.transfer_id, command.remote_pin, place, 1)
        if not (source and target):
            self._fail(part)
            return
        for slot in range(BLOCK_SIZE):
            there.kv[target[0], slot] = here.kv[source[0], slot]
        part.copied += 1
        if part.copied == command.blocks:
            part.ends = [
                partial(self._end, here, command, TransferStatus.SENT),
                partial(self._end, there, command, TransferStatus.RECEIVED),
            ]

    def _end(self, node: Node, command: ShipBlocks, status: TransferStatus) -> None:
        node.handle(TransferOutcome(command.transfer_id, status))

    def _fail(self, part: Part) -> None:
        if part in self.parts:
            self.parts.remove(part)
            for name in (part.source, part.command.peer):
                self._end(self.nodes[name], part.command, TransferStatus.FAILED)

    def _note_token(self, node: Node, token: EmitToken) -> None:
        client = self.clients[request_id_of(token.request_id)]
        if client.over:
            return
        assert client.worker == node.name, "two workers run a request"
        assert token.index == len(client.tokens)
        client.tokens.append(token.token_id)
        client.over = token.finish_reason is not None

    def _note_refusal(self, node: Node, refusal: RefuseRequest) -> None:
        client = self.clients[request_id_of(refusal.request_id)]
        assert refusal.returned and refusal.go_to is not None and client.worker == node.name
        assert client.tokens or client.over, "it leaves before its first token"
        if not client.over:
            client.worker = refusal.go_to.worker_id
            client.moves += 1
            if client.request.hand_to is not None:  # as if each start named a different worker
                back = self.place_of(node.name)
                client.request = replace(client.request, hand_to=back)
            self._start(client)
