"""What changes of groups do to sequences and blocks; `_HANDLERS` has the handler of each event."""

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
from services.core.prefix.news import NO_PREFIX_UPDATE
from services.core.request import blocks_for


def excess_lost_sequences(
    sequences: Iterable[Sequence], members: int, *, batch_yields: bool
) -> list[Sequence]:
    """The youngest sequences without KV, beyond 1/`members` of all tokens to be computed again.

    A leader gives them back after a loss has divided its group: its former members have nothing to
    do, and the gateways have the tokens and go on elsewhere. Requests stay whose gateway would not
    (`resumable`), and batch work that makes way: it is computed when no online request waits.
    `members` live, with the leader. The sequence that completes the share is kept, and so is at
    least one.
    """
    lost = [one for one in sequences if not one.blocks and (one.online or not batch_yields)]
    tokens = sum(len(one.token_ids) for one in lost)
    kept = sum(len(one.token_ids) for one in lost if not one.request.resumable)
    found = []
    for sequence in sorted(lost, key=lambda one: one.age):
        if not sequence.request.resumable:
            continue
        if kept * members >= tokens:
            found.append(sequence)
        else:
            kept += len(sequence.token_ids)
    return found


@dataclass(slots=True)
class ConfigurationHandlers:
    """The parts of a planner that a change of groups changes, beside which planner it is."""

    config: IterationConfig
    sequence_table: SequenceTable
    flight: Flight
    feedback: Feedback | None
    _discarded: bool = False  # microbatches of this configuration

    def handle(self, event: changes.ConfigurationEvent) -> list[Command]:
        """Apply one event; see `PlannerState.handle`."""
        return _HANDLERS[type(event)](self, event)

    def discard_flight(self) -> None:
        """Discard all microbatches in flight."""
        self.flight.discard(self.sequence_table)
        if self._stages > 1:
            self._discarded = True
            self.sequence_table.prefixes.resend_hits(self._sequences.values())
            self.sequence_table.drop_prefixes()

    def export(self, request_id: str) -> SequenceState:
        """See `PlannerState.export`."""
        sequence = self._sequences[request_id]
        if any(plan.includes(sequence) for plan in self.flight.plans):
            raise ValueError(f"{request_id} is in a microbatch in flight")
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
        self._assert_nothing_flies()
        for sequence in tuple(self._sequences.values()):
            if sequence.blocks and (not sequence.computed or self._may_lack_a_block(sequence)):
                self.sequence_table.preempt(sequence)
        self.sequence_table.yield_batch(0, 0)  # their KV is not worth being moved
        self.sequence_table.drop_prefixes()
        return [BlocksFreed(self.sequence_table.take_released())]

    def _may_lack_a_block(self, sequence: Sequence) -> bool:
        """Whether it grew for a microbatch that was discarded, of which stages may not know.

        Which of them have the block nobody could tell the next leader, so its KV is computed again.
        """
        decodes = sequence.remaining == 1
        grown = sequence.blocks > blocks_for(sequence.computed, self.config.block_size)
        return self._discarded and decodes and grown

    def _configure(self, event: changes.StagesConfigured) -> list[Command]:
        self._assert_nothing_flies()
        assert not self.sequence_table.released, "the stages that are left have not heard of these"
        self.sequence_table.configure(event.followers)
        self._discarded = False
        return []

    def _divide(self, event: changes.GroupDivided) -> list[Command]:
        if not self.config.spread_after_loss:
            return []
        table, names = self.sequence_table, event.request_ids
        lost = [one for one in table.sequences.values() if names is None or one.request_id in names]
        found = excess_lost_sequences(
            lost, event.members, batch_yields=table.precedence.batch_yields
        )
        for sequence in found:
            table.end(sequence)
        return [returned_after_loss(sequence.request_id) for sequence in found]

    def _assert_nothing_flies(self) -> None:
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
                    self.sequence_table.drop_prefixes()
                return [BlocksFreed(self.sequence_table.take_released())]
            case changes.FlightDiscarded():
                self.discard_flight()
        return []

    # --- changes of sequences

    def _adopt(self, event: changes.SequenceAdopted) -> list[Command]:
        sequence = Sequence.restore(event.state)
        if sequence.request_id in self._sequences:
            return []
        if refusal := too_large(sequence, self.config):
            return [refusal]
        if self.feedback is not None:
            self.feedback.adopted(sequence)
        if sequence.blocks:
            self.sequence_table.adopt(sequence, event.absent, event.held)
        else:
            self.sequence_table.add(sequence)
        return []

    def _reset(self, event: changes.SequenceReset) -> list[Command]:
        state = self.export(event.request_id)
        before = self._sequences[event.request_id]
        self.sequence_table.forget(before)
        self._adopt(changes.SequenceAdopted(replace(state, computed=0, blocks=0)))
        after = self._sequences[event.request_id]
        after.due_s, after.group_left = before.due_s, before.group_left
        after.implied_due_s, after.token_s = before.implied_due_s, before.token_s
        self.sequence_table.hold(after)
        return []

    def _change_sequence(self, event: changes.SequenceEvent) -> list[Command]:
        assert not isinstance(event, changes.SequenceAdopted)
        sequence, table = self._sequences[event.request_id], self.sequence_table
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
                    raise ValueError(f"there is no room for {event.request_id} at {event.stage}")
        return []

    # --- changes of blocks

    def _change_blocks(self, event: changes.BlockEvent) -> list[Command]:
        table = self._table
        if self._stages > 1 and isinstance(event, changes.MovingBlockEvent):
            self.sequence_table.drop_prefixes()
        match event:
            case changes.MicrobatchFollowed():
                table.apply(event.released, event.chunks, event.prefixes or NO_PREFIX_UPDATE)
            case changes.BlocksAdopted():
                table.adopt(event.request_id, event.blocks)
            case changes.BlocksReleased():
                table.release(event.request_id)
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
    changes.SequenceAdopted: ConfigurationHandlers._adopt,
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
