"""What is left of the product when a rule is taken out, for the tests that each one is needed."""

from services.core.changeover.frames import MemberRemoved
from services.core.changeover.state import Changeover
from services.core.changeover.vocabulary import Command, Event, FrameReceived, TurnTaken
from services.core.groups.state import GroupState
from services.core.groups.vocabulary import Command as GroupCommand
from services.core.groups.vocabulary import Group
from tests.support.engines import Engine
from tests.support.joined_world import Rules


class NoStartOver(Changeover):
    """Keeps the KV of requests when a member is lost, though a part of it is gone."""

    def _recompute_all(self) -> None:
        return


class NoFarewell(Changeover):
    """Does not mind that members of its group have left it."""

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, FrameReceived) and isinstance(event.frame, MemberRemoved):
            return []
        return super().handle(event)


class NoDesertion(Changeover):
    """Waits for the records without end, and keeps its requests meanwhile."""

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
    """Leaves stuck groups as they are."""

    def _rebuild(self, group: Group, busy: set[str]) -> list[Command]:
        return []


class NoDivision(GroupState):
    """Goes on making a stuck group anew, though its members do not find together."""

    def _repair(self, group_id: str, busy: set[str]) -> list[GroupCommand]:
        self._stuck._unrecoverable.clear()
        return super()._repair(group_id, busy)


class NoSettlement(GroupState):
    """Leaves a group as it is when a member has gone."""

    def _repair(self, group_id: str, busy: set[str]) -> list[GroupCommand]:
        return super()._repair(group_id, busy) if self.records.is_sound(group_id) else []


def without_look(engine: Engine) -> None:
    """It does not notice lanes that have ended without an event for it."""
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
