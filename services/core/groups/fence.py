"""The fence: decides which calls and records of the group protocol a worker process obeys.

An *attempt* is a two-phase change of groups: the coordinator marks the records of the *source*
groups, calls Prepare at every member, and commits the *target* groups. A member accepts a Prepare
only from the newest coordinator (fencing token), for its own process (incarnation), if the call
names its current configuration (group and epoch) as the source, and once it has read the source
record with the attempt's mark. It switches only to a committed configuration with a higher epoch.
Every attempt writes the source record, so the record's etcd revisions (`mod_revision`) order the
attempts: once a member has seen a later revision, an earlier attempt can never be committed.

An etcd that has lost its data (restored from a backup, or empty) is *rolled back*: tokens and
revisions from before mean nothing, so the fence forgets them, but never its epoch. A call from
before may arrive later; without its mark in the records it changes nothing. A coordinator that
reads such records may give a member layers that it does not hold, as the *assignment* (the record
of a worker's group and layers) is lost or outdated. A member ignores that configuration and writes
its assignment again (`restored`), so that the next one has its layers and a higher epoch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from services.core.groups.vocabulary import (
    Assignment,
    Group,
    GroupPhase,
    Member,
    PrepareMembers,
    StoredGroup,
)


class Verdict(StrEnum):
    """The fence's verdict on a Prepare."""

    ACCEPTED = "accepted"
    REPLAYED = "replayed"
    """A retry of the accepted Prepare; the answer stays the same."""
    STALE = "stale"
    """From an older coordinator, epoch or attempt."""
    FUTURE = "future"
    """The record of the source configuration, or of the attempt's mark, has yet to arrive."""
    FOREIGN = "foreign"
    """For another incarnation, or the target is no newer group with this process as a member."""


@dataclass(frozen=True, slots=True)
class PrepareCall:
    """A coordinator's Prepare for a member; see PrepareRequest in worker.proto."""

    token: int  # fencing token
    attempt: str
    incarnation: str  # of the member
    group_id: str  # source group
    epoch: int  # of the source group
    mod_revision: int  # of the source record with the attempt's mark
    target: Group  # group of the member after the commit


def prepare_calls(command: PrepareMembers) -> dict[str, PrepareCall]:
    """The Prepare for each member, by worker id."""
    targets = {m.worker_id: target for target in command.targets for m in target.members}
    return {
        member.worker_id: PrepareCall(
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
class AbortCall:
    """A coordinator's Abort: the attempt will never be committed."""

    token: int
    attempt: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class AbortPreparation:
    """Action of the fence: undo the preparation; the attempt will never be committed."""

    attempt: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The verdict on a Prepare, with the reason of a refusal."""

    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Apply:
    """Action of the fence: switch to the committed configuration `group`.

    `attempt` is the accepted attempt that prepared it, if any. `superseded` is an accepted attempt
    that prepared another configuration, which may have been committed without this member seeing
    it. Keep the layers that it fetched and `group` needs, and free the others.
    """

    group: Group
    attempt: str | None = None
    superseded: str | None = None


@dataclass(slots=True)
class MemberState:
    """The fence of a worker process, which starts without a group."""

    worker_id: str
    incarnation: str
    token: int = 0  # of the last accepted Prepare
    order_token: int = 0  # the highest of accepted orders
    group_id: str | None = None  # of the current configuration
    epoch: int = 0  # of the current configuration
    stage: Member | None = None  # this process in the current configuration
    preparing: PrepareCall | None = None  # the accepted Prepare, until commit or abort
    _mark: tuple[str, int] | None = None  # the last one read: its attempt and its revision
    _revision: int = 0  # attempts whose mark has this revision or a lower one are over
    _rollbacks: int = 0  # of the store, before the records last observed

    @property
    def assignment(self) -> Assignment | None:
        """The assignment of the current configuration; None before the first."""
        if self.stage is None or self.group_id is None:
            return None
        first, end = self.stage.first_layer, self.stage.end_layer
        return Assignment(self.worker_id, self.incarnation, self.group_id, self.epoch, first, end)

    def agrees(self, stored: Assignment) -> bool:
        """Whether a stored assignment is this process's newest, with layers that it has."""
        if stored.epoch == self.epoch:
            return stored == self.assignment
        is_later = stored.incarnation == self.incarnation and stored.epoch > self.epoch
        return is_later and self._has_layers(stored)

    def judge(self, call: PrepareCall) -> Answer:
        """Return the verdict on a Prepare; an accepted Prepare becomes `preparing`."""
        refused = self._refusal(call)
        if refused is not None:
            return refused
        # Compare all of it: a store that has lost writes may assign an attempt's id again.
        if self.preparing == call:
            return Answer(Verdict.REPLAYED)
        if call.mod_revision <= self._revision:
            return Answer(Verdict.STALE, f"attempt {call.attempt} is over")
        # Only the mark proves that the token and the revision are of the store's present history.
        if self._mark != (call.attempt, call.mod_revision):
            reason = f"{self.worker_id} has not read the mark of attempt {call.attempt}"
            return Answer(Verdict.FUTURE, reason)
        self.token = call.token
        self.preparing = call
        self._revision = call.mod_revision
        return Answer(Verdict.ACCEPTED)

    def accepts_order(self, token: int, incarnation: str) -> bool:
        """Whether an order outside of attempts is for this process and from the newest coordinator.

        It raises the token of later orders only. No mark proves that its token is of the store's
        present history: with one from before a roll-back, every later Prepare would be stale.
        """
        if incarnation != self.incarnation or token < max(self.token, self.order_token):
            return False
        self.order_token = token
        return True

    def abort(self, call: AbortCall) -> AbortPreparation | None:
        """Apply a coordinator's Abort; returns the action, or None if there is nothing to undo."""
        if call.incarnation != self.incarnation or call.token < self.token:
            return None
        return self.abort_own(call.attempt)

    def abort_own(self, attempt: str) -> AbortPreparation | None:
        """Abort an accepted attempt; safe before the member has answered the Prepare.

        Returns None unless `attempt` is being prepared.
        """
        if self.preparing is None or self.preparing.attempt != attempt:
            return None
        self.preparing = None
        return AbortPreparation(attempt)

    def observe(
        self, stored: Iterable[StoredGroup], rollbacks: int = 0
    ) -> list[AbortPreparation | Apply]:
        """Apply the group records, which may be outdated; returns the actions, in order.

        `rollbacks`: how often the store had lost writes before it was read.
        """
        if rollbacks == self._rollbacks:
            return self._observe(stored)
        self._rollbacks = rollbacks
        self.token, self.order_token, self._mark, self._revision = 0, 0, None, 0
        preparing, self.preparing = self.preparing, None
        aborted = [AbortPreparation(preparing.attempt)] if preparing is not None else []
        return aborted + self._observe(stored)

    def _observe(self, stored: Iterable[StoredGroup]) -> list[AbortPreparation | Apply]:
        listed = {entry.group.group_id: entry for entry in stored}
        newer = [entry for entry in listed.values() if self._is_newer(entry.group)]
        if newer:
            newest = max(newer, key=lambda entry: entry.group.epoch)
            self._note_revision(newest)
            return self._apply(newest.group)
        own = listed.get(self.group_id) if self.group_id is not None else None
        if own is None:
            return []
        preparing = self.preparing
        if own.group.epoch > self.epoch:
            # The group changed without this member. The prepared attempt may have been committed
            # and superseded unseen, so keep it until a newer configuration includes this member.
            return []
        # A write of the source record at the same epoch removed the mark: the attempt is aborted.
        if preparing is not None and own.mod_revision > preparing.mod_revision:
            self.preparing = None
            self._note_revision(own)
            return [AbortPreparation(preparing.attempt)]
        self._note_revision(own)
        return []

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        if self.preparing is not None:
            assert self.preparing.incarnation == self.incarnation
            assert (self.preparing.group_id, self.preparing.epoch) == (self.group_id, self.epoch)
            assert self.preparing.token == self.token
            assert self.preparing.target.epoch > self.epoch

    def _refusal(self, call: PrepareCall) -> Answer | None:
        if call.incarnation != self.incarnation:
            reason = f"this is incarnation {self.incarnation} of {self.worker_id}"
            return Answer(Verdict.FOREIGN, reason)
        if call.token < self.token:
            return Answer(Verdict.STALE, "a newer coordinator leads")
        if self._member_in(call.target) is None or call.target.epoch <= call.epoch:
            reason = f"the target has no place for {self.worker_id}, or is not newer"
            return Answer(Verdict.FOREIGN, reason)
        return self._epoch_refusal(call)

    def _epoch_refusal(self, call: PrepareCall) -> Answer | None:
        if (call.group_id, call.epoch) == (self.group_id, self.epoch):
            return None
        reason = (
            f"{self.worker_id} is in {self.group_id or 'no group'} at epoch {self.epoch}, not in "
            f"{call.group_id} at {call.epoch}"
        )
        verdict = Verdict.FUTURE if call.epoch > self.epoch else Verdict.STALE
        return Answer(verdict, reason)

    def _is_newer(self, group: Group) -> bool:
        """Whether this process can follow the group, at a higher epoch than its own."""
        member = self._member_in(group)
        if group.phase is GroupPhase.DISSOLVED or member is None or group.epoch <= self.epoch:
            return False
        return self._has_layers(member)

    def _has_layers(self, wanted: Member | Assignment) -> bool:
        """Whether this process runs or has prepared these layers; a new process has all."""
        prepared = self._member_in(self.preparing.target) if self.preparing is not None else None
        return self.stage is None or any(
            (stage.first_layer, stage.end_layer) == (wanted.first_layer, wanted.end_layer)
            for stage in (self.stage, prepared)
            if stage is not None
        )

    def _note_revision(self, own: StoredGroup) -> None:
        """Record the mark, and that attempts whose mark preceded this write are over."""
        if own.group.attempt and own.mod_revision > self._revision:
            self._mark = (own.group.attempt, own.mod_revision)
        # If this write is a mark, its own attempt is not over: its Prepare may be in flight.
        begun = own.mod_revision - 1 if own.group.attempt else own.mod_revision
        self._revision = max(self._revision, begun)

    def _member_in(self, group: Group) -> Member | None:
        """This process as a member of the group; None if it is not."""
        for member in group.members:
            if (member.worker_id, member.incarnation) == (self.worker_id, self.incarnation):
                return member
        return None

    def _apply(self, group: Group) -> list[AbortPreparation | Apply]:
        """Enter the configuration `group`; returns the action to switch to it."""
        preparing, self.preparing = self.preparing, None
        self.group_id, self.epoch = group.group_id, group.epoch
        self.stage = self._member_in(group)
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


def is_removed(own: Assignment, stored: Assignment | None, epoch_floor: int) -> bool:
    """Whether the coordinator has removed the assignment `own`, or given it to another process.

    A removal raises the epoch floor to the epoch of the assignment at least.
    """
    if stored is None:
        return epoch_floor >= own.epoch
    return stored.incarnation != own.incarnation and stored.epoch >= own.epoch


def restored(own: Assignment, stored: Assignment | None) -> Assignment:
    """The assignment to write after the store has lost `own`, and has `stored` instead.

    The next configuration of the worker then has a higher epoch than both.
    """
    return own if stored is None else replace(own, epoch=max(own.epoch, stored.epoch))
