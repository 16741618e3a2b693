"""History of all groups from the event logs of the memory managers: configurations and consent.

Part of an audit: it checks the invariants I3, I4 and I11 (`audit.py`) for memory managers. A
*configuration* is a group's members and layers at an *epoch*, a number that every change of the
group increases. An *attempt* is a two-phase change: all members prepare, then a transaction commits
it. The etcd revisions order the commits of different processes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.core.audit.facts import ChangePlanned, MemoryDecided
from services.core.audit.record import Findings, Recorded
from services.core.groups.vocabulary import (
    ClusterListed,
    Group,
    GroupPhase,
    Member,
    MemberAnswered,
    PrepareMembers,
    Transact,
    TransactionFinished,
)
from services.core.overload.events import Action, Cause, Decision

GroupEpoch = tuple[str, int]
"""A group at an epoch."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed transaction, at an etcd revision."""

    now_s: float
    revision: int
    transaction: Transact


@dataclass(slots=True)
class GroupHistory:
    """The groups of a cluster, from the logs of all its memory managers."""

    findings: Findings
    commits: list[Committed] = field(default_factory=list)
    configurations: dict[GroupEpoch, tuple[Member, ...]] = field(default_factory=dict)
    # When the memory manager learned of the commit; configurations that were only read from the
    # store are missing.
    committed_s: dict[GroupEpoch, float] = field(default_factory=dict)
    attempts: dict[GroupEpoch, str] = field(default_factory=dict)  # attempt that prepared it
    planned: list[ChangePlanned] = field(default_factory=list)
    live: dict[str, Group] = field(default_factory=dict)  # the last record of each group
    # Since when a group is DEGRADED or marked by an attempt, by group.
    unstable_since_s: dict[str, float] = field(default_factory=dict)
    last_s: float = 0.0  # time of the last entry
    _prepares: dict[str, PrepareMembers] = field(default_factory=dict)  # by attempt
    _ready: set[tuple[str, str, str]] = field(default_factory=set)  # attempt, worker, incarnation
    _listed: dict[tuple[str, int], Group] = field(default_factory=dict)  # by id and revision

    def read(self, entries: Iterable[Recorded]) -> None:
        """Read all entries of a memory manager's log, in order; `finish` follows the last log."""
        pending: dict[int, Transact] = {}
        for entry in entries:
            value = entry.value
            self.last_s = max(self.last_s, getattr(value, "now_s", 0.0))
            match value:
                case ClusterListed():
                    self._list(value)
                case Transact():
                    pending[value.transaction_id] = value
                    self._check_consent(value)
                case TransactionFinished():
                    done = pending.pop(value.transaction_id)
                    if value.revision is not None:
                        self.commits.append(Committed(value.now_s, value.revision, done))
                case PrepareMembers():
                    self._prepares[value.attempt] = value
                case MemoryDecided():
                    self._check_demand(value.decision)
                case ChangePlanned():
                    self.planned.append(value)
                case MemberAnswered() if value.ready:
                    self._ready.add((value.attempt, value.worker_id, value.incarnation))

    def finish(self) -> None:
        """Apply and check all commits in the order of their revisions; call it after all logs."""
        token = 0
        self.commits.sort(key=lambda commit: commit.revision)
        self._begin()
        for commit in self.commits:
            self.findings.check(
                "I4",
                commit.transaction.token >= token,
                "a transaction of leadership {} was committed at revision {}, after leadership {}",
                *(commit.transaction.token, commit.revision, token),
            )
            token = max(token, commit.transaction.token)
            for group in commit.transaction.groups:
                self._write(group, commit.now_s)
            self._check_membership(commit.revision)
        for group in self._listed.values():
            self._note_configuration(group)

    def _list(self, listed: ClusterListed) -> None:
        for stored in listed.groups:
            self._listed[stored.group.group_id, stored.mod_revision] = stored.group

    def _begin(self) -> None:
        """Set `live` to the groups that existed before the first commit."""
        for (group_id, revision), group in sorted(
            self._listed.items(), key=lambda entry: entry[0][1]
        ):
            if not self.commits or revision < self.commits[0].revision:
                self.live[group_id] = group

    def _write(self, group: Group, now_s: float) -> None:
        """Apply and check a group record that a commit writes."""
        before = self.live.get(group.group_id)
        if before is None or group.epoch != before.epoch:
            self.findings.check(
                "I3",
                before is None or group.epoch > before.epoch,
                "{} went back from epoch {} to {}",
                *(group.group_id, before.epoch if before else 0, group.epoch),
            )
            group_epoch = (group.group_id, group.epoch)
            self.committed_s[group_epoch] = now_s
            self.findings.check(
                "I4",
                len(group.members) < 2 or group_epoch in self.attempts,
                "{} was formed at epoch {} without a preparation",
                *group_epoch,
            )
        self._note_configuration(group)
        self.live[group.group_id] = group
        if group.phase is GroupPhase.DEGRADED or group.attempt:
            self.unstable_since_s.setdefault(group.group_id, now_s)
        else:
            self.unstable_since_s.pop(group.group_id, None)

    def _note_configuration(self, group: Group) -> None:
        known = self.configurations.setdefault((group.group_id, group.epoch), group.members)
        self.findings.check(
            "I3",
            known == group.members,
            "{} has two configurations at epoch {}",
            *(group.group_id, group.epoch),
        )

    def _check_membership(self, revision: int) -> None:
        names = [member.worker_id for group in self.live.values() for member in group.members]
        twice = sorted({name for name in names if names.count(name) > 1})
        self.findings.check(
            "I3", not twice, "{} are in two groups at revision {}", ", ".join(twice), revision
        )

    def _check_consent(self, transaction: Transact) -> None:
        """I4: every member of a target was ready before the commit of the attempt."""
        for prepare, targets in self._attempts_in(transaction):
            for group in targets:
                self.attempts[group.group_id, group.epoch] = prepare.attempt
                for member in group.members:
                    consent = (prepare.attempt, member.worker_id, member.incarnation)
                    self.findings.check(
                        "I4",
                        consent in self._ready,
                        "the commit of attempt {} was sent without the consent of {}",
                        *(prepare.attempt, member.worker_id),
                    )

    def _check_demand(self, decision: Decision) -> None:
        """I11: a merge requires waiting online requests, and demand above the capacity.

        A merge for full groups alone also requires that no move of requests may help.
        """
        if decision.action is Action.MERGE and decision.reason.cause is Cause.OVERLOAD:
            load = decision.reason.load
            self.findings.check(
                "I11",
                load.waiting > 0 and load.short_tokens > 0,
                "a merge (DROP) was decided for {}, whose demand of {} tokens fits into {}",
                *(decision.model, load.expected_tokens, load.capacity_tokens),
            )
            self.findings.check(
                "I11",
                not (decision.group_ids and decision.reason.moves_help),
                "a merge of full groups (DROP) was decided for {}, though moves (MOVE) may help",
                decision.model,
            )

    def _attempts_in(
        self, transaction: Transact
    ) -> Iterator[tuple[PrepareMembers, tuple[Group, ...]]]:
        """The attempts whose targets the transaction writes, comparing their marked sources."""
        written = {_configuration(group) for group in transaction.groups}
        compared = transaction.group_revisions
        for prepare in self._prepares.values():
            targets = {_configuration(group) for group in prepare.targets}
            marked = {source.group.group_id: source.mod_revision for source in prepare.sources}
            if targets <= written and marked.items() <= compared.items():
                yield prepare, prepare.targets


def _configuration(group: Group) -> tuple[str, int, GroupPhase, tuple[Member, ...]]:
    """Identity of a configuration. An epoch alone is ambiguous: after an aborted attempt, its
    epoch may be used for another configuration."""
    return group.group_id, group.epoch, group.phase, group.members
