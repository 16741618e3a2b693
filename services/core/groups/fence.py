"""The member's side of the group protocol: which requests it accepts, and when it switches.

The fence. A preparation counts only if it comes from the newest coordinator, concerns this very
process, and starts from the configuration that this worker is in; a configuration counts only if it
is committed and newer. Revisions of the source's record order the attempts on it: once a later one
was seen, an earlier attempt can never be committed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from services.core.groups.vocabulary import (
    Group,
    GroupPhase,
    Member,
    PrepareMembers,
    StoredGroup,
)


class Verdict(StrEnum):
    """How a member judges a request to prepare."""

    ACCEPTED = "accepted"
    REPLAYED = "replayed"
    """The request was judged before: the answer is that of the first time."""
    STALE = "stale"
    FUTURE = "future"
    """The request starts from a configuration that this member has not seen yet."""
    FOREIGN = "foreign"
    """The request is for another process, or its target has no place for this one."""


@dataclass(frozen=True, slots=True)
class PrepareAsked:
    """A coordinator asks for a preparation; see PrepareRequest in worker.proto."""

    token: int
    attempt: str
    incarnation: str
    group_id: str
    epoch: int
    mod_revision: int
    target: Group


def asked_of(command: PrepareMembers) -> dict[str, PrepareAsked]:
    """What each member is asked, by worker id."""
    targets = {one.worker_id: target for target in command.targets for one in target.members}
    return {
        member.worker_id: PrepareAsked(
            command.token,
            command.attempt,
            member.incarnation,
            source.group.group_id,
            source.group.epoch,
            source.mod_revision,
            targets[member.worker_id],
        )
        for source in command.sources
        for member in source.group.members
    }


@dataclass(frozen=True, slots=True)
class AbortAsked:
    """A coordinator says that the attempt will never be committed."""

    token: int
    attempt: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class AbortPreparation:
    """Abort the preparation for the attempt: it will never be committed."""

    attempt: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The verdict on a request to prepare, with the reason of a refusal."""

    verdict: Verdict
    reason: str = ""
    aborted: AbortPreparation | None = None
    """An earlier attempt that this one shows to be over; abort its preparation first."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Serve the committed configuration `group`; `attempt` has prepared it, None if none has.

    `superseded` was being prepared for another configuration, which may have been committed without
    this member seeing it. Of the layers that it has fetched, keep those of `group` and free the
    others.
    """

    group: Group
    attempt: str | None = None
    superseded: str | None = None


@dataclass(slots=True)
class MemberState:
    """One worker process as a member. It starts outside of every group."""

    worker_id: str
    incarnation: str
    token: int = 0
    group_id: str | None = None
    epoch: int = 0
    preparing: PrepareAsked | None = None
    _revision: int = 0

    def ask(self, asked: PrepareAsked) -> Answer:
        """Judge a request to prepare; an accepted one is now being prepared."""
        refused = self._refusal(asked)
        if refused is not None:
            return refused
        self.token = asked.token
        if self.preparing is not None and self.preparing.attempt == asked.attempt:
            return Answer(Verdict.REPLAYED)
        if asked.mod_revision <= self._revision:
            return Answer(Verdict.STALE, f"attempt {asked.attempt} is over")
        aborted = AbortPreparation(self.preparing.attempt) if self.preparing is not None else None
        self.preparing = asked
        self._revision = asked.mod_revision
        return Answer(Verdict.ACCEPTED, aborted=aborted)

    def abort(self, asked: AbortAsked) -> AbortPreparation | None:
        """Take the end of an attempt from a coordinator; a stale one has no effect."""
        if asked.incarnation != self.incarnation or asked.token < self.token:
            return None
        self.token = asked.token
        return self.abort_own(asked.attempt)

    def abort_own(self, attempt: str) -> AbortPreparation | None:
        """End the attempt that is being prepared, for good: it was not acknowledged.

        An attempt that is not being prepared has nothing to abort.
        """
        if self.preparing is None or self.preparing.attempt != attempt:
            return None
        self.preparing = None
        return AbortPreparation(attempt)

    def observe(self, stored: Iterable[StoredGroup]) -> list[AbortPreparation | Apply]:
        """What this member must do, in order, given the group records, which may be old."""
        listed = {one.group.group_id: one for one in stored}
        newer = [one for one in listed.values() if self._is_newer(one.group)]
        if newer:
            newest = max(newer, key=lambda one: one.group.epoch)
            self._note_revision(newest)
            return self._apply(newest.group)
        mine = listed.get(self.group_id) if self.group_id is not None else None
        if mine is None:
            return []
        preparing = self.preparing
        if mine.group.epoch > self.epoch:
            # The group has gone on without this member. What it prepares may have been committed
            # and superseded unseen, so it is kept until a configuration says what becomes of it.
            return []
        if preparing is not None and mine.mod_revision > preparing.mod_revision:
            self.preparing = None
            self._note_revision(mine)
            return [AbortPreparation(preparing.attempt)]
        self._note_revision(mine)
        return []

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        if self.preparing is not None:
            assert self.preparing.incarnation == self.incarnation
            assert (self.preparing.group_id, self.preparing.epoch) == (self.group_id, self.epoch)
            assert self.preparing.token <= self.token
            assert self.preparing.target.epoch > self.epoch

    def _refusal(self, asked: PrepareAsked) -> Answer | None:
        if asked.incarnation != self.incarnation:
            reason = f"this is incarnation {self.incarnation} of {self.worker_id}"
            return Answer(Verdict.FOREIGN, reason)
        if asked.token < self.token:
            return Answer(Verdict.STALE, "a newer coordinator leads")
        if self._place_in(asked.target) is None or asked.target.epoch <= asked.epoch:
            reason = f"the target has no place for {self.worker_id}, or is not newer"
            return Answer(Verdict.FOREIGN, reason)
        return self._epoch_refusal(asked)

    def _epoch_refusal(self, asked: PrepareAsked) -> Answer | None:
        if (asked.group_id, asked.epoch) == (self.group_id, self.epoch):
            return None
        reason = (
            f"{self.worker_id} is in {self.group_id or 'no group'} at epoch {self.epoch}, not in "
            f"{asked.group_id} at {asked.epoch}"
        )
        verdict = Verdict.FUTURE if asked.epoch > self.epoch else Verdict.STALE
        return Answer(verdict, reason)

    def _is_newer(self, group: Group) -> bool:
        """Whether the record has a place for this process, in a configuration newer than its own.

        A record that says DISSOLVED has places for nobody.
        """
        if group.phase is GroupPhase.DISSOLVED or self._place_in(group) is None:
            return False
        return group.epoch > self.epoch

    def _note_revision(self, mine: StoredGroup) -> None:
        """A preparation that began before the record was written is over.

        The one that the record bears began with it, and its request may be on the way.
        """
        begun = mine.mod_revision - 1 if mine.group.attempt else mine.mod_revision
        self._revision = max(self._revision, begun)

    def _place_in(self, group: Group) -> Member | None:
        for member in group.members:
            if (member.worker_id, member.incarnation) == (self.worker_id, self.incarnation):
                return member
        return None

    def _apply(self, group: Group) -> list[AbortPreparation | Apply]:
        """Take the configuration."""
        preparing, self.preparing = self.preparing, None
        self.group_id, self.epoch = group.group_id, group.epoch
        if preparing is None:
            return [Apply(group)]
        target = preparing.target
        if (target.group_id, target.epoch, target.members) == (
            group.group_id,
            group.epoch,
            group.members,
        ):
            return [Apply(group, preparing.attempt)]
        return [Apply(group, superseded=preparing.attempt)]
