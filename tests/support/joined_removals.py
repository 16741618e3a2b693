"""What is left of the product when a rule is taken out, for the tests that each one is needed."""

from services.core.changeover.state import Changeover
from services.core.groups.state import GroupState
from services.core.groups.vocabulary import Command, Group
from tests.support.joined_world import Rules


class NoStartOver(Changeover):
    """Keeps the KV of requests when a member is lost, though a part of it is gone."""

    def _start_over(self) -> None:
        return


class NoRenewal(GroupState):
    """Leaves stuck groups as they are."""

    def _renew(self, group: Group, busy: set[str]) -> list[Command]:
        return []


class NoSettlement(GroupState):
    """Leaves a group as it is when a member has gone."""

    def _mend(self, group_id: str, busy: set[str]) -> list[Command]:
        return super()._mend(group_id, busy) if self.records.is_sound(group_id) else []


REMOVED = {
    "start over": Rules(machine=NoStartOver),
    "reports of trouble": Rules(troubles=False),
    "renewal": Rules(groups=NoRenewal),
    "settlement": Rules(groups=NoSettlement),
    "resume": Rules(resumes=False),
}
