import random
import select
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.worker.engine.transfer import receiver as receiving
from services.worker.engine.transfer.errors import MoverFull
from services.worker.engine.transfer.frame import Bytes, Frame
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Identity
from services.worker.engine.transfer.link_pace import LinkPace
from services.worker.engine.transfer.mover import (
    FAST_LINK_TIMES,
    Mover,
    MoverConfig,
    MoverEvent,
)
from services.worker.engine.transfer.piece_window import PIECES_MIN
from services.worker.engine.transfer.pieces import (
    KvPiece,
    OutgoingPiece,
    ParameterPiece,
    PieceTaken,
    kv_pieces,
    parameter_pieces,
)
from services.worker.errors import LayerNotResident
from tests.support.local_lane import LocalLane, LocalNetwork
from tests.support.transfer import CODEC, NONCE, Memory, bytes_of, empty_like, filled

SIZE_BYTES = 10_000
CONFIG = MoverConfig(chunk_bytes=1000)


class Engine:
    """One worker's mover, stepped by the test."""

    def __init__(self, lane: LocalLane, memory: Memory, config: MoverConfig) -> None:
        self.lane = lane
        self.memory = memory
        self.gate = ActivationGate()
        self.mover = Mover(lane, self.gate, config, memory.standing, memory.unpack)
        self.published: list[MoverEvent] = []

    def send_slab(self, peer: str, transfer_id: str = "t", epoch: int = 1) -> None:
        cut = self.memory.slab_cut(transfer_id)
        pieces = parameter_pieces(cut, self.piece_bytes(peer), self.memory.pack_slab)
        self.mover.send(transfer_id, peer, "g", epoch, pieces)

    def send_kv(self, peer: str, transfer_id: str = "t") -> None:
        cut = self.memory.kv_cut(transfer_id)
        pieces = kv_pieces(cut, self.piece_bytes(peer), self.memory.pack_kv)
        self.mover.send(transfer_id, peer, "g", 1, pieces)

    def piece_bytes(self, peer: str) -> Callable[[], int]:
        return partial(self.mover.piece_bytes, peer)

    def step(self, now_s: float) -> float:
        wake_s = self.mover.step(now_s)
        self.published += self.mover.events()
        return wake_s

    @property
    def ends(self) -> list[TransferOutcome]:
        return [e for e in self.published if isinstance(e, TransferOutcome)]


class Pair:
    """Two engines; a sends to b. Time is advanced by the test."""

    def __init__(self, config: MoverConfig = CONFIG) -> None:
        source = filled(SIZE_BYTES)
        self.network = LocalNetwork(CODEC)
        lanes = [self.network.lane(Identity(name, "1")) for name in "ab"]
        self.a = Engine(lanes[0], source, config)
        self.b = Engine(lanes[1], empty_like(source), config)
        self.now_s = 0.0
        lanes[1].expect(Identity("a", "1"), NONCE)
        lanes[0].connect("b", lanes[1].address, NONCE)
        self.network.pump()

    def round(self) -> bool:
        """Step both and deliver everything; returns whether there was work."""
        wakes = [engine.step(self.now_s) for engine in (self.a, self.b)]
        return bool(self.network.pump()) or min(wakes) <= self.now_s

    def settle(self) -> None:
        for _ in range(1000):
            if not self.round():
                return
        raise AssertionError("it never comes to rest")

    def send_slab(self, peer: str, transfer_id: str = "t", epoch: int = 1) -> None:
        self.a.send_slab(peer, transfer_id, epoch)
        self.settle()

    def later(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.settle()


@pytest.mark.parametrize(("send", "seconds"), [("send_slab", 1.0), ("send_kv", 0.1)])
def test_a_paced_link_is_as_slow_as_the_modelled_one(send: str, seconds: float) -> None:
    """10 kB stand for a hundred times that of parameters, or ten times that of KV, at 1 MB/s."""
    pair = Pair(replace(CONFIG, pace=LinkPace(1e6, kv_scale=10, parameter_scale=100)))
    getattr(pair.a, send)("b")
    pair.settle()
    while not pair.a.ends:
        pair.later(seconds / 100)
    (end,) = pair.a.ends
    assert end.status is TransferStatus.SENT
    # The last piece is sent when the link is free, and nothing waits for its end.
    assert seconds * 0.8 < pair.now_s < seconds * 1.5


def sent_to_b() -> TransferOutcome:
    return TransferOutcome("t", TransferStatus.SENT, "b", SIZE_BYTES)


def received_from_a(size_bytes: int) -> TransferOutcome:
    return TransferOutcome("t", TransferStatus.RECEIVED, "a", size_bytes)


def failed(transfer_id: str, peer: str, events: list[TransferOutcome]) -> str:
    """The reason of the single failure among `events`."""
    (event,) = events
    assert event.status is TransferStatus.FAILED
    assert (event.transfer_id, event.peer) == (transfer_id, peer)
    return event.reason


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_slab_arrives_whole(pair: Pair) -> None:
    pair.send_slab("b")
    assert np.array_equal(pair.b.memory.slab, pair.a.memory.slab)
    assert pair.a.ends == [sent_to_b()]
    assert pair.b.ends == [received_from_a(SIZE_BYTES)]
    assert pair.b.memory.writes == 10


def test_kv_arrives_whole_in_pieces_of_whole_blocks(pair: Pair) -> None:
    pair.a.send_kv("b")
    pair.settle()
    assert np.array_equal(pair.b.memory.kv, pair.a.memory.kv)
    assert pair.b.memory.writes == 3 * 7  # 512 bytes a block, 1000 a chunk


def test_transfers_run_in_both_directions(pair: Pair) -> None:
    pair.a.send_slab("b", "there")
    pair.b.send_kv("a", "back")
    pair.b.memory.kv[:] = 7
    pair.settle()
    assert {event.status for event in pair.a.ends} == {TransferStatus.SENT, TransferStatus.RECEIVED}
    assert np.all(pair.a.memory.kv == 7)


def test_pieces_become_larger_over_a_fast_link(pair: Pair) -> None:
    pair.a.memory.slab = bytes_of(200 * CONFIG.chunk_bytes)
    pair.b.memory.slab = np.zeros_like(pair.a.memory.slab)
    pair.a.send_slab("b")
    while pair.round():
        pair.now_s += 1e-5  # a piece each: a hundred times what a slow link carries
    assert np.array_equal(pair.b.memory.slab, pair.a.memory.slab)
    least = 200 // FAST_LINK_TIMES
    assert least <= pair.b.memory.writes < 1.2 * least


@pytest.mark.parametrize("size_bytes", [0, -1, (1 << 20) + 1])
def test_chunk_size_is_validated(size_bytes: int) -> None:
    with pytest.raises(ValueError, match="chunk_bytes must be"):
        Pair(MoverConfig(chunk_bytes=size_bytes))


def test_pieces_in_flight_are_bounded_and_packed_late(pair: Pair) -> None:
    pair.network.hold("a", "b")
    pair.send_slab("b")
    assert pair.a.memory.reads == PIECES_MIN
    assert pair.a.ends == []


def test_transfers_take_turns() -> None:
    pair = Pair(replace(CONFIG, active_max=2))
    order: list[str] = []
    unpack = pair.b.memory.unpack
    pair.b.mover = Mover(
        pair.b.lane,
        pair.b.gate,
        CONFIG,
        pair.b.memory.standing,
        lambda piece, payload: (order.append(piece.transfer_id), unpack(piece, payload))[1],
    )
    for name in "xyz":
        pair.a.send_kv("b", name)
    pair.settle()
    assert order[:6] == ["x", "y"] * 3
    assert order[-1] == "z" and "z" not in order[:40]


def test_a_cancelled_transfer_frees_its_window(pair: Pair) -> None:
    pair.network.hold("b", "a")
    for name in ("x", "y"):
        pair.a.send_slab("b", name)
    pair.settle()
    assert pair.a.memory.reads == PIECES_MIN
    pair.a.mover.cancel("x")
    pair.settle()
    assert pair.a.memory.reads == PIECES_MIN + 1


def test_a_receiver_with_much_to_store_leaves_the_rest_in_the_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "BACKLOG_BYTES_MAX", 1500)
    pair = Pair()
    pair.settle()
    pair.b.gate.enter()  # it stores nothing
    for number in range(4):
        header = ParameterPiece("t", number, number == 3, "layer 0", 1000 * number, 4000)
        pair.a.lane.send("b", Frame("g", 1, header, bytes(1000)))
        pair.network.pump()
        pair.b.step(0.0)
    assert len(pair.b.lane.arrived) == 2
    pair.b.gate.leave()
    pair.settle()
    assert pair.b.memory.writes == 4


def test_more_pieces_of_a_future_epoch_than_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "HELD_BYTES_MAX", 1500)
    pair = Pair()
    pair.settle()
    for number in range(3):
        header = ParameterPiece(f"t{number}", 0, True, "layer 0", 0, 1000)
        pair.a.lane.send("b", Frame("g", 2, header, bytes(1000)))
    pair.settle()
    assert "not current" in failed("t2", "a", pair.b.ends)
    pair.b.memory.epochs["g"] = 2
    pair.later(0.1)
    assert pair.b.memory.writes == 2


def test_bulk_transfers_yield_to_activations_for_a_limited_time(pair: Pair) -> None:
    pair.settle()
    pair.a.gate.enter()
    pair.send_slab("b")
    assert pair.a.memory.reads == 0
    pair.later(CONFIG.yield_s)
    assert pair.a.memory.reads == 1
    pair.a.gate.leave()
    pair.settle()
    assert pair.b.ends == [received_from_a(SIZE_BYTES)]


def test_activations_wake_only_a_yielding_mover(pair: Pair) -> None:
    pair.settle()
    bell = pair.a.mover._in_bell
    bell.clear()
    pair.a.gate.enter()
    pair.a.gate.leave()
    assert select.select([bell], [], [], 0) == ([], [], [])
    pair.a.gate.enter()
    pair.send_slab("b")
    bell.clear()
    pair.a.gate.leave()
    assert select.select([bell], [], [], 0)[0] == [bell]


def test_the_receiver_yields_too(pair: Pair) -> None:
    pair.b.gate.enter()
    pair.send_slab("b")
    assert pair.b.memory.writes == 0
    pair.b.gate.leave()
    pair.settle()
    assert pair.b.memory.writes == 10


def test_nothing_waits_without_coordination() -> None:
    pair = Pair(replace(CONFIG, coordinated=False))
    pair.a.gate.enter()
    pair.b.gate.enter()
    pair.send_slab("b")
    assert pair.a.ends == [sent_to_b()]


def test_a_cancelled_transfer_ends_when_no_send_reads_its_memory(pair: Pair) -> None:
    pair.network.hold("a", "b")
    pair.send_slab("b")
    pair.a.mover.cancel("t")
    pair.settle()
    assert pair.a.ends == []
    pair.network.release("a", "b")
    pair.settle()
    assert failed("t", "b", pair.a.ends) == "cancelled"
    assert "cancelled" in failed("t", "a", pair.b.ends)
    pair.a.mover.cancel("t")
    pair.settle()
    assert len(pair.a.ends) == 1


def test_the_receiver_may_cancel(pair: Pair) -> None:
    pair.a.send_slab("b")
    for _ in range(3):
        pair.round()
    pair.b.mover.cancel("t")
    pair.settle()
    assert failed("t", "a", pair.b.ends) == "cancelled"
    assert "refused" in failed("t", "b", pair.a.ends)
    writes = pair.b.memory.writes
    assert 0 < writes < 10


def test_a_transfer_can_be_cancelled_before_it_begins(pair: Pair) -> None:
    pair.b.mover.cancel("t")
    pair.settle()
    assert failed("t", "", pair.b.ends) == "cancelled"
    pair.send_slab("b")
    assert "refused" in failed("t", "b", pair.a.ends)
    assert pair.b.memory.writes == 0 and len(pair.b.ends) == 1


def test_a_finished_transfer_is_not_cancelled(pair: Pair) -> None:
    pair.send_slab("b")
    pair.a.mover.cancel("t")
    pair.b.mover.cancel("t")
    pair.settle()
    assert len(pair.a.ends) == len(pair.b.ends) == 1


def test_pieces_of_a_stale_epoch_are_refused(pair: Pair) -> None:
    pair.b.memory.epochs["g"] = 2
    pair.send_slab("b")
    assert "not current" in failed("t", "b", pair.a.ends)
    assert "not current" in failed("t", "a", pair.b.ends)
    assert pair.b.memory.writes == 0


def test_an_epoch_that_passes_ends_the_transfer(pair: Pair) -> None:
    pair.a.send_slab("b")
    for _ in range(3):
        pair.round()
    pair.b.memory.epochs["g"] = 2
    pair.settle()
    assert 0 < pair.b.memory.writes < 10
    assert "not current" in failed("t", "a", pair.b.ends)


def test_pieces_of_a_future_epoch_wait_for_it(pair: Pair) -> None:
    pair.send_slab("b", epoch=2)
    assert pair.b.memory.writes == 0 and pair.b.ends == []
    pair.b.memory.epochs["g"] = 2
    pair.later(0.1)
    assert pair.b.ends == [received_from_a(SIZE_BYTES)]


def test_pieces_of_a_future_epoch_time_out(pair: Pair) -> None:
    pair.send_slab("b", epoch=2)
    pair.later(CONFIG.future_wait_s)
    assert "did not begin" in failed("t", "a", pair.b.ends)
    assert "did not begin" in failed("t", "b", pair.a.ends)


def test_a_damaged_piece_ends_the_transfer(pair: Pair) -> None:
    pair.a.send_slab("b")
    pair.a.step(0.0)
    pair.network.damage("a", "b")
    pair.settle()
    assert "damaged" in failed("t", "a", pair.b.ends)
    assert "damaged" in failed("t", "b", pair.a.ends)
    assert pair.b.memory.writes == 0


def test_repeated_pieces_are_answered_and_ignored(pair: Pair) -> None:
    pair.settle()
    header = ParameterPiece("t", 0, True, "layer 0", 0, 10)
    for _ in range(3):
        pair.a.lane.send("b", Frame("g", 1, header, bytes(range(10))))
    pair.network.pump()
    for _ in range(5):
        pair.b.step(0.0)
    pair.network.pump()
    answers = [frame.header for _, frame in pair.a.lane.receive()]
    assert answers == [PieceTaken("t", 0)] * 3
    assert pair.b.memory.writes == 1
    assert pair.b.ends == [received_from_a(10)]


@pytest.mark.parametrize(
    "pieces",
    [
        [(-1, False)],
        [(1 << 20, False)],
        [(1, True), (2, False)],
        [(1, True), (0, True)],
        [(2, False), (1, True)],
    ],
)
def test_inconsistent_pieces_are_refused(pair: Pair, pieces: list[tuple[int, bool]]) -> None:
    pair.settle()
    for number, last in pieces:
        header = ParameterPiece("t", number, last, "layer 0", 0, 10)
        pair.a.lane.send("b", Frame("g", 1, header, b"0123456789"))
    pair.network.pump()
    for _ in range(5):
        pair.b.step(0.0)
    assert "it has" in failed("t", "a", pair.b.ends)


def test_pieces_of_a_transfer_have_the_same_epoch(pair: Pair) -> None:
    pair.settle()
    for group in "gh":
        pair.b.memory.epochs[group] = 1
        header = ParameterPiece("t", "gh".index(group), False, "layer 0", 0, 10)
        pair.a.lane.send("b", Frame(group, 1, header, b"0123456789"))
    pair.settle()
    assert "different epochs" in failed("t", "a", pair.b.ends)


def test_a_receiver_without_a_place_refuses(pair: Pair) -> None:
    pair.b.memory.refuses = True
    pair.send_slab("b")
    assert "no place" in failed("t", "b", pair.a.ends)


def test_memory_that_cannot_be_read_ends_the_transfer(pair: Pair) -> None:
    def pack(offset_bytes: int, target: Bytes) -> None:
        if offset_bytes:
            raise LayerNotResident("layer 0")
        target[:] = 0

    pieces = parameter_pieces(pair.a.memory.slab_cut(), pair.a.piece_bytes("b"), pack)
    pair.a.mover.send("t", "b", "g", 1, pieces)
    pair.settle()
    assert "not in memory" in failed("t", "b", pair.a.ends)
    assert "abandoned by its sender" in failed("t", "a", pair.b.ends)


class ReadEarly:
    """A piece whose copy has started."""

    def __init__(self, memory: Memory, offset_bytes: int, size_bytes: int) -> None:
        self.content = memory.slab[offset_bytes : offset_bytes + size_bytes].copy()
        self.ends: list[str] = []

    def finish(self, target: Bytes) -> None:
        target[:] = self.content
        self.ends.append("finished")

    def discard(self) -> None:
        self.ends.append("discarded")


def read_early(pair: Pair, refused: Collection[int] = ()) -> tuple[list[ReadEarly], list[int]]:
    """Send the slab of a by pieces that are read before they are due, except `refused` ones.
    Returns these pieces and their places.
    """
    reads: list[ReadEarly] = []
    packed: list[int] = []

    def read(offset_bytes: int, size_bytes: int) -> ReadEarly | None:
        if offset_bytes in refused:
            raise LayerNotResident("layer 0")
        if len(reads) == 4:
            return None  # there is no room
        reads.append(ReadEarly(pair.a.memory, offset_bytes, size_bytes))
        return reads[-1]

    def pack(offset_bytes: int, target: Bytes) -> None:
        packed.append(offset_bytes)
        pair.a.memory.pack_slab(offset_bytes, target)

    pieces = parameter_pieces(pair.a.memory.slab_cut(), pair.a.piece_bytes("b"), pack, read)
    pair.a.mover.send("t", "b", "g", 1, pieces)
    return reads, packed


def test_pieces_may_be_read_before_they_are_due(pair: Pair) -> None:
    reads, packed = read_early(pair, refused=(2000,))
    pair.settle()
    assert pair.a.ends[0].status is TransferStatus.SENT
    assert np.array_equal(pair.b.memory.slab, pair.a.memory.slab)
    assert [read.ends for read in reads] == [["finished"]] * 4
    # The first is due at once, and one that cannot be read early may be read when it is due.
    assert packed[:2] == [0, 2000]
    assert len(packed) + len(reads) == SIZE_BYTES // 1000


def test_a_piece_that_was_read_early_is_discarded_with_its_transfer(pair: Pair) -> None:
    pair.settle()
    reads, _ = read_early(pair)
    pair.a.step(0.0)
    assert [read.ends for read in reads] == [[]]
    pair.a.mover.cancel("t")
    pair.settle()
    assert "cancelled" in failed("t", "b", pair.a.ends)
    assert [read.ends for read in reads] == [["discarded"]]


def test_a_series_without_a_last_piece_fails(pair: Pair) -> None:
    header = KvPiece("t", 0, False, "request", 0, 0, 1)
    piece = OutgoingPiece(header, 512, partial(pair.a.memory.pack_kv, 0, 0, 1))
    pair.a.mover.send("t", "b", "g", 1, [piece])
    pair.settle()
    assert "without a last piece" in failed("t", "b", pair.a.ends)


def test_a_silent_receiver_times_out(pair: Pair) -> None:
    pair.settle()
    pair.network.hold("b", "a")
    pair.send_slab("b")
    assert pair.a.ends == []
    pair.later(CONFIG.answer_timeout_s)
    assert "did not answer" in failed("t", "b", pair.a.ends)
    assert "abandoned by its sender" in failed("t", "a", pair.b.ends)


def test_a_silent_sender_times_out(pair: Pair) -> None:
    pair.settle()
    pair.a.send_slab("b")
    for _ in range(3):
        pair.round()
    pair.network.hold("a", "b")
    pair.settle()
    pair.b.step(CONFIG.idle_timeout_s)
    assert "no more pieces" in failed("t", "a", pair.b.ends)


def test_a_lost_peer_ends_its_transfers(pair: Pair) -> None:
    pair.a.send_slab("b", "there")
    pair.b.send_kv("a", "back")
    for _ in range(3):
        pair.round()
    pair.network.cut("b")
    pair.settle()
    for engine in (pair.a, pair.b):
        assert {event.status for event in engine.ends} == {TransferStatus.FAILED}
        assert sorted(event.transfer_id for event in engine.ends) == ["back", "there"]


def test_an_unknown_peer_fails_the_transfer(pair: Pair) -> None:
    pair.send_slab("c")
    assert "no connection" in failed("t", "c", pair.a.ends)


def test_transfers_are_bounded_and_ids_unique() -> None:
    pair = Pair(replace(CONFIG, transfers_max=2))
    pair.a.send_slab("b", "x")
    with pytest.raises(ValueError, match="in progress"):
        pair.a.send_slab("b", "x")
    pair.a.send_slab("b", "y")
    with pytest.raises(MoverFull):
        pair.a.send_slab("b", "z")
    pair.settle()
    pair.send_slab("b", "z")
    assert len(pair.a.ends) == 3


def disturb(pair: Pair, engine: Engine, sent: list[str], rng: random.Random) -> None:
    """A random event."""
    waiting = pair.network.waiting()
    match rng.randrange(8):
        case 0 if sent and rng.random() < 0.1:
            engine.mover.cancel(rng.choice(sent))
        case 1:
            (engine.gate.leave if engine.gate.busy else engine.gate.enter)()
        case 2 if waiting and rng.random() < 0.02:
            pair.network.damage(*rng.choice(waiting))
        case 3:
            pair.now_s += rng.random() * 0.01
        case 4 | 5:
            engine.step(pair.now_s)
        case _ if waiting:
            pair.network.deliver(*rng.choice(waiting))


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_ends_every_transfer_once_on_both_sides(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(replace(CONFIG, active_max=3))
    names = [f"{sender}{number}" for number in range(5) for sender in "ab"]
    sent: list[str] = []
    while len(sent) < len(names) or rng.random() < 0.99:
        if len(sent) < len(names) and rng.random() < 0.1:
            sent.append(names[len(sent)])
            sender, peer = (pair.a, "b") if sent[-1][0] == "a" else (pair.b, "a")
            sender.send_kv(peer, sent[-1])
        disturb(pair, rng.choice((pair.a, pair.b)), sent, rng)
    for engine in (pair.a, pair.b):
        if engine.gate.busy:
            engine.gate.leave()
    pair.settle()
    pair.later(CONFIG.answer_timeout_s)
    pair.later(CONFIG.idle_timeout_s)
    check_ends(pair, names)


def check_ends(pair: Pair, names: list[str]) -> None:
    """Each transfer ended once on each side; a completed one was received whole."""
    for sender, receiver, letter in ((pair.a, pair.b, "a"), (pair.b, pair.a, "b")):
        mine = [name for name in names if name[0] == letter]
        out = [e for e in sender.ends if e.transfer_id in mine]
        into = [e for e in receiver.ends if e.transfer_id in mine]
        assert sorted(e.transfer_id for e in out) == mine, out
        assert len({e.transfer_id for e in into}) == len(into), into
        received = {e.transfer_id for e in into if e.status is TransferStatus.RECEIVED}
        assert {e.transfer_id for e in out if e.status is TransferStatus.SENT} <= received
