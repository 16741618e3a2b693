"""The coordinated exchange of running sequences' KV after a layer change (KunServe §4.2).

A change of groups moves layers between workers, so the KV of a sequence must move to the stages
(workers with their layers) that run it now. The leader of the sequence's *present* group decides
when: a *move* is all transfers for a sequence. The sequence is held until its KV is complete at
every stage. The exchange could deadlock on memory: dropping P bytes of parameters gives a stage
room for P / (KV bytes per token) tokens, but the stage may have to receive the KV of a whole
instance, while its own departing KV can leave only once the other side has room. Four rules prevent
that:

* A ledger of free blocks: a move starts only if its blocks fit at every stage that lacks them.
* Moves alternate between the groups that the sequences come from.
* The highest block ids move first, because memory of departing layers is freed only from its end.
* If no move is in flight and none fits, the sequence with the least KV is recomputed.

Hence some sequence always makes progress. `ExchangeState` is a pure state machine: it consumes and
emits frames of `frames.py`; its other events and commands are exchanged with the leader's planner.
"""

from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Sequence as Row
from dataclasses import dataclass, field

from services.core.changeover.frames import FreeKv, KvEnded, KvFreed, Reserve, Reserved, SendKv
from services.core.changeover.move_window import MoveWindow
from services.core.changeover.route import Transfer, transfers_between
from services.core.changeover.vocabulary import FrameReceived, SendFrame
from services.core.groups.layer_map import Stage
from services.core.planner.sequence import Sequence
from services.core.request import blocks_for


def transfer_id_of(epoch: int, seq_id: str, transfer: Transfer) -> str:
    """The id of a transfer; unique, as a sequence moves between two workers once per epoch."""
    return f"{epoch}/{seq_id}/{transfer.source}>{transfer.destination}"


@dataclass(frozen=True, slots=True)
class SequenceMove:
    """The move of a sequence's KV to the stages that will run it."""

    seq_id: str
    origin: str  # id of the sequence's group before the change
    blocks: int  # KV blocks of the sequence
    tokens: int  # computed tokens, whose KV is in the blocks
    transfers: tuple[Transfer, ...]  # empty if no layer moves
    lacking: frozenset[str]  # workers of its present group that have no blocks for it yet
    leaving: frozenset[str]  # workers that hold its blocks but are not in its present group
    highest_block: int  # highest block id at its sources

    @property
    def sizes(self) -> Counter[str]:
        """The KV that each source sends, in layer blocks (the KV of a block in a single layer)."""
        sizes: Counter[str] = Counter()
        for transfer in self.transfers:
            sizes[transfer.source] += self.blocks * (transfer.end_layer - transfer.first_layer)
        return sizes

    @classmethod
    def between(
        cls,
        sequence: Sequence,
        origin: str,
        old: Row[Stage],
        new: Row[Stage],
        highest_block: int,
    ) -> "SequenceMove":
        """The move of a sequence's KV from `old` stages to `new` stages."""
        before, now = ({stage.worker_id for stage in stages} for stages in (old, new))
        return cls(
            seq_id=sequence.seq_id,
            origin=origin,
            blocks=sequence.blocks,
            tokens=sequence.computed,
            transfers=transfers_between(old, new),
            lacking=frozenset(now - before),
            leaving=frozenset(before - now),
            highest_block=highest_block,
        )


@dataclass(frozen=True, slots=True)
class MoveAdded:
    """A held sequence was adopted by this leader, or stayed with it while layers moved."""

    move: SequenceMove


@dataclass(frozen=True, slots=True)
class RequestGone:
    """The sequence was aborted or preempted, which released its blocks in its present group."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class SourceLost:
    """`worker_id`, a worker of another group, is lost, with the KV that it has not sent."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class RoomReported:
    """Free blocks of each worker of the group; reserved blocks count as used."""

    free_blocks: Mapping[str, int]


ExchangeFrame = Reserved | KvEnded | KvFreed
ExchangeEvent = MoveAdded | FrameReceived[ExchangeFrame] | RequestGone | SourceLost | RoomReported
"""Events of the exchange. A `RoomReported` that includes its blocks must precede a `KvFreed`."""


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """The sequence's KV is complete at every stage, so it may run."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class RecomputeRequest:
    """Preempt the sequence: free its blocks in the group, and recompute it later."""

    seq_id: str


ExchangeCommand = SendFrame[Reserve | SendKv | FreeKv] | ResumeRequest | RecomputeRequest
"""Commands, executed in order. The caller sends a `Reserve` from stage to stage, with `released`
added."""


@dataclass(slots=True)
class _ActiveMove:
    """A started move: first all destinations reserve blocks, then all transfers run."""

    move: SequenceMove
    unreserved: set[str]  # destinations that have yet to confirm their reservation
    unfinished: dict[str, Transfer]  # transfers without a successful end, by transfer id


@dataclass(slots=True)
class ExchangeState:
    """The exchange at a leader in a configuration; moves are keyed by sequence id."""

    epoch: int  # of the configuration; part of transfer ids
    block_size: int  # tokens per block
    window: MoveWindow = field(default_factory=MoveWindow)  # limits the KV in flight
    waiting: dict[str, SequenceMove] = field(default_factory=dict)  # not started
    underway: dict[str, _ActiveMove] = field(default_factory=dict)  # started, not complete
    _free: dict[str, int] = field(default_factory=dict)  # the ledger: free blocks by worker
    # Sequence and worker of each `FreeKv` that awaits its `KvFreed`.
    _freeing: set[tuple[str, str]] = field(default_factory=set)
    _lost: set[str] = field(default_factory=set)  # workers that cannot send KV any more
    _last_origin: str = ""  # origin of the move that started last

    @property
    def settled(self) -> bool:
        """Whether all moves are complete and all sources have freed their copies."""
        return not self.waiting and not self.underway and not self._freeing

    def handle(self, event: ExchangeEvent) -> list[ExchangeCommand]:
        """Apply an event; returns the commands for the driver, in order."""
        commands: list[ExchangeCommand] = []
        match event:
            case MoveAdded(move=move):
                self._add(move, commands)
            # A worker has reserved blocks, finished a transfer, or freed its copy.
            case FrameReceived(now_s=now_s, peer=peer, frame=Reserved() as frame):
                self._note_reserved(now_s, peer, frame, commands)
            case FrameReceived(now_s=now_s, frame=KvEnded() as frame):
                self._note_ended(now_s, frame, commands)
            case FrameReceived(peer=peer, frame=KvFreed() as frame):
                self._freeing.discard((frame.seq_id, peer))
            case RequestGone(seq_id=seq_id):
                if seq_id in self.underway:
                    self._free_sources(self._abandon(seq_id), commands)
                elif seq_id in self.waiting:
                    self._free_sources(self.waiting.pop(seq_id), commands)
            case SourceLost(worker_id=worker_id):
                self._note_lost(worker_id, commands)
            case RoomReported(free_blocks=free_blocks):
                self._free = dict(free_blocks)
        return commands

    def start(self, now_s: float) -> list[ExchangeCommand]:
        """Start moves while the window and the ledger allow; call it after events."""
        commands: list[ExchangeCommand] = []
        queues = self._queues()
        while (move := self._next_fitting(queues)) is not None:
            self._begin(move, now_s, commands)
        # Deadlock: no move in flight will free blocks, so recompute a waiting sequence. The one
        # with the fewest computed tokens costs least.
        if self.waiting and not self.underway and not self._freeing:
            victim = min(self.waiting.values(), key=lambda move: (move.tokens, move.seq_id))
            self._recompute(victim, commands)
        return commands

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert not self.waiting.keys() & self.underway.keys()
        self.window.check_invariants(
            {seq_id: entry.move.sizes for seq_id, entry in self.underway.items()}
        )
        for entry in self.underway.values():
            assert entry.unreserved or entry.unfinished, "a finished move is still under way"
        assert not self._lost & {worker_id for _, worker_id in self._freeing}

    def _add(self, move: SequenceMove, commands: list[ExchangeCommand]) -> None:
        assert move.seq_id not in self.waiting
        assert move.seq_id not in self.underway
        if any(transfer.source in self._lost for transfer in move.transfers):
            self._recompute(move, commands)
        elif move.transfers:
            self.waiting[move.seq_id] = move
        else:
            self._complete(move, commands)

    def _note_lost(self, worker_id: str, commands: list[ExchangeCommand]) -> None:
        """Recompute sequences that still need KV of `worker_id`; expect no `KvFreed` from it."""
        self._lost.add(worker_id)
        self._freeing = {entry for entry in self._freeing if entry[1] != worker_id}
        unfinished = {seq_id: move.transfers for seq_id, move in self.waiting.items()}
        unfinished |= {
            seq_id: (*move.unfinished.values(),) for seq_id, move in self.underway.items()
        }
        for seq_id, transfers in unfinished.items():
            if any(transfer.source == worker_id for transfer in transfers):
                is_underway = seq_id in self.underway
                move = self._abandon(seq_id) if is_underway else self.waiting[seq_id]
                self._recompute(move, commands)

    def _queues(self) -> dict[str, deque[SequenceMove]]:
        """The waiting moves by origin, highest block first."""
        queues: dict[str, deque[SequenceMove]] = {}
        by_block = sorted(
            self.waiting.values(),
            key=lambda move: (move.highest_block, move.seq_id),
            reverse=True,
        )
        for move in by_block:
            queues.setdefault(move.origin, deque()).append(move)
        return queues

    def _next_fitting(self, queues: dict[str, deque[SequenceMove]]) -> SequenceMove | None:
        """Pop the move that starts next from `queues`; None if no move can start.

        Prefers a different origin from the last move's, so that both sides of an exchange free
        blocks.
        """
        # Skip moves that do not fit: within this call of `start`, room can only shrink.
        for queue in queues.values():
            while queue and not (self._fits(queue[0]) and self.window.has_room(queue[0].sizes)):
                queue.popleft()
        heads = [queue[0] for queue in queues.values() if queue]
        if not heads:
            return None
        move = max(
            heads,
            key=lambda move: (
                move.origin != self._last_origin,
                move.highest_block,
                move.seq_id,
            ),
        )
        return queues[move.origin].popleft()

    def _fits(self, move: SequenceMove) -> bool:
        return all(self._free.get(worker_id, 0) >= move.blocks for worker_id in move.lacking)

    def _begin(self, move: SequenceMove, now_s: float, commands: list[ExchangeCommand]) -> None:
        """Start a move: have every destination reserve blocks and accept the transfers."""
        del self.waiting[move.seq_id]
        self.window.note_started(move.seq_id, move.sizes, now_s)
        self._last_origin = move.origin
        seq_id, destinations = move.seq_id, {transfer.destination for transfer in move.transfers}
        transfers = {transfer_id_of(self.epoch, seq_id, entry): entry for entry in move.transfers}
        self.underway[seq_id] = _ActiveMove(move, destinations, transfers)
        for worker_id in sorted(destinations):
            if worker_id in move.lacking:
                self._free[worker_id] -= move.blocks
            ids = tuple(key for key, entry in transfers.items() if entry.destination == worker_id)
            frame = Reserve(worker_id, seq_id, move.blocks, ids)
            commands.append(SendFrame(worker_id, frame))

    def _note_reserved(
        self, now_s: float, peer: str, frame: Reserved, commands: list[ExchangeCommand]
    ) -> None:
        entry = self.underway.get(frame.seq_id)
        if entry is None or peer not in entry.unreserved:
            return
        entry.unreserved.remove(peer)
        if entry.unreserved:
            return
        # Send only after every destination has reserved: it refuses KV without reserved blocks.
        self.window.note_reserved(frame.seq_id, now_s)
        blocks = blocks_for(entry.move.tokens, self.block_size)
        for transfer_id, transfer in entry.unfinished.items():
            send = SendKv(frame.seq_id, transfer_id, transfer, blocks)
            commands.append(SendFrame(transfer.source, send))

    def _note_ended(self, now_s: float, frame: KvEnded, commands: list[ExchangeCommand]) -> None:
        entry = self.underway.get(frame.seq_id)
        if entry is None or frame.transfer_id not in entry.unfinished:
            return
        # A failed transfer is not retried: recompute the sequence, and free its sources.
        if not frame.intact:
            self._recompute(self._abandon(frame.seq_id), commands)
            return
        del entry.unfinished[frame.transfer_id]
        if not entry.unfinished:
            move = self.underway.pop(frame.seq_id).move
            self.window.note_arrived(frame.seq_id, move.sizes, now_s)
            self._complete(move, commands)

    def _abandon(self, seq_id: str) -> SequenceMove:
        """Remove a started move from the state; later frames about it are ignored."""
        move = self.underway.pop(seq_id).move
        self.window.note_abandoned(seq_id, move.sizes)
        return move

    def _complete(self, move: SequenceMove, commands: list[ExchangeCommand]) -> None:
        commands.append(ResumeRequest(move.seq_id))
        self._free_sources(move, commands)

    def _recompute(self, move: SequenceMove, commands: list[ExchangeCommand]) -> None:
        self.waiting.pop(move.seq_id, None)
        commands.append(RecomputeRequest(move.seq_id))
        self._free_sources(move, commands)

    def _free_sources(self, move: SequenceMove, commands: list[ExchangeCommand]) -> None:
        """Send `FreeKv` to all workers with a source copy, apart from lost workers."""
        sources = {transfer.source for transfer in move.transfers} | move.leaving
        for worker_id in sorted(sources - self._lost):
            self._freeing.add((move.seq_id, worker_id))
            frame = FreeKv(move.seq_id, whole_table=worker_id in move.leaving)
            commands.append(SendFrame(worker_id, frame))
