"""Variants of the product, each without one rule, for tests that each rule is needed."""

from services.core.changeover.frames import MemberRemoved
from services.core.changeover.state import Changeover
from services.core.changeover.vocabulary import Command, Event, FrameReceived, TurnTaken
from services.core.groups.state import GroupState
from services.core.groups.vocabulary import Command as GroupCommand
from services.core.groups.vocabulary import Group
from tests.support.engines import Engine
from tests.support.joined_world import Rules


class NoStartOver(Changeover):
    """Keeps the KV of requests when a member is lost, although part of it is missing."""

    def _recompute_all(self) -> None:
        return


class NoFarewell(Changeover):
    """Ignores that members have left its group."""

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, FrameReceived) and isinstance(event.frame, MemberRemoved):
            return []
        return super().handle(event)


class NoDesertion(Changeover):
    """Waits for records without a limit, and keeps its requests meanwhile."""

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, TurnTaken):
            isolation = self._lost.isolation
            isolation._removed_s = None
            if isolation.lost_member:
                isolation._lost_s = event.now_s
        return super().handle(event)


class NoLeaving(Changeover):
    """Waits for lost members of other groups of a change."""

    def handle(self, event: Event) -> list[Command]:
        self._lost.give_up_lost = lambda: None  # type: ignore[method-assign]
        return super().handle(event)


class NoRenewal(GroupState):
    """Never repairs stuck groups."""

    def _rebuild(self, group: Group, busy: set[str]) -> list[Command]:
        return []


class NoDivision(GroupState):
    """Rebuilds a stuck group again and again, although its members cannot connect."""

    def _repair(self, group_id: str, busy: set[str]) -> list[GroupCommand]:
        self._stuck._unrecoverable.clear()
        return super()._repair(group_id, busy)


class NoSettlement(GroupState):
    """Never repairs a group that has lost a member."""

    def _repair(self, group_id: str, busy: set[str]) -> list[GroupCommand]:
        return super()._repair(group_id, busy) if self.records.is_sound(group_id) else []


def without_look(engine: Engine) -> None:
    """Make an engine ignore lanes that closed without an event."""
    engine.member._connections.detect_lost = lambda: None  # type: ignore[method-assign]


REMOVED = {
    "start over": Rules(machine=NoStartOver),
    "reports of trouble": Rules(troubles=False),
    "a look at lanes": Rules(take_out=without_look),
    "farewell": Rules(machine=NoFarewell),
    "desertion": Rules(machine=NoDesertion),
    "leaving the lost": Rules(machine=NoLeaving),
    "division": Rules(groups=NoDivision),
    "renewal": Rules(groups=NoRenewal),
    "settlement": Rules(groups=NoSettlement),
    "resume": Rules(resumes=False),
}
