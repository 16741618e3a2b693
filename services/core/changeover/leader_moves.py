"""The leader's part in moving KV: carries out what `ExchangeState` decides (KunServe §4.2)."""

from collections.abc import Iterable
from collections.abc import Sequence as Row

from services.core.changeover.frames import FreeKv, KvEnded, KvFreed, Reserve, Reserved, SendKv
from services.core.changeover.kv_exchange import (
    BlocksReserved,
    DepartedFreed,
    ExchangeCommand,
    ExchangeState,
    FreeDeparted,
    Move,
    MoveAdded,
    MoveEnded,
    RecomputeRequest,
    RequestGone,
    ReserveBlocks,
    ResumeRequest,
    RoomReported,
    SourceLost,
    StartTransfer,
)
from services.core.changeover.member_context import MemberContext
from services.core.changeover.move_window import MoveWindow
from services.core.changeover.route import Transfer
from services.core.changeover.stage_kv import StageKv
from services.core.groups.layer_map import Stage
from services.core.planner.configuration_events import (
    CapacityReported,
    SequencePlaced,
    SequencePreempted,
    SequenceResumed,
)
from services.core.planner.sequence import Phase
from services.core.request import blocks_for


def transfer_id_of(epoch: int, request_id: str, transfer: Transfer) -> str:
    """Unique: a request moves between two workers once in an epoch."""
    return f"{epoch}/{request_id}/{transfer.source}>{transfer.destination}"


class LeaderMoves:
    """The moves of requests that this worker leads now; `kv` is its part as a member."""

    def __init__(self, context: MemberContext, kv: StageKv, link_blocks_per_s: float) -> None:
        self._context = context
        self._kv = kv
        self._link_blocks_per_s = link_blocks_per_s
        self._exchange = self._new_exchange()
        self._transfers: dict[str, tuple[str, Transfer]] = {}

    @property
    def settled(self) -> bool:
        """Whether every request's KV is where it runs."""
        return self._exchange.settled

    def check_invariants(self) -> None:
        """Check those of the exchange."""
        self._exchange.check_invariants()

    def enter(self) -> None:
        """Begin a configuration; the one before is settled, or its requests are recomputed."""
        self._exchange = self._new_exchange()
        self._transfers.clear()

    def add(self, request_id: str, origin: str, old: Row[Stage], highest_block: int) -> None:
        """Bring a held request's KV from `old` stages to the present ones, then resume it."""
        sequence = self._context.planner.sequences[request_id]
        move = Move.between(sequence, origin, old, self._context.stages, highest_block)
        self._carry_out(self._exchange.handle(MoveAdded(move)))

    def advance(self) -> None:
        """Start what may start; call it in each turn until `settled`."""
        if self._exchange.settled:
            return
        self._drop_gone((*self._exchange.waiting, *self._exchange.underway))
        ledger = self._context.planner.sequence_table.ledger
        stages = self._context.stages
        room = {stage.worker_id: ledger.room(index) for index, stage in enumerate(stages)}
        self._exchange.handle(RoomReported(room))
        self._carry_out(self._exchange.start(self._context.now_s))

    def lose(self, worker_id: str) -> None:
        """A worker of another group is gone: KV that it has not sent is computed again."""
        self._drop_gone((*self._exchange.waiting, *self._exchange.underway))
        self._carry_out(self._exchange.handle(SourceLost(worker_id)))

    def note_reserved(self, peer: str, frame: Reserved) -> None:
        """A member is ready for a request's KV."""
        self._drop_gone((frame.request_id,))
        reserved = BlocksReserved(self._context.now_s, frame.request_id, peer)
        self._carry_out(self._exchange.handle(reserved))

    def note_ended(self, _peer: str, frame: KvEnded) -> None:
        """A transfer is over."""
        request_id, transfer = self._transfers.pop(frame.transfer_id, (None, None))
        if request_id is not None and transfer is not None:
            self._drop_gone((request_id,))
            ended = MoveEnded(self._context.now_s, request_id, transfer, frame.intact)
            self._carry_out(self._exchange.handle(ended))

    def note_freed(self, peer: str, frame: KvFreed) -> None:
        """A source has freed departed KV and may have more room."""
        for index, stage in enumerate(self._context.stages):
            if stage.worker_id == peer and index:
                self._context.change(CapacityReported(index, frame.capacity))
        self._carry_out(self._exchange.handle(DepartedFreed(frame.request_id, peer)))

    def _new_exchange(self) -> ExchangeState:
        return ExchangeState(MoveWindow(self._link_blocks_per_s))

    def _drop_gone(self, request_ids: Iterable[str]) -> None:
        """Forget those of these requests that were aborted or preempted since."""
        sequences = self._context.planner.sequences
        for request_id in request_ids:
            sequence = sequences.get(request_id)
            if sequence is None or sequence.phase is not Phase.HELD:
                self._carry_out(self._exchange.handle(RequestGone(request_id)))

    def _carry_out(self, commands: list[ExchangeCommand]) -> None:
        context = self._context
        for command in commands:
            match command:
                case ReserveBlocks():
                    self._reserve(command)
                case StartTransfer():
                    self._start(command)
                case FreeDeparted():
                    context.send(command.worker_id, FreeKv(command.request_id, command.whole_table))
                case ResumeRequest():
                    context.change(SequenceResumed(command.request_id))
                case RecomputeRequest():
                    context.change(SequencePreempted(command.request_id))

    def _reserve(self, command: ReserveBlocks) -> None:
        context, configuration = self._context, self._context.configuration
        assert configuration is not None
        name, worker_id = command.request_id, command.worker_id
        move = self._exchange.underway[name].move
        ids = []
        for transfer in move.transfers:
            if transfer.destination == worker_id:
                transfer_id = transfer_id_of(configuration.epoch, name, transfer)
                self._transfers[transfer_id] = (name, transfer)
                ids.append(transfer_id)
        if command.blocks:
            context.change(SequencePlaced(name, configuration.stage_of(worker_id)))
        if worker_id == context.worker_id:
            context.send(worker_id, Reserve(worker_id, name, move.blocks, tuple(ids)))
        else:
            released = self._kv.take_released()
            context.send_along(Reserve(worker_id, name, move.blocks, tuple(ids), released))

    def _start(self, command: StartTransfer) -> None:
        context, configuration = self._context, self._context.configuration
        assert configuration is not None
        name, transfer = command.request_id, command.transfer
        computed = context.planner.sequences[name].computed
        blocks = blocks_for(computed, context.planner.config.block_size)
        transfer_id = transfer_id_of(configuration.epoch, name, transfer)
        context.send(transfer.source, SendKv(name, transfer_id, transfer, blocks))
