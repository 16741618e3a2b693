"""Connects the KV exchange of a leader with its planner and its stages (KunServe §4.2).

`ExchangeState` decides when the KV of each held sequence moves after a change of groups; this class
feeds it events and executes its commands.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Row
from dataclasses import replace

from services.core.changeover.frames import KvEnded, KvFreed, Reserve, Reserved
from services.core.changeover.kv_exchange import (
    ExchangeCommand,
    ExchangeFrame,
    ExchangeState,
    MoveAdded,
    RecomputeRequest,
    RequestGone,
    ResumeRequest,
    RoomReported,
    SequenceMove,
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
    """Moves the KV of the sequences that this worker leads; `kv`: this worker's own stage."""

    def __init__(self, context: MemberContext, kv: StageKv, link_blocks_per_s: float) -> None:
        self._context = context
        self._kv = kv
        self._link_blocks_per_s = link_blocks_per_s
        self._exchange = self._new_exchange()

    @property
    def settled(self) -> bool:
        """Whether all moves are complete and all sources have freed their copies."""
        return self._exchange.settled

    def check_invariants(self) -> None:
        """Check the invariants of the exchange."""
        self._exchange.check_invariants()

    def enter(self) -> None:
        """Reset for a new configuration; unfinished moves of the last are abandoned."""
        self._exchange = self._new_exchange()

    def add(self, seq_id: str, origin: str, old: Row[Stage], highest_block: int) -> None:
        """Move a held sequence's KV from `old` stages to the present stages, then resume it."""
        sequence = self._context.planner.sequences[seq_id]
        move = SequenceMove.between(sequence, origin, old, self._context.stages, highest_block)
        self._execute(self._exchange.handle(MoveAdded(move)))

    def advance(self) -> None:
        """Start the moves for which there is room; call it in each turn until `settled`."""
        if self._exchange.settled:
            return
        # Blocks must not be reserved for sequences that have ended.
        self._remove_ended((*self._exchange.waiting, *self._exchange.underway))
        ledger = self._context.planner.sequence_table.ledger
        stages = self._context.stages
        room = {stage.worker_id: ledger.room(index) for index, stage in enumerate(stages)}
        self._exchange.handle(RoomReported(room))
        self._execute(self._exchange.start(self._context.now_s))

    def lose(self, worker_id: str) -> None:
        """Recompute the sequences whose KV a lost worker of another group has not sent."""
        self._remove_ended((*self._exchange.waiting, *self._exchange.underway))
        self._execute(self._exchange.handle(SourceLost(worker_id)))

    def receive(self, peer: str, frame: Reserved | KvEnded) -> None:
        """Process a member's report that it reserved blocks, or that a transfer ended."""
        self._remove_ended((frame.seq_id,))
        self._forward(peer, frame)

    def note_freed(self, peer: str, frame: KvFreed) -> None:
        """Process a source's report that it freed a sequence's KV."""
        # Freeing departed KV may have grown the block pool of a stage: update the ledger. The
        # leader's own stage has index 0 and needs no report.
        for index, stage in enumerate(self._context.stages):
            if stage.worker_id == peer and index:
                self._context.apply(CapacityReported(index, frame.capacity))
        self._forward(peer, frame)

    def _new_exchange(self) -> ExchangeState:
        configuration, planner = self._context.configuration, self._context.planner
        epoch = configuration.epoch if configuration is not None else -1
        window = MoveWindow(self._link_blocks_per_s)
        return ExchangeState(epoch, planner.config.block_size, window)

    def _forward(self, peer: str, frame: ExchangeFrame) -> None:
        event = FrameReceived(self._context.now_s, peer, frame)
        self._execute(self._exchange.handle(event))

    def _remove_ended(self, seq_ids: Iterable[str]) -> None:
        """Remove the sequences among `seq_ids` from the exchange that are not held any more."""
        sequences = self._context.planner.sequences
        for seq_id in seq_ids:
            sequence = sequences.get(seq_id)
            if sequence is None or sequence.phase is not Phase.HELD:
                self._execute(self._exchange.handle(RequestGone(seq_id)))

    def _execute(self, commands: list[ExchangeCommand]) -> None:
        context = self._context
        for command in commands:
            match command:
                case SendFrame(frame=Reserve() as frame):
                    self._reserve(frame)
                case SendFrame():
                    context.commands.append(command)
                case ResumeRequest():
                    context.apply(SequenceResumed(command.seq_id))
                case RecomputeRequest():
                    context.apply(SequencePreempted(command.seq_id))

    def _reserve(self, frame: Reserve) -> None:
        context, configuration = self._context, self._context.configuration
        assert configuration is not None
        seq_id, worker_id = frame.seq_id, frame.worker_id
        if worker_id in self._exchange.underway[seq_id].move.lacking:
            # Count the blocks as used now; the stage allocates them when the frame arrives.
            context.apply(SequencePlaced(seq_id, configuration.stage_of(worker_id)))
        if worker_id == context.worker_id:
            context.send(worker_id, frame)
        else:
            # From stage to stage, in order with the microbatches, and with the sequences released
            # since: the stage must free their blocks, which the ledger counts as free, first.
            context.send_along(replace(frame, released=self._kv.take_released()))
