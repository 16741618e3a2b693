"""Handlers of the planner's change-over events, by event in `_HANDLERS`.

A *change-over* replaces the configuration of a group: which workers are its stages, with which
layers, and which of them is the *leader* that plans. Sequences and their KV move to the stages of
the new configuration; meanwhile a sequence is *held* (not planned).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

from services.core.planner import configuration_events as changes
from services.core.planner.block_table import StageTable
from services.core.planner.config import IterationConfig
from services.core.planner.events import BlocksFreed, Command, MoveBlocks
from services.core.planner.feedback import Feedback
from services.core.planner.flight import Flight
from services.core.planner.refusal import returned_after_loss, too_large
from services.core.planner.sequence import Phase, Sequence, SequenceState
from services.core.planner.sequence_table import SequenceTable
from services.core.prefix.cache_update import NO_PREFIX_UPDATE
from services.core.request import blocks_for


def excess_lost_sequences(
    sequences: Iterable[Sequence], members: int, *, batch_yields: bool
) -> list[Sequence]:
    """The youngest sequences without KV, beyond 1/`members` of all tokens to recompute.

    After the loss of a worker has ended a group, with `members` surviving workers, its leader
    returns these sequences to the scheduler. It keeps the oldest sequences, including the last
    that its share does not cover completely.
    """
    # Batch sequences that yield stay: they are recomputed here while no online request waits.
    lost = [seq for seq in sequences if not seq.blocks and (seq.online or not batch_yields)]
    tokens = sum(len(seq.token_ids) for seq in lost)
    # Sequences that cannot resume on another worker stay, so count them first.
    kept = sum(len(seq.token_ids) for seq in lost if not seq.request.resumable)
    excess = []
    for sequence in sorted(lost, key=lambda seq: seq.age):
        if not sequence.request.resumable:
            continue
        # The other workers are idle after the loss: each shall recompute the same number of tokens.
        if kept * members >= tokens:
            excess.append(sequence)
        else:
            kept += len(sequence.token_ids)
    return excess


@dataclass(slots=True)
class ConfigurationHandlers:
    """Applies change-over events to the sequences, blocks and microbatches of a planner."""

    config: IterationConfig
    sequence_table: SequenceTable
    flight: Flight
    feedback: Feedback | None
    _discarded: bool = False  # microbatches of this configuration were discarded

    def handle(self, event: changes.ConfigurationEvent) -> list[Command]:
        """Apply an event; see `PlannerState.handle`."""
        return _HANDLERS[type(event)](self, event)

    def discard_flight(self) -> None:
        """Discard all microbatches in flight."""
        self.flight.discard(self.sequence_table)
        if self._stages > 1:
            # Only some stages may have applied the cache updates of the discarded microbatches.
            self._discarded = True
            self.sequence_table.prefixes.resend_hits(self._sequences.values())
            self.sequence_table.clear_prefixes()

    def export(self, seq_id: str) -> SequenceState:
        """See `PlannerState.export`."""
        sequence = self._sequences[seq_id]
        if any(plan.includes(sequence) for plan in self.flight.plans):
            raise ValueError(f"{seq_id} is in a microbatch in flight")
        return sequence.state()

    @property
    def _sequences(self) -> dict[str, Sequence]:
        return self.sequence_table.sequences

    @property
    def _stages(self) -> int:
        return self.sequence_table.ledger.stages

    @property
    def _table(self) -> StageTable:
        return self.sequence_table.table

    # --- changes of configurations

    def _end(self, _event: changes.ConfigurationEnded) -> list[Command]:
        self._assert_none_in_flight()
        for sequence in tuple(self._sequences.values()):
            if sequence.blocks and (not sequence.computed or self._may_lack_a_block(sequence)):
                self.sequence_table.preempt(sequence)
        # Batch work that yields to online requests is recomputed: do not move its KV.
        self.sequence_table.yield_batch(0, 0)
        self.sequence_table.clear_prefixes()
        return [BlocksFreed(self.sequence_table.take_released())]

    def _may_lack_a_block(self, sequence: Sequence) -> bool:
        """Whether only some stages may have the newest block of the sequence.

        The sequence grew for a microbatch that was discarded: the stages that received it have the
        block, the others do not. The next leader could not know which, so the KV is recomputed.
        """
        decodes = sequence.remaining == 1
        grown = sequence.blocks > blocks_for(sequence.computed, self.config.block_size)
        return self._discarded and decodes and grown

    def _configure(self, event: changes.StagesConfigured) -> list[Command]:
        self._assert_none_in_flight()
        assert not self.sequence_table.released, (
            "the former stages have not received these releases"
        )
        self.sequence_table.configure(event.followers)
        self._discarded = False
        return []

    def _divide(self, event: changes.GroupDivided) -> list[Command]:
        if not self.config.spread_after_loss:
            return []
        table, ids = self.sequence_table, event.seq_ids
        lost = [seq for seq in table.sequences.values() if ids is None or seq.seq_id in ids]
        excess = excess_lost_sequences(
            lost, event.members, batch_yields=table.precedence.batch_yields
        )
        for sequence in excess:
            table.end(sequence)
        return [returned_after_loss(sequence.seq_id) for sequence in excess]

    def _assert_none_in_flight(self) -> None:
        assert not self.flight.plans, "drain or discard the microbatches in flight first"

    def _change_stage(self, event: changes.StageEvent) -> list[Command]:
        ledger = self.sequence_table.ledger
        match event:
            case changes.CapacityReported():
                self.sequence_table.set_capacity(event.stage, event.blocks)
            case changes.BlocksCredited():
                ledger.credit(event.stage, event.blocks)
            case changes.BatchYielded():
                self.sequence_table.yield_batch(event.stage, event.blocks)
            case changes.ReleasedTaken():
                if self._stages > 1:
                    self.sequence_table.clear_prefixes()
                return [BlocksFreed(self.sequence_table.take_released())]
            case changes.FlightDiscarded():
                self.discard_flight()
        return []

    # --- changes of sequences

    def _take_over(self, event: changes.SequenceAdopted) -> list[Command]:
        if not (event.state.blocks or event.state.request.request_id in self._sequences):
            # Its earlier leader starts it again: this stage may still have its KV.
            self._table.release(event.state.request.request_id)
        return self._adopt(event)

    def _adopt(self, event: changes.SequenceAdopted) -> list[Command]:
        sequence = Sequence.restore(event.state)
        if sequence.seq_id in self._sequences:
            return []
        if refusal := too_large(sequence, self.config):
            return [refusal]
        if self.feedback is not None:
            self.feedback.note_adoption(sequence)
        if sequence.blocks:
            self.sequence_table.adopt(sequence, event.absent, event.held)
        else:
            self.sequence_table.add(sequence)
        return []

    def _reset(self, event: changes.SequenceReset) -> list[Command]:
        state = self.export(event.seq_id)
        before = self._sequences[event.seq_id]
        # The stages free the blocks by themselves: adopt the sequence again without KV.
        self.sequence_table.forget(before)
        self._adopt(changes.SequenceAdopted(replace(state, computed=0, blocks=0)))
        after = self._sequences[event.seq_id]
        # Adoption sets new deadlines: restore the old ones.
        after.due_s, after.group_left = before.due_s, before.group_left
        after.implied_due_s, after.token_s = before.implied_due_s, before.token_s
        self.sequence_table.hold(after)
        return []

    def _change_sequence(self, event: changes.SequenceEvent) -> list[Command]:
        assert not isinstance(event, changes.SequenceAdopted)
        sequence, table = self._sequences[event.seq_id], self.sequence_table
        match event:
            case changes.SequenceForgotten():
                table.forget(sequence)
            case changes.SequenceHeld():
                if sequence.phase is not Phase.HELD:
                    table.hold(sequence)
            case changes.SequenceResumed():
                if sequence.phase is Phase.HELD:
                    table.resume(sequence)
            case changes.SequencePreempted():
                if sequence.blocks:
                    table.preempt(sequence)
            case changes.SequencePlaced():
                if not table.place(sequence, event.stage):
                    raise ValueError(f"no room for {event.seq_id} at stage {event.stage}")
        return []

    # --- changes of blocks

    def _change_blocks(self, event: changes.BlockEvent) -> list[Command]:
        table = self._table
        # Only microbatches carry cache updates: if a stage moved cached blocks outside of them, its
        # cache would differ from the leader's.
        if self._stages > 1 and isinstance(event, changes.MovingBlockEvent):
            self.sequence_table.clear_prefixes()
        match event:
            case changes.MicrobatchFollowed():
                table.apply(event.released, event.chunks, event.prefixes or NO_PREFIX_UPDATE)
            case changes.BlocksAdopted():
                table.adopt(event.seq_id, event.blocks)
            case changes.BlocksReleased():
                table.release(event.seq_id)
            case changes.BlocksRelocated():
                return [MoveBlocks(tuple(table.relocate(event.limit, event.most)))]
            case changes.PoolGrown():
                table.pool.grow(event.blocks)
            case changes.PoolLimited():
                table.pool.limit(event.blocks)
            case changes.PoolShrunk():
                table.pool.shrink(event.blocks)
        return []


_HANDLERS: dict[type[Any], Callable[[ConfigurationHandlers, Any], list[Command]]] = {
    changes.ConfigurationEnded: ConfigurationHandlers._end,
    changes.StagesConfigured: ConfigurationHandlers._configure,
    changes.GroupDivided: ConfigurationHandlers._divide,
    changes.SequenceAdopted: ConfigurationHandlers._take_over,
    changes.SequenceReset: ConfigurationHandlers._reset,
}
_HANDLERS |= dict.fromkeys(
    (
        changes.CapacityReported,
        changes.BlocksCredited,
        changes.BatchYielded,
        changes.ReleasedTaken,
        changes.FlightDiscarded,
    ),
    ConfigurationHandlers._change_stage,
)
_HANDLERS |= dict.fromkeys(
    (
        changes.SequenceForgotten,
        changes.SequenceHeld,
        changes.SequenceResumed,
        changes.SequencePreempted,
        changes.SequencePlaced,
    ),
    ConfigurationHandlers._change_sequence,
)
_HANDLERS |= dict.fromkeys(get_args(changes.BlockEvent), ConfigurationHandlers._change_blocks)
