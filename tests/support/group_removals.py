"""The group protocol without one of its rules; `group_world` must detect each removal."""

from collections.abc import Iterable
from dataclasses import replace

from services.core.groups.fence import AbortPreparation, Answer, Apply, MemberState, PrepareCall
from services.core.groups.state import GroupState
from services.core.groups.vocabulary import Assignment, Group, Member, MemberAnswered, StoredGroup
from services.core.groups.vocabulary import Command as GroupCommand
from services.core.groups.vocabulary import Event as GroupEvent


class EpochlessMember(MemberState):
    """Accepts any record and any preparation, however old."""

    def _is_newer(self, group: Group) -> bool:
        return self._member_in(group) is not None and group.epoch != self.epoch

    def _epoch_refusal(self, asked: PrepareCall) -> Answer | None:
        return None


class NamelessMember(MemberState):
    """Accepts calls meant for an earlier process of the worker."""

    def judge(self, asked: PrepareCall) -> Answer:
        return super().judge(replace(asked, incarnation=self.incarnation, target=self._mine(asked)))

    def _mine(self, asked: PrepareCall) -> Group:
        members = tuple(
            replace(member, incarnation=self.incarnation)
            if member.worker_id == self.worker_id
            else member
            for member in asked.target.members
        )
        return replace(asked.target, members=members)

    def _member_in(self, group: Group):
        return next(
            (member for member in group.members if member.worker_id == self.worker_id), None
        )


class TrustingMember(MemberState):
    """Applies a configuration even without its layers."""

    def _has_layers(self, wanted: Member | Assignment) -> bool:
        return True


class NostalgicMember(MemberState):
    """Keeps fencing tokens and revisions of a history that the store has lost."""

    def observe(
        self, stored: Iterable[StoredGroup], rollbacks: int = 0
    ) -> list[AbortPreparation | Apply]:
        return super().observe(stored)


class CarelessState(GroupState):
    """Counts an acknowledgement for any attempt in progress."""

    def handle(self, event: GroupEvent) -> list[GroupCommand]:
        if isinstance(event, MemberAnswered):
            running = [attempt for attempt in self.attempts if event.worker_id in attempt.workers]
            event = replace(event, attempt=running[0].attempt_id) if running else event
        return super().handle(event)


MEMBERS = {
    "epoch": EpochlessMember,
    "incarnation": NamelessMember,
    "layers": TrustingMember,
    "rollback": NostalgicMember,
}
