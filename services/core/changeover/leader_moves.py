"""The leader's part in the KV exchange: executes `ExchangeState`'s commands (KunServe §4.2)."""

from collections.abc import Iterable
from collections.abc import Sequence as Row
from dataclasses import replace

from services.core.changeover.frames import KvEnded, KvFreed, Reserve, Reserved
from services.core.changeover.kv_exchange import (
    ExchangeCommand,
    ExchangeFrame,
    ExchangeState,
    Move,
    MoveAdded,
    RecomputeRequest,
    RequestGone,
    ResumeRequest,
    RoomReported,
    SourceLost,
)
from services.core.changeover.member_context import MemberContext
from services.core.changeover.move_window import MoveWindow
from services.core.changeover.stage_kv import StageKv
from services.core.changeover.vocabulary import FrameReceived, SendFrame
from services.core.groups.layer_map import Stage
from services.core.planner.configuration_events import (
    CapacityReported,
    SequencePlaced,
    SequencePreempted,
    SequenceResumed,
)
from services.core.planner.sequence import Phase


class LeaderMoves:
    """Moves the KV of the requests that this worker leads; `kv` is the same worker's stage part."""

    def __init__(self, context: MemberContext, kv: StageKv, link_blocks_per_s: float) -> None:
        self._context = context
        self._kv = kv
        self._link_blocks_per_s = link_blocks_per_s
        self._exchange = self._new_exchange()

    @property
    def settled(self) -> bool:
        """Whether every request's KV is where it runs and all source copies are freed."""
        return self._exchange.settled

    def check_invariants(self) -> None:
        """Check the invariants of the exchange."""
        self._exchange.check_invariants()

    def enter(self) -> None:
        """Start a configuration; the last has settled, or its requests are recomputed."""
        self._exchange = self._new_exchange()

    def add(self, seq_id: str, origin: str, old: Row[Stage], highest_block: int) -> None:
        """Move a held request's KV from `old` stages to the present ones, then resume it."""
        sequence = self._context.planner.sequences[seq_id]
        move = Move.between(sequence, origin, old, self._context.stages, highest_block)
        self._carry_out(self._exchange.handle(MoveAdded(move)))

    def advance(self) -> None:
        """Start the moves for which there is room; call it in each turn until `settled`."""
        if self._exchange.settled:
            return
        # Requests that ended meanwhile must not get blocks reserved.
        self._drop_gone((*self._exchange.waiting, *self._exchange.underway))
        ledger = self._context.planner.sequence_table.ledger
        stages = self._context.stages
        room = {stage.worker_id: ledger.room(index) for index, stage in enumerate(stages)}
        self._exchange.handle(RoomReported(room))
        self._carry_out(self._exchange.start(self._context.now_s))

    def lose(self, worker_id: str) -> None:
        """Recompute the KV that a lost worker of another group has not sent."""
        self._drop_gone((*self._exchange.waiting, *self._exchange.underway))
        self._carry_out(self._exchange.handle(SourceLost(worker_id)))

    def receive(self, peer: str, frame: Reserved | KvEnded) -> None:
        """Take a member's report of reserved blocks, or of the end of a transfer."""
        self._drop_gone((frame.seq_id,))
        self._forward(peer, frame)

    def note_freed(self, peer: str, frame: KvFreed) -> None:
        """Take a source's report that it freed a request's departed KV."""
        # The freed chunks may have grown the pool of a stage behind this leader's own.
        for index, stage in enumerate(self._context.stages):
            if stage.worker_id == peer and index:
                self._context.change(CapacityReported(index, frame.capacity))
        self._forward(peer, frame)

    def _new_exchange(self) -> ExchangeState:
        configuration, planner = self._context.configuration, self._context.planner
        epoch = configuration.epoch if configuration is not None else -1
        window = MoveWindow(self._link_blocks_per_s)
        return ExchangeState(epoch, planner.config.block_size, window)

    def _forward(self, peer: str, frame: ExchangeFrame) -> None:
        event = FrameReceived(self._context.now_s, peer, frame)
        self._carry_out(self._exchange.handle(event))

    def _drop_gone(self, seq_ids: Iterable[str]) -> None:
        """Remove those of these requests from the exchange that were aborted or preempted since."""
        sequences = self._context.planner.sequences
        for seq_id in seq_ids:
            sequence = sequences.get(seq_id)
            if sequence is None or sequence.phase is not Phase.HELD:
                self._carry_out(self._exchange.handle(RequestGone(seq_id)))

    def _carry_out(self, commands: list[ExchangeCommand]) -> None:
        context = self._context
        for command in commands:
            match command:
                case SendFrame(frame=Reserve() as frame):
                    self._reserve(frame)
                case SendFrame():
                    context.commands.append(command)
                case ResumeRequest():
                    context.change(SequenceResumed(command.seq_id))
                case RecomputeRequest():
                    context.change(SequencePreempted(command.seq_id))

    def _reserve(self, frame: Reserve) -> None:
        context, configuration = self._context, self._context.configuration
        assert configuration is not None
        seq_id, worker_id = frame.seq_id, frame.worker_id
        if worker_id in self._exchange.underway[seq_id].move.lacking:
            # The ledger counts the blocks as used before the stage has adopted them.
            context.change(SequencePlaced(seq_id, configuration.stage_of(worker_id)))
        if worker_id == context.worker_id:
            context.send(worker_id, frame)
        else:
            # Along the stages, behind all microbatches, and with the requests released since: the
            # stage must free the blocks that the ledger counts as free before it reserves these.
            context.send_along(replace(frame, released=self._kv.take_released()))
