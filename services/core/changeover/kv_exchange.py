"""The order in which running requests' KV moves after a change of layers (KunServe §4.2).

The leader of the group that a request belongs to *now* decides. A request is held until its KV is
whole at every stage. Memory could deadlock here: a stage gains room for P / kv tokens by the drop
but may have to take in the KV of a whole instance, while its own departing KV cannot leave before
the other side has room. So there is a ledger: a move starts only once its blocks are reserved
wherever they are lacking; moves alternate between the groups that the requests come from, highest
blocks first, because departing ranges shrink from their ends; and when nothing moves and nothing
fits, the request with the least KV gives its blocks up and is recomputed. Hence some request always
makes progress.
"""

from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Sequence as Row
from dataclasses import dataclass, field

from services.core.changeover.move_window import MoveWindow
from services.core.changeover.route import Transfer, transfers_between
from services.core.groups.layer_map import Stage
from services.core.planner.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Move:
    """A request whose KV is not yet where it will run.

    `blocks` KV blocks of `tokens` tokens; `origin` names the group that it comes from. `lacking`
    are the workers that have to take in blocks, `leaving` those that hold blocks now and are not
    in its group any more. `highest_block` is the largest block id at its sources.
    """

    request_id: str
    origin: str
    blocks: int
    tokens: int
    transfers: tuple[Transfer, ...]
    lacking: frozenset[str]
    leaving: frozenset[str]
    highest_block: int

    @property
    def sizes(self) -> Counter[str]:
        """The KV that each source sends, in blocks of one layer."""
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
    ) -> "Move":
        """What brings a sequence's KV from `old` stages to `new` ones."""
        before, now = ({stage.worker_id for stage in stages} for stages in (old, new))
        return cls(
            request_id=sequence.request_id,
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
    """A request has come into the group, or stayed in it while its layers changed hands."""

    move: Move


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """`worker_id` has the blocks and expects the KV."""

    now_s: float
    request_id: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """A transfer is complete and verified at its destination, or has failed (`intact` False)."""

    now_s: float
    request_id: str
    transfer: Transfer
    intact: bool


@dataclass(frozen=True, slots=True)
class DepartedFreed:
    """`worker_id` has done what `FreeDeparted` told it; a `RoomReported` with it came before."""

    request_id: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class RequestGone:
    """The request was aborted or preempted; its blocks in its group were released with that."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SourceLost:
    """`worker_id`, of another group by now, is gone, and with it the KV that it has not sent."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class RoomReported:
    """Free blocks of each worker of the group, what is reserved counting as taken."""

    free_blocks: Mapping[str, int]


ExchangeEvent = (
    MoveAdded | BlocksReserved | MoveEnded | DepartedFreed | RequestGone | SourceLost | RoomReported
)


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """Have `worker_id` expect KV of the request, in `blocks` new blocks (0: it has them)."""

    request_id: str
    worker_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Have `transfer.source` send."""

    request_id: str
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class FreeDeparted:
    """The source's copy is not needed any more.

    `whole_table`: the worker has left the request's group, so all of its blocks go; else only the
    layers that it does not run.
    """

    request_id: str
    worker_id: str
    whole_table: bool


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """The request's KV is whole at every stage: it may run."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RecomputeRequest:
    """Free the request's KV everywhere; it waits and is computed again."""

    request_id: str


ExchangeCommand = ReserveBlocks | StartTransfer | FreeDeparted | ResumeRequest | RecomputeRequest


@dataclass(slots=True)
class _Underway:
    move: Move
    unreserved: set[str]
    unfinished: set[Transfer]


@dataclass(slots=True)
class ExchangeState:
    """Moves that wait, and moves that are under way: as many as `window` has room for."""

    window: MoveWindow = field(default_factory=MoveWindow)
    waiting: dict[str, Move] = field(default_factory=dict)
    underway: dict[str, _Underway] = field(default_factory=dict)
    _free: dict[str, int] = field(default_factory=dict)
    _freeing: set[tuple[str, str]] = field(default_factory=set)
    _lost: set[str] = field(default_factory=set)
    _last_origin: str = ""

    @property
    def settled(self) -> bool:
        """Whether every request's KV is where it runs."""
        return not self.waiting and not self.underway and not self._freeing

    def handle(self, event: ExchangeEvent) -> list[ExchangeCommand]:
        """Apply one event; return what the driver must do, in order."""
        commands: list[ExchangeCommand] = []
        match event:
            case MoveAdded(move=move):
                self._add(move, commands)
            case BlocksReserved():
                self._reserved(event, commands)
            case MoveEnded():
                self._ended(event, commands)
            case DepartedFreed():
                self._freeing.discard((event.request_id, event.worker_id))
            case RequestGone(request_id=request_id):
                if request_id in self.underway:
                    self._free_sources(self._take(request_id), commands)
                elif request_id in self.waiting:
                    self._free_sources(self.waiting.pop(request_id), commands)
            case SourceLost(worker_id=worker_id):
                self._lose(worker_id, commands)
            case RoomReported(free_blocks=free_blocks):
                self._free = dict(free_blocks)
        return commands

    def start(self, now_s: float) -> list[ExchangeCommand]:
        """Begin moves while the window and the ledger allow; call it after events."""
        commands: list[ExchangeCommand] = []
        lines = self._lines()
        while (move := self._next_fitting(lines)) is not None:
            self._begin(move, now_s, commands)
        if self.waiting and not self.underway and not self._freeing:
            victim = min(self.waiting.values(), key=lambda move: (move.tokens, move.request_id))
            self._recompute(victim, commands)
        return commands

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert not self.waiting.keys() & self.underway.keys()
        self.window.check_invariants(
            {name: entry.move.sizes for name, entry in self.underway.items()}
        )
        for entry in self.underway.values():
            assert entry.unreserved or entry.unfinished, "a finished move is still under way"
        assert not self._lost & {worker_id for _, worker_id in self._freeing}

    def _add(self, move: Move, commands: list[ExchangeCommand]) -> None:
        assert move.request_id not in self.waiting
        assert move.request_id not in self.underway
        if any(transfer.source in self._lost for transfer in move.transfers):
            self._recompute(move, commands)
        elif move.transfers:
            self.waiting[move.request_id] = move
        else:
            self._complete(move, commands)

    def _lose(self, worker_id: str, commands: list[ExchangeCommand]) -> None:
        """Recompute requests whose KV can only come from `worker_id`; expect nothing more of it."""
        self._lost.add(worker_id)
        self._freeing = {entry for entry in self._freeing if entry[1] != worker_id}
        unfinished = {name: set(move.transfers) for name, move in self.waiting.items()}
        unfinished |= {name: entry.unfinished for name, entry in self.underway.items()}
        for request_id, transfers in unfinished.items():
            if any(transfer.source == worker_id for transfer in transfers):
                is_underway = request_id in self.underway
                move = self._take(request_id) if is_underway else self.waiting[request_id]
                self._recompute(move, commands)

    def _lines(self) -> dict[str, deque[Move]]:
        """What waits, by origin, in the order in which it may start."""
        lines: dict[str, deque[Move]] = {}
        by_block = sorted(
            self.waiting.values(),
            key=lambda move: (move.highest_block, move.request_id),
            reverse=True,
        )
        for move in by_block:
            lines.setdefault(move.origin, deque()).append(move)
        return lines

    def _next_fitting(self, lines: dict[str, deque[Move]]) -> Move | None:
        """The move that starts next, of another origin than the last one where that fits.

        It is taken out of its line, as are those that do not fit: room only shrinks by moves that
        begin.
        """
        for line in lines.values():
            while line and not (self._fits(line[0]) and self.window.has_room(line[0].sizes)):
                line.popleft()
        heads = [line[0] for line in lines.values() if line]
        if not heads:
            return None
        move = max(
            heads,
            key=lambda move: (
                move.origin != self._last_origin,
                move.highest_block,
                move.request_id,
            ),
        )
        return lines[move.origin].popleft()

    def _fits(self, move: Move) -> bool:
        return all(self._free.get(worker_id, 0) >= move.blocks for worker_id in move.lacking)

    def _begin(self, move: Move, now_s: float, commands: list[ExchangeCommand]) -> None:
        del self.waiting[move.request_id]
        self.window.begin(move.request_id, move.sizes, now_s)
        self._last_origin = move.origin
        destinations = {transfer.destination for transfer in move.transfers}
        self.underway[move.request_id] = _Underway(move, destinations, set(move.transfers))
        for worker_id in sorted(destinations):
            blocks = move.blocks if worker_id in move.lacking else 0
            if blocks:
                self._free[worker_id] -= blocks
            commands.append(ReserveBlocks(move.request_id, worker_id, blocks))

    def _reserved(self, event: BlocksReserved, commands: list[ExchangeCommand]) -> None:
        entry = self.underway.get(event.request_id)
        if entry is None or event.worker_id not in entry.unreserved:
            return
        entry.unreserved.remove(event.worker_id)
        if not entry.unreserved:
            self.window.reserve(event.request_id, event.now_s)
            commands += [StartTransfer(event.request_id, one) for one in entry.move.transfers]

    def _ended(self, event: MoveEnded, commands: list[ExchangeCommand]) -> None:
        entry = self.underway.get(event.request_id)
        if entry is None or event.transfer not in entry.unfinished:
            return
        if not event.intact:
            self._recompute(self._take(event.request_id), commands)
            return
        entry.unfinished.remove(event.transfer)
        if not entry.unfinished:
            move = self.underway.pop(event.request_id).move
            self.window.arrive(event.request_id, move.sizes, event.now_s)
            self._complete(move, commands)

    def _take(self, request_id: str) -> Move:
        """Give a move that is under way up."""
        move = self.underway.pop(request_id).move
        self.window.end(request_id, move.sizes)
        return move

    def _complete(self, move: Move, commands: list[ExchangeCommand]) -> None:
        commands.append(ResumeRequest(move.request_id))
        self._free_sources(move, commands)

    def _recompute(self, move: Move, commands: list[ExchangeCommand]) -> None:
        self.waiting.pop(move.request_id, None)
        commands.append(RecomputeRequest(move.request_id))
        self._free_sources(move, commands)

    def _free_sources(self, move: Move, commands: list[ExchangeCommand]) -> None:
        sources = {transfer.source for transfer in move.transfers} | move.leaving
        for worker_id in sorted(sources - self._lost):
            self._freeing.add((move.request_id, worker_id))
            commands.append(
                FreeDeparted(move.request_id, worker_id, whole_table=worker_id in move.leaving)
            )
