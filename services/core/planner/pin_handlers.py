"""Handlers of the planner's events of shipments, by event in `HANDLERS`; see `pins.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.core.planner import pin_events
from services.core.planner.events import Command
from services.core.planner.refusal import shipped
from services.core.planner.sequence import Phase
from services.core.planner.sequence_table import SequenceTable


@dataclass(slots=True)
class PinHandlers:
    """Applies the events of shipments to the sequences and pins of a planner."""

    sequence_table: SequenceTable

    def handle(self, event: pin_events.PinEvent) -> list[Command]:
        """Apply an event; see `PlannerState.handle`."""
        return _HANDLERS[type(event)](self, event)

    def _share(self, event: pin_events.BlocksShared) -> list[Command]:
        table = self.sequence_table
        table.pins.share(event.pin, table.sequences[event.seq_id])
        return []

    def _allocate(self, event: pin_events.BlocksAllocated) -> list[Command]:
        if event.online:
            self.sequence_table.make_room(event.blocks)
        self.sequence_table.pins.allocate(
            event.pin, event.request_id, event.online, event.hashes, event.blocks
        )
        return []

    def _fill(self, event: pin_events.BlocksFilled) -> list[Command]:
        self.sequence_table.fill_pin(event.pin, event.hashes)
        return []

    def _release(self, event: pin_events.PinReleased) -> list[Command]:
        self.sequence_table.release_pin(event.pin)
        return []

    def _ship(self, event: pin_events.SequenceShipped) -> list[Command]:
        table = self.sequence_table
        sequence = table.sequences[event.seq_id]
        assert sequence.phase is Phase.RUNNING, "only a running sequence has KV to ship"
        table.pins.share(event.pin, sequence)
        table.end(sequence)
        return [shipped(sequence.seq_id, event.target)]


_HANDLERS: dict[type[Any], Callable[[PinHandlers, Any], list[Command]]] = {
    pin_events.BlocksShared: PinHandlers._share,
    pin_events.BlocksAllocated: PinHandlers._allocate,
    pin_events.BlocksFilled: PinHandlers._fill,
    pin_events.PinReleased: PinHandlers._release,
    pin_events.SequenceShipped: PinHandlers._ship,
}
