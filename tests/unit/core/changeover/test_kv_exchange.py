"""The order of KV moves: requests end complete or recomputed, and no stage overflows."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.core.changeover.frames import FreeKv, KvEnded, KvFreed, Reserve, Reserved, SendKv
from services.core.changeover.kv_exchange import (
    ExchangeCommand,
    ExchangeState,
    MoveAdded,
    RecomputeRequest,
    RequestGone,
    ResumeRequest,
    RoomReported,
    SequenceMove,
    SourceLost,
    transfer_id_of,
)
from services.core.changeover.move_window import MoveWindow
from services.core.changeover.route import Transfer, transfers_between
from services.core.changeover.vocabulary import FrameReceived, SendFrame
from services.core.groups.layer_map import Stage

EPOCH = 2
BLOCK_SIZE = 16
ALONE_A = (Stage("a", 0, 8),)
ALONE_B = (Stage("b", 0, 8),)
MERGED = (Stage("a", 0, 4), Stage("b", 4, 8))


def test_a_merge_moves_each_half_to_the_other_side() -> None:
    assert transfers_between(ALONE_A, MERGED) == (Transfer("a", "b", 4, 8),)
    assert transfers_between(ALONE_B, MERGED) == (Transfer("b", "a", 0, 4),)


def test_a_third_member_moves_only_reassigned_layers() -> None:
    three = (Stage("a", 0, 3), Stage("b", 3, 6), Stage("c", 6, 8))
    assert transfers_between(MERGED, three) == (
        Transfer("a", "b", 3, 4),
        Transfer("b", "c", 6, 8),
    )


def test_a_split_returns_the_other_layers() -> None:
    assert transfers_between(MERGED, ALONE_A) == (Transfer("b", "a", 4, 8),)
    assert transfers_between(MERGED, MERGED) == ()


@dataclass
class Cluster:
    """Workers with this number of blocks; commands run in random order, and some transfers fail."""

    rng: random.Random
    free: dict[str, int]
    exchange: ExchangeState
    failing: float = 0.0
    now_s: float = 0.0
    todo: list[SendFrame[Any]] = field(default_factory=list)
    holding: dict[tuple[str, str], int] = field(default_factory=dict)
    lacking: dict[str, frozenset[str]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)

    def add(self, move: SequenceMove, held_by: list[str]) -> None:
        self.lacking[move.seq_id] = move.lacking
        for worker_id in held_by:
            self.holding[move.seq_id, worker_id] = move.blocks
        self.carry_out(self.exchange.handle(MoveAdded(move)))

    def carry_out(self, commands: list[ExchangeCommand]) -> None:
        for command in commands:
            match command:
                case SendFrame(peer=peer, frame=Reserve() as frame):
                    blocks = frame.blocks if peer in self.lacking[frame.seq_id] else 0
                    self.free[peer] -= blocks
                    assert self.free[peer] >= 0, "a stage is overfull"
                    self.holding[frame.seq_id, peer] = blocks
                    self.todo.append(command)
                case SendFrame():
                    self.todo.append(command)
                case ResumeRequest():
                    self.end(command.seq_id, "resumed")
                case RecomputeRequest():
                    self.end(command.seq_id, "recomputed")
                    self.release(command.seq_id)
        self.exchange.check_invariants()

    def end(self, request_id: str, how: str) -> None:
        assert request_id not in self.ended, "a request ends twice"
        self.ended[request_id] = how

    def release(self, request_id: str) -> None:
        for key in [key for key in self.holding if key[0] == request_id]:
            self.free[key[1]] += self.holding.pop(key)

    def abort(self, request_id: str) -> None:
        self.end(request_id, "aborted")
        self.release(request_id)
        self.carry_out(self.exchange.handle(RequestGone(request_id)))

    def turn(self) -> bool:
        """Start all possible moves, then finish one; False when none is left."""
        self.exchange.handle(RoomReported(self.free))
        self.now_s += self.rng.random() / 10
        self.carry_out(self.exchange.start(self.now_s))
        if not self.todo:
            return False
        command = self.todo.pop(self.rng.randrange(len(self.todo)))
        match command.frame:
            case Reserve(seq_id=seq_id):
                self.receive(command.peer, Reserved(seq_id))
            case SendKv(seq_id=seq_id, transfer_id=transfer_id):
                intact = self.rng.random() >= self.failing
                self.receive(command.peer, KvEnded(seq_id, transfer_id, intact))
            case FreeKv(seq_id=seq_id):
                # The chunks of departed layers make room at the tails of those that stay.
                self.free[command.peer] += 1
                self.receive(command.peer, KvFreed(seq_id, self.free[command.peer]))
        return True

    def receive(self, peer: str, frame: Reserved | KvEnded | KvFreed) -> None:
        self.carry_out(self.exchange.handle(FrameReceived(self.now_s, peer, frame)))


def merge_move(name: str, origin: str, blocks: int, highest: int = 0) -> SequenceMove:
    """A request of `origin`, "a" or "b", that moves into the merged group."""
    old, other = (ALONE_A, "b") if origin == "a" else (ALONE_B, "a")
    return SequenceMove(
        name,
        origin,
        blocks,
        blocks * BLOCK_SIZE,
        transfers_between(old, MERGED),
        frozenset({other}),
        frozenset(),
        highest,
    )


def test_a_request_resumes_only_with_its_complete_kv() -> None:
    exchange = ExchangeState(EPOCH, BLOCK_SIZE)
    exchange.handle(RoomReported({"a": 10, "b": 10}))
    move = merge_move("r", "a", 3)
    transfer = move.transfers[0]
    transfer_id = transfer_id_of(EPOCH, "r", transfer)
    assert exchange.handle(MoveAdded(move)) == []
    assert exchange.start(0.0) == [SendFrame("b", Reserve("b", "r", 3, (transfer_id,)))]
    assert exchange.handle(FrameReceived(0.0, "b", Reserved("r"))) == [
        SendFrame("a", SendKv("r", transfer_id, transfer, 3))
    ]
    assert not exchange.settled
    assert exchange.handle(FrameReceived(0.0, "b", KvEnded("r", transfer_id, intact=True))) == [
        ResumeRequest("r"),
        SendFrame("a", FreeKv("r", whole_table=False)),
    ]
    exchange.handle(FrameReceived(0.0, "a", KvFreed("r", 10)))
    assert exchange.settled


def started(exchange: ExchangeState) -> list[Any]:
    return [command.frame for command in exchange.start(0.0) if isinstance(command, SendFrame)]


def test_moves_alternate_between_the_sides_and_take_the_highest_blocks_first() -> None:
    exchange = ExchangeState(EPOCH, BLOCK_SIZE)
    exchange.handle(RoomReported({"a": 100, "b": 100}))
    for move in (
        merge_move("a-low", "a", 1, highest=3),
        merge_move("a-high", "a", 1, highest=9),
        merge_move("b-low", "b", 1, highest=2),
        merge_move("b-high", "b", 1, highest=7),
    ):
        exchange.handle(MoveAdded(move))
    order = [frame.seq_id for frame in started(exchange)]
    assert [name[2:] for name in order] == ["high", "high", "low", "low"]
    assert order[0][0] != order[1][0]
    assert order[2][0] != order[3][0]


def test_two_full_sides_do_not_deadlock() -> None:
    """Neither side has a free block: the one with least KV is recomputed, the others move."""
    exchange = ExchangeState(EPOCH, BLOCK_SIZE)
    cluster = Cluster(random.Random(1), {"a": 0, "b": 0}, exchange)
    for index in range(6):
        cluster.add(merge_move(f"a{index}", "a", 4 + index), ["a"])
        cluster.add(merge_move(f"b{index}", "b", 4 + index), ["b"])
    for _ in range(1000):
        if not cluster.turn():
            break
    assert exchange.settled
    assert len(cluster.ended) == 12
    assert sum(how == "resumed" for how in cluster.ended.values()) >= 4
    assert cluster.ended["a0"] == "recomputed", "the cheapest goes first"


def split_move(name: str) -> SequenceMove:
    """A request of the merged group that "a" takes with it; half of its KV comes from "b"."""
    transfers = transfers_between(MERGED, ALONE_A)
    return SequenceMove(name, "ab", 2, 32, transfers, frozenset(), frozenset({"b"}), 0)


def test_kv_not_sent_by_a_lost_worker_is_recomputed_without_waiting() -> None:
    exchange = ExchangeState(EPOCH, BLOCK_SIZE, MoveWindow(20.0))
    for name in ("whole", "begun", "reserving", "waiting"):
        exchange.handle(MoveAdded(split_move(name)))
    exchange.handle(RoomReported({"a": 100}))
    begun_moves = {frame.seq_id for frame in started(exchange)}
    assert len(begun_moves) == 3
    (whole, begun, _reserving), (waiting,) = sorted(begun_moves), set(exchange.waiting)
    for name in (whole, begun):
        exchange.handle(FrameReceived(0.0, "a", Reserved(name)))
    (transfer,) = split_move(whole).transfers
    ended = KvEnded(whole, transfer_id_of(EPOCH, whole, transfer), intact=True)
    assert exchange.handle(FrameReceived(0.0, "a", ended)) == [
        ResumeRequest(whole),
        SendFrame("b", FreeKv(whole, whole_table=True)),
    ]
    commands = exchange.handle(SourceLost("b"))
    assert all(isinstance(command, RecomputeRequest) for command in commands)
    assert {command.seq_id for command in commands} == {begun, _reserving, waiting}
    assert exchange.settled
    exchange.check_invariants()
    assert exchange.handle(SourceLost("b")) == []
    # Another old leader hands one over afterwards.
    assert exchange.handle(MoveAdded(split_move("late"))) == [RecomputeRequest("late")]
    assert exchange.settled


@pytest.mark.parametrize("seed", range(200))
def test_random_events_end_every_move_once(seed: int) -> None:
    rng = random.Random(seed)
    free = {"a": rng.randrange(30), "b": rng.randrange(30)}
    window = MoveWindow(rng.choice([1.0, 20.0, 200.0]))
    exchange = ExchangeState(EPOCH, BLOCK_SIZE, window)
    cluster = Cluster(rng, free, exchange, rng.choice([0, 0.2]))
    names = [f"{rng.choice('ab')}{index}" for index in range(rng.randint(1, 20))]
    for name in names:
        cluster.add(merge_move(name, name[0], rng.randint(1, 12), rng.randrange(50)), [name[0]])
    for _ in range(2000):
        if rng.random() < 0.05:
            left = [name for name in names if name not in cluster.ended]
            if left:
                cluster.abort(rng.choice(left))
        if not cluster.turn() and not cluster.todo:
            break
    assert cluster.ended.keys() == set(names)
    assert cluster.exchange.settled
    assert min(cluster.free.values()) >= 0
