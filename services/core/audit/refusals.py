"""Checks I16 and I17 while the event log of a scheduler is replayed.

I16: no request is refused as late while a group could start it. I17: none is refused for want of
memory before the memory manager has reported that merges of groups cannot provide it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.ask import RefusalReason
from services.core.audit.record import Findings
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import (
    Asked,
    Command,
    Event,
    SendRefusal,
    ShortfallsReported,
    WaitLimit,
    Withdrawn,
)


@dataclass(slots=True)
class Refusals:
    """Checks each refusal against the state after its event."""

    findings: Findings
    name: str  # of the log
    _asks: dict[str, Asked] = field(default_factory=dict)  # that may still be refused
    _shortfalls: dict[str, int] = field(default_factory=dict)

    def check(self, state: SchedulerState, event: Event, commands: Iterable[Command]) -> None:
        """Check the commands of an event that `state` has handled."""
        match event:
            case Asked():
                self._asks[event.request_id] = event
            case Withdrawn():
                self._asks.pop(event.request_id, None)
            case ShortfallsReported():
                self._shortfalls = event.shortfalls
        for command in commands:
            if isinstance(command, SendRefusal) and (ask := self._asks.get(command.request_id)):
                self._check_refusal(state, ask, command, event.now_s)

    def _check_refusal(
        self, state: SchedulerState, ask: Asked, refusal: SendRefusal, now_s: float
    ) -> None:
        if refusal.reason is not RefusalReason.TOO_LATE or refusal.late is None:
            return
        self.findings.check(
            "I16",
            not state.has_room(ask, now_s),
            "{} refused {} as late at {}, though a group could start it",
            *(self.name, ask.request_id, now_s),
        )
        short = self._shortfalls.get(ask.model, 0) > 0
        self.findings.check(
            "I17",
            short or refusal.late.by is not WaitLimit.MEMORY,
            "{} refused {} for want of memory at {}, before merges were exhausted",
            *(self.name, ask.request_id, now_s),
        )
