"""Moves running requests' KV between simulated workers; `core.changeover` decides what when.

As in a real worker, the leader's part carries out decisions and the member's part answers any
leader. Here a transfer is a number of bytes on a link, and always arrives intact.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Row

from services.core.changeover.kv_exchange import (
    BlocksReserved,
    Command,
    DepartedFreed,
    ExchangeState,
    FreeDeparted,
    Move,
    MoveAdded,
    RecomputeRequest,
    RequestGone,
    ReserveBlocks,
    ResumeRequest,
    RoomReported,
    StartTransfer,
    TransferEnded,
)
from services.core.changeover.route import Transfer
from services.core.groups.layer_map import Stage
from services.core.planner.sequence import Phase
from services.core.planner.state import PlannerState
from services.core.request import blocks_for
from tideserve.sim.change_log import ChangeLog
from tideserve.sim.post import Post
from tideserve.sim.stage_memory import StageMemory


class LeaderExchange:
    """The moves of requests that this worker leads now."""

    def __init__(self, post: Post, state: PlannerState, window: int) -> None:
        self._state = state
        self._post = post
        self._exchange = ExchangeState(window)

    @property
    def settled(self) -> bool:
        """Whether every request's KV is where it runs."""
        return self._exchange.settled

    def check_invariants(self) -> None:
        """Those of the exchange."""
        self._exchange.check_invariants()

    def enter(self) -> None:
        """Begin a configuration; the one before is settled."""
        self._exchange = ExchangeState(self._exchange.window)

    def add(self, request_id: str, origin: str, old: Row[Stage], highest_block: int) -> None:
        """Bring a held request's KV from `old` stages to the present ones, then resume it."""
        sequence = self._state.sequences[request_id]
        move = Move.between(sequence, origin, old, self._post.stages, highest_block)
        self._carry_out(self._exchange.handle(MoveAdded(move)))

    def advance(self) -> None:
        """Start what may start; call it in each turn."""
        if self._exchange.settled:
            return
        self._drop_gone()
        ledger = self._state.sequence_table.ledger
        stages = self._post.stages
        room = {stage.worker_id: ledger.room(index) for index, stage in enumerate(stages)}
        self._exchange.handle(RoomReported(room))
        self._carry_out(self._exchange.start())

    def note_reserved(self, worker_id: str, request_id: str) -> None:
        """A member is ready for a request's KV."""
        self._drop_gone()
        self._carry_out(self._exchange.handle(BlocksReserved(request_id, worker_id)))

    def note_ended(self, request_id: str, transfer: Transfer) -> None:
        """A transfer has arrived."""
        self._drop_gone()
        self._carry_out(self._exchange.handle(TransferEnded(request_id, transfer, intact=True)))

    def note_freed(self, worker_id: str, request_id: str, capacity: int) -> None:
        """A source has given departed KV up and may have more room."""
        for index, stage in enumerate(self._post.stages):
            if stage.worker_id == worker_id and index:
                self._state.set_capacity(index, capacity)
        self._carry_out(self._exchange.handle(DepartedFreed(request_id, worker_id)))

    def _drop_gone(self) -> None:
        """Forget requests that were preempted since."""
        for request_id in (*self._exchange.waiting, *self._exchange.underway):
            sequence = self._state.sequences.get(request_id)
            if sequence is None or sequence.phase is not Phase.HELD:
                self._carry_out(self._exchange.handle(RequestGone(request_id)))

    def _carry_out(self, commands: list[Command]) -> None:
        post = self._post
        for command in commands:
            match command:
                case ReserveBlocks():
                    self._reserve(command)
                case StartTransfer(request_id=request_id, transfer=transfer):
                    tokens = self._state.sequences[request_id].computed
                    blocks = blocks_for(tokens, self._state.config.block_size)
                    post.send(
                        transfer.source, lambda peer: peer.kv.send, request_id, transfer, blocks
                    )
                case FreeDeparted(worker_id=worker_id, request_id=request_id):
                    whole_table = command.whole_table
                    post.send(
                        worker_id, lambda peer: peer.kv.free, post.name, request_id, whole_table
                    )
                case ResumeRequest(request_id=request_id):
                    self._state.resume(request_id)
                case RecomputeRequest(request_id=request_id):
                    self._state.preempt(request_id)

    def _reserve(self, command: ReserveBlocks) -> None:
        request_id, worker_id, post = command.request_id, command.worker_id, self._post
        move = self._exchange.underway[request_id].move
        expected = tuple(one for one in move.transfers if one.destination == worker_id)
        if command.blocks:
            stage = [stage.worker_id for stage in post.stages].index(worker_id)
            placed = self._state.place(request_id, stage)
            assert placed, "the ledger has less room than it reported"
        arguments = (post.name, worker_id, request_id, move.blocks, expected)
        if worker_id == post.name:
            post.send(worker_id, lambda peer: peer.kv.reserve, *arguments, ())
        else:
            released = self._state.take_released()
            post.send_along(lambda peer: peer.kv.reserve, *arguments, released)


class MemberExchange:
    """What a member has for the leaders of its requests: KV that departs, KV that is expected."""

    def __init__(
        self, post: Post, state: PlannerState, memory: StageMemory, log: ChangeLog
    ) -> None:
        self._post = post
        self._table = state.table
        self._block_bytes = state.config.block_size * memory.shape.kv_bytes
        self._memory = memory
        self._log = log
        self._departing: set[str] = set()
        self._expected: dict[tuple[str, Transfer], str] = {}  # -> the request's leader

    @property
    def settled(self) -> bool:
        """Whether no KV of departed layers is kept here any more."""
        return not self._departing and not self._memory.departed_layers

    def enter(self) -> None:
        """Begin a configuration: what requests have here of other layers departs."""
        self._expected.clear()
        departs = bool(self._memory.departed_layers)
        self._departing = set(self._table.request_ids) if departs else set()

    def forget(self, released: Iterable[str]) -> None:
        """Refuse what is on its way for requests whose blocks were released."""
        if self._expected:
            names = frozenset(released)
            self._expected = {
                key: leader for key, leader in self._expected.items() if key[0] not in names
            }

    def reserve(
        self,
        leader: str,
        worker_id: str,
        request_id: str,
        blocks: int,
        expected: tuple[Transfer, ...],
        released: tuple[str, ...],
    ) -> None:
        """From the leader: have blocks ready for KV, if it is this worker that is meant."""
        self._post.release(released)
        if worker_id != self._post.name:
            return
        if leader != worker_id:
            self._table.adopt(request_id, blocks)
        elif request_id not in self._table:
            return  # it has ended since this leader took the blocks itself
        self._expected |= {(request_id, transfer): leader for transfer in expected}
        self._post.send(leader, lambda peer: peer.exchange.note_reserved, worker_id, request_id)

    def send(self, request_id: str, transfer: Transfer, blocks: int) -> None:
        """From the leader: send KV of the request's first `blocks` blocks."""
        layers = transfer.end_layer - transfer.first_layer
        size_bytes = blocks * self._block_bytes * layers
        self._log.note_moved(self._post.name, size_bytes)
        self._post.send_bulk(
            transfer.destination, size_bytes, lambda peer: peer.kv.take, request_id, transfer
        )

    def take(self, request_id: str, transfer: Transfer) -> None:
        """KV has arrived, which perhaps nobody waits for any more."""
        leader = self._expected.pop((request_id, transfer), None)
        if leader is not None:
            self._post.send(leader, lambda peer: peer.exchange.note_ended, request_id, transfer)

    def free(self, leader: str, request_id: str, whole_table: bool) -> None:
        """From a leader: departed KV is not needed any more, with `whole_table` nor is the rest."""
        self._departing.discard(request_id)
        freed = len(self._table.block_ids(request_id)) if whole_table else 0
        if freed:
            self._table.release(request_id)
        self._release_departed()
        name, capacity, mine = self._post.name, self._table.pool.usable, self._post.stages[0]
        self._post.send(leader, lambda peer: peer.exchange.note_freed, name, request_id, capacity)
        if mine.worker_id not in (leader, name):
            self._post.send(mine.worker_id, lambda peer: peer.capacity.set, name, capacity)
            self._post.send(mine.worker_id, lambda peer: peer.capacity.credit, name, freed)

    def sweep(self) -> None:
        """Notice departing requests that have ended; call it in each turn."""
        if not self._memory.departed_layers:
            return
        gone = {request_id for request_id in self._departing if request_id not in self._table}
        self._departing -= gone
        name, leader = self._post.name, self._post.stages[0].worker_id
        if (gone or not self._departing) and self._release_departed() and leader != name:
            usable = self._table.pool.usable
            self._post.send(leader, lambda peer: peer.capacity.set, name, usable)

    def _release_departed(self) -> bool:
        """Shrink the departed layers' KV; returns whether there are more blocks now."""
        pool, memory = self._table.pool, self._memory
        if not memory.departed_layers:
            return False
        memory.release_departed(self._table.highest_block(self._departing) + 1)
        grown = memory.blocks > pool.num_blocks
        if grown:
            pool.grow(memory.blocks)
        return grown
