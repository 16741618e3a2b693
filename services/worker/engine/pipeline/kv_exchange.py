"""Moves running requests' KV after a change of layers: asks, sends, receives (KunServe §4.2).

The leader's part carries out what `core.changeover` decides; the member's part answers any leader.
Transfers run on the mover's thread; tables and mappings change under the stage's lock, so a piece
of a request that is gone is refused, and never written to blocks of another request.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

import torch

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
    SourceLost,
    StartTransfer,
    TransferEnded,
)
from services.core.changeover.route import Transfer
from services.core.groups.layer_map import Stage
from services.core.planner.sequence import Phase
from services.core.planner.state import IterationState
from services.core.request import blocks_for
from services.worker.engine.pipeline.configuration import Configuration
from services.worker.engine.pipeline.frames import (
    Capacity,
    Credit,
    FreeKv,
    KvEnded,
    KvFreed,
    Reserve,
    Reserved,
    SendKv,
)
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.engine.transfer.errors import MoverFull, TransferRefused
from services.worker.engine.transfer.frame import Bytes
from services.worker.engine.transfer.mover import Mover
from services.worker.engine.transfer.pieces import KvCut, KvPiece, kv_pieces


def transfer_id_of(epoch: int, request_id: str, transfer: Transfer) -> str:
    """Unique: a request moves between two workers once in an epoch."""
    return f"{epoch}/{request_id}/{transfer.source}>{transfer.destination}"


@dataclass(slots=True)
class LeaderExchange:
    """The moves of requests that this worker leads now; `own` is its part as a member."""

    links: Links
    state: IterationState
    own: "MemberExchange"
    exchange: ExchangeState = field(default_factory=ExchangeState)
    _configuration: Configuration | None = None
    _transfers: dict[str, tuple[str, Transfer]] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """Whether every request's KV is where it runs."""
        return self.exchange.settled

    def enter(self, configuration: Configuration) -> None:
        """Begin a configuration; the one before is settled, or its requests are recomputed."""
        self._configuration = configuration
        self.exchange = ExchangeState(self.exchange.window)
        self._transfers.clear()

    def add(self, request_id: str, origin: str, old: tuple[Stage, ...], highest_block: int) -> None:
        """Bring a held request's KV from `old` stages to the present ones, then resume it."""
        assert self._configuration is not None
        sequence = self.state.sequences[request_id]
        move = Move.between(sequence, origin, old, self._configuration.stages, highest_block)
        self._carry_out(self.exchange.handle(MoveAdded(move)))

    def advance(self) -> None:
        """Start what may start; call it in each turn until `settled`."""
        if self.exchange.settled:
            return
        assert self._configuration is not None
        self._drop_gone()
        ledger = self.state.roster.ledger
        room = {
            stage.worker_id: ledger.room(index)
            for index, stage in enumerate(self._configuration.stages)
        }
        self.exchange.handle(RoomReported(room))
        self._carry_out(self.exchange.start())

    def _drop_gone(self) -> None:
        """Forget requests that were aborted or preempted since."""
        for request_id in (*self.exchange.waiting, *self.exchange.underway):
            sequence = self.state.sequences.get(request_id)
            if sequence is None or sequence.phase is not Phase.HELD:
                self._carry_out(self.exchange.handle(RequestGone(request_id)))

    def lose(self, worker_id: str) -> None:
        """A worker of another group is gone: KV that it has not sent is computed again."""
        self._drop_gone()
        self._carry_out(self.exchange.handle(SourceLost(worker_id)))

    def note_reserved(self, peer: str, body: Reserved) -> None:
        """A member is ready for a request's KV."""
        self._drop_gone()
        self._carry_out(self.exchange.handle(BlocksReserved(body.request_id, peer)))

    def note_ended(self, _peer: str, body: KvEnded) -> None:
        """A transfer is over."""
        self._drop_gone()
        request_id, transfer = self._transfers.pop(body.transfer_id, (None, None))
        if request_id is not None and transfer is not None:
            self._carry_out(self.exchange.handle(TransferEnded(request_id, transfer, body.intact)))

    def note_freed(self, peer: str, body: KvFreed) -> None:
        """A source has freed departed KV and may have more room."""
        if self._configuration is not None:
            for index, stage in enumerate(self._configuration.stages):
                if stage.worker_id == peer and index:
                    self.state.set_capacity(index, body.capacity)
        self._carry_out(self.exchange.handle(DepartedFreed(body.request_id, peer)))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case ReserveBlocks():
                    self._reserve(command)
                case StartTransfer(request_id=request_id, transfer=transfer):
                    self._send(request_id, transfer)
                case FreeDeparted():
                    body = FreeKv(command.request_id, command.whole_table)
                    self.links.send(command.worker_id, body)
                case ResumeRequest(request_id=request_id):
                    self.state.resume(request_id)
                case RecomputeRequest(request_id=request_id):
                    self.state.preempt(request_id)

    def _reserve(self, command: ReserveBlocks) -> None:
        configuration = self._configuration
        assert configuration is not None
        move = self.exchange.underway[command.request_id].move
        ids = []
        for transfer in move.transfers:
            if transfer.destination == command.worker_id:
                transfer_id = transfer_id_of(configuration.epoch, command.request_id, transfer)
                self._transfers[transfer_id] = (command.request_id, transfer)
                ids.append(transfer_id)
        if command.blocks:
            stage = [stage.worker_id for stage in configuration.stages].index(command.worker_id)
            placed = self.state.place(command.request_id, stage)
            assert placed, "the ledger has less room than it reported"
        if command.worker_id == configuration.leader:
            body = Reserve(command.worker_id, command.request_id, move.blocks, tuple(ids))
            self.links.send(command.worker_id, body)
        else:
            released = self.own.take_released(self.state)
            body = Reserve(command.worker_id, command.request_id, move.blocks, tuple(ids), released)
            self.links.send(configuration.next_worker, body)

    def _send(self, request_id: str, transfer: Transfer) -> None:
        assert self._configuration is not None
        block_size = self.state.config.block_size
        blocks = blocks_for(self.state.sequences[request_id].computed, block_size)
        transfer_id = transfer_id_of(self._configuration.epoch, request_id, transfer)
        self.links.send(transfer.source, SendKv(request_id, transfer_id, transfer, blocks))


class MemberExchange:
    """The part of a member: it serves the leaders of its requests."""

    def __init__(self, links: Links, stage: StageRunner, mover: Mover) -> None:
        self._links = links
        self._stage = stage
        self._mover = mover
        self._leader = ""
        self._departing: set[str] = set()
        self._unclaimed: set[str] = set()
        self._expected: dict[str, tuple[str, str]] = {}  # transfer id → request id, its leader
        self._sending: dict[str, tuple[str, str]] = {}

    @property
    def settled(self) -> bool:
        """Whether no KV of departed layers is kept here any more."""
        return not self._departing and not self._stage.runner.stage_memory.departed_layers

    def unclaimed_by(self, led: Container[str]) -> bool:
        """Whether a request that was here before the last change may be another group's now.

        Its leader has yet to fetch its KV, or to give it up; `led` are those that this worker
        leads. Until then it must not change groups: the frames of that leader would be stale.
        """
        table = self._stage.table
        return any(name in table and name not in led for name in self._unclaimed)

    def claim(self, request_ids: Iterable[str]) -> None:
        """These requests belong to this worker's group."""
        if self._unclaimed:
            self._unclaimed.difference_update(request_ids)

    def enter(self, leader: str) -> None:
        """Begin a configuration: KV of layers that this stage does not run departs."""
        self._leader = leader
        self._unclaimed = set(self._stage.table.request_ids)
        self._expected.clear()
        self._sending.clear()
        self._departing = set()
        if self._stage.runner.stage_memory.departed_layers:
            self._departing = set(self._stage.table.request_ids)

    def reserve(self, peer: str, body: Reserve) -> None:
        """Have the blocks ready, and take the transfers."""
        with self._stage.lock:
            if peer != self._links.worker_id:
                self._stage.table.adopt(body.request_id, body.blocks)
            elif body.request_id not in self._stage.table:
                return  # it ended since this leader took the blocks itself
            for transfer_id in body.transfer_ids:
                self._expected[transfer_id] = (body.request_id, peer)
        self._links.send(peer, Reserved(body.request_id))

    def send(self, peer: str, body: SendKv) -> None:
        """Begin a transfer in the background."""
        memory = self._stage.runner.stage_memory
        cut = KvCut(
            body.transfer_id,
            body.request_id,
            range(body.transfer.first_layer, body.transfer.end_layer),
            body.blocks,
            memory.kv_ranges[0].shape.size_bytes,
        )
        pieces = kv_pieces(cut, lambda: self._mover.chunk_bytes, self._packer(body.request_id))
        self._sending[body.transfer_id] = (body.request_id, peer)
        try:
            self._mover.send(
                body.transfer_id,
                body.transfer.destination,
                self._links.group_id,
                self._links.epoch,
                pieces,
            )
        except MoverFull:
            self.note_failed(body.transfer_id)

    def take_released(self, state: IterationState) -> tuple[str, ...]:
        """Names of released requests, for the next stages; transfers for them are refused here."""
        with self._stage.lock:
            released = state.take_released()
            self.forget(released)
        return released

    def forget(self, released: Iterable[str]) -> None:
        """Refuse transfers to requests whose blocks were released.

        To be called with the stage's lock held since the release: the same request may be given
        other blocks at once.
        """
        if self._expected:
            names = frozenset(released)
            self._expected = {
                transfer_id: entry
                for transfer_id, entry in self._expected.items()
                if entry[0] not in names
            }

    def take(self, piece: KvPiece, payload: Bytes) -> None:
        """Store a piece that arrived; on the mover's thread. Raises TransferRefused."""
        with self._stage.lock:
            request_id, _ = self._expected.get(piece.transfer_id, ("", ""))
            ids = self._stage.table.block_ids(request_id)
            end = piece.first_block + piece.num_blocks
            if request_id != piece.request_id or end > len(ids):
                raise TransferRefused(f"{piece.request_id} is not expected here any more")
            blocks = ids[piece.first_block : end]
            memory = self._stage.runner.stage_memory
            memory.unpack_kv(piece.layer, blocks, torch.from_numpy(payload))

    def note_received(self, transfer_id: str) -> None:
        """A transfer to this member is complete and verified."""
        request_id, leader = self._expected.pop(transfer_id, ("", ""))
        if request_id:
            self._links.send(leader, KvEnded(request_id, transfer_id, intact=True))

    def note_sent(self, transfer_id: str) -> None:
        """A transfer from this member is complete; its receiver says so to the leader."""
        self._sending.pop(transfer_id, None)

    def note_failed(self, transfer_id: str) -> None:
        """A transfer from or to this member has failed."""
        entry = self._sending.pop(transfer_id, None) or self._expected.pop(transfer_id, None)
        if entry is not None:
            request_id, leader = entry
            self._links.send(leader, KvEnded(request_id, transfer_id, intact=False))

    def free(self, peer: str, body: FreeKv) -> None:
        """Free a request's departed KV, and with `whole_table` the rest."""
        table = self._stage.table
        self._unclaimed.discard(body.request_id)
        for transfer_id, (request_id, _) in self._sending.items():
            if request_id == body.request_id:
                self._mover.cancel(transfer_id)
        with self._stage.lock:
            self._departing.discard(body.request_id)
            freed = len(table.block_ids(body.request_id)) if body.whole_table else 0
            if freed:
                table.release(body.request_id)
            self._release_departed()
            capacity = table.pool.usable
        self._links.send(peer, KvFreed(body.request_id, capacity))
        if self._leader == self._links.worker_id:
            return
        if self._leader != peer:
            self._links.send(self._leader, Capacity(capacity))
        if freed:
            # Also one that says so itself does not know how many there were: since it has the
            # request no more, or never took it, these are of none of its sequences.
            self._links.send(self._leader, Credit(freed))

    def release_unclaimed(self, led: Container[str]) -> None:
        """No other group can fetch KV here any more: what is not of `led` requests goes."""
        table = self._stage.table
        gone = [name for name in self._unclaimed if name in table and name not in led]
        self._unclaimed.clear()
        with self._stage.lock:
            for request_id in gone:
                table.release(request_id)

    def sweep(self) -> None:
        """Notice departing requests that have ended meanwhile; call it in each turn."""
        table = self._stage.table
        self._unclaimed.intersection_update(table.request_ids)
        gone = [request_id for request_id in self._departing if request_id not in table]
        if gone or (not self._departing and self._stage.runner.stage_memory.departed_layers):
            with self._stage.lock:
                self._departing.difference_update(gone)
                grown = self._release_departed()
            if grown and self._leader != self._links.worker_id:
                self._links.send(self._leader, Capacity(table.pool.usable))

    def _release_departed(self) -> bool:
        """Shrink the departed layers' KV; returns whether there are more blocks now."""
        table, memory = self._stage.table, self._stage.runner.stage_memory
        if not memory.departed_layers:
            return False
        needed = table.highest_block(self._departing) + 1
        blocks = memory.release_departed(needed)
        grown = blocks > table.pool.num_blocks
        if grown:
            table.pool.grow(blocks)
        return grown

    def _packer(self, request_id: str) -> Callable[[int, int, int], object]:
        """Reads the blocks that the request has now; refuses once it has others, or none."""
        had = self._stage.table.block_ids(request_id)

        def pack(layer: int, first: int, count: int) -> object:
            with self._stage.lock:
                ids = self._stage.table.block_ids(request_id)[first : first + count]
                if len(ids) < count or ids != had[first : first + count]:
                    raise TransferRefused(f"{request_id} is gone")
                return self._stage.runner.stage_memory.pack_kv(layer, ids)

        return pack
