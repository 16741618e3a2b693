"""The group protocol: forms, merges, splits and repairs groups safely under any process failure.

`GroupState` is the coordinator's state machine, part of `CoordinatorState`. A *group* is workers
that serve together, each with some layers. Its record in etcd has an *epoch*, a number that every
change increases. Only committed records have authority, so every decision is a transaction that
compares all records it depends on. The record of a dissolved group stays as a *tombstone* with the
last epoch, until its worker has been absent for long (`singleton_groups`). docs/protocol.md has the
rules and the invariants I1-I11.

A registered worker forms the singleton group `group_id_of(worker)` with all layers. `Reconfigure`
merges and splits groups by a two-phase change, an *attempt*: mark the source records with the
attempt's id, have every member prepare, commit. A failure before the commit leaves all groups
unchanged. A coordinator removes the marks of earlier coordinators. If a member of a merged group is
lost, each survivor gets a DEGRADED singleton group with the layers that it holds; it serves nothing
until an attempt restores all layers.

A group can be stuck although all its members are registered: a connection between members is cut,
or a process hangs, or it died and its lease has not ended yet. Members report that (`GroupStuck`).
The group is *rebuilt* with the same members, which reconnect and keep their KV. It is treated like
a group that lost a member if the rebuild fails, if a member reports a hung engine (`EngineHung`),
or if the group is stuck again soon after two consecutive rebuilds. A wrong diagnosis is safe, since
processes that were presumed dead have an old epoch, so other members discard their frames.
"""

from dataclasses import dataclass, field, replace

from services.core.groups.attempt import Attempt, AttemptPhase
from services.core.groups.backoff import Backoff
from services.core.groups.holders import holders_for, survivors_for
from services.core.groups.layer_map import Stage
from services.core.groups.reconfiguration import refusal, sources_of, target_groups
from services.core.groups.records import Records
from services.core.groups.singleton_groups import DepartedWorkers, form_singletons, remove_records
from services.core.groups.stuck_groups import StuckGroups
from services.core.groups.vocabulary import (
    FLOOR_KEY,
    AbortMember,
    ChangeRefused,
    ClusterListed,
    Command,
    EngineHung,
    Event,
    Group,
    GroupPhase,
    GroupStuck,
    LeadershipChanged,
    MemberAnswered,
    ReconfigurationCommitted,
    ReconfigurationFailed,
    Reconfigure,
    ReconfigureCalledOff,
    Targets,
    TimePassed,
    Transact,
    TransactionFinished,
    group_keys,
    worker_keys,
)
from services.core.setting import seconds


@dataclass(frozen=True, slots=True)
class ProtocolConfig:
    """Time limits of the group protocol, in seconds."""

    prepare_timeout_s: float = seconds(60.0)  # until all members of an attempt are ready
    backoff_s: float = seconds(1.0)  # of members after an aborted attempt; doubles
    backoff_max_s: float = seconds(30.0)
    gone_after_s: float = seconds(3600.0)  # absence after which a worker's records are removed
    # Time limit of a rebuild, to which the longest iteration that a member reported is added.
    rebuild_timeout_s: float = seconds(1.5)
    # Grace period for members that lost their leases, unless a member reports the group as stuck:
    # after an etcd outage all leases have ended, and all workers soon register again.
    absent_wait_s: float = seconds(3.0)
    share_layers: bool = True  # members fetch layers that they all lack from other groups


@dataclass(slots=True)
class GroupState:
    """The group protocol's state machine: reconciles actual groups with the desired groups.

    It starts nothing without leadership or before the first listing of all records. A group or
    worker takes part in at most 1 transaction and 1 attempt at a time. After a transaction that was
    rejected or has an unknown outcome, its records are not used until the next listing.
    """

    config: ProtocolConfig = field(default_factory=ProtocolConfig)
    records: Records = field(default_factory=Records)  # as last known
    token: int | None = None  # fencing token of the leadership; None for a standby
    _now_s: float = 0.0  # of the newest event; never decreases
    _attempts: dict[str, Attempt] = field(default_factory=dict)  # in progress, by id
    _transactions: dict[int, Transact] = field(default_factory=dict)  # in flight, by id
    _attempt_of: dict[int, str] = field(default_factory=dict)  # transaction -> attempt
    _unread: set[str] = field(default_factory=set)  # keys that only a listing makes known again
    _backoff: Backoff = field(default_factory=Backoff)  # of workers after aborted changes
    # Of survivors that restore layers: separate, so that failed changes before do not delay them.
    _restores: Backoff = field(default_factory=Backoff)
    _departed: DepartedWorkers = field(default_factory=DepartedWorkers)  # absent workers
    _stuck: StuckGroups = field(default_factory=StuckGroups)  # reported stuck groups, hung engines
    _transactions_begun: int = 0  # the last transaction id
    _attempts_begun: int = 0  # counter in attempt ids

    def handle(self, event: Event) -> list[Command]:
        """Apply an event; returns the commands for the driver."""
        self._now_s = max(self._now_s, event.now_s)
        commands: list[Command] = []
        match event:
            case ClusterListed():
                # A current listing shows whether uncertain transactions were applied.
                if event.revision >= self.records.revision:
                    self._unread.clear()
                self.records.take(event)
                self._departed.note(self.records, self._now_s)
            case LeadershipChanged():
                commands += self._change_leader(event.token)
            case Reconfigure():
                commands += self._reconfigure(event)
            case ReconfigureCalledOff():
                commands += self._call_off(event)
            case MemberAnswered():
                commands += self._take_answer(event)
            case TransactionFinished():
                commands += self._finish_transaction(event)
            case GroupStuck() | EngineHung():
                self._stuck.note(self.records, event)
            case TimePassed():
                pass
        return commands + self._decide()

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The attempts in progress."""
        return tuple(self._attempts.values())

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        self.records.check_invariants()
        for attempt in self._attempts.values():
            attempt.check_invariants()
            assert attempt.token == self.token
        members = [name for attempt in self._attempts.values() for name in attempt.workers]
        assert len(members) == len(set(members)), "a worker is in two attempts"
        keys = [key for pending in self._transactions.values() for key in pending.touched]
        assert len(keys) == len(set(keys)), "a record is in two transactions"

    # --- events

    def _change_leader(self, token: int | None) -> list[Command]:
        """End all attempts of the last leadership; the next leader removes their marks."""
        if token == self.token:
            return []
        self.token = token
        ended = list(self._attempts.values())
        for attempt in ended:
            attempt.enter(AttemptPhase.ABORTED)
        self._attempts.clear()
        self._attempt_of.clear()
        reason = "the memory manager lost leadership; retry with the new leader"
        return [ReconfigurationFailed(attempt.request_id, reason) for attempt in ended]

    def _reconfigure(self, event: Reconfigure) -> list[Command]:
        refused = self._refusal(event.targets)
        if refused is not None:
            return [ReconfigurationFailed(event.request_id, refused.reason)]
        if self._is_being_written(event.targets):
            reason = "the groups are being changed; try again in a moment"
            return [ReconfigurationFailed(event.request_id, reason, busy=True)]
        return [self._begin(event.request_id, event.targets, event.traceparent)]

    def _refusal(self, targets: Targets) -> ChangeRefused | None:
        if self.token is None:
            return ChangeRefused(
                "this memory manager is not the leader; send the request to the leader"
            )
        refused = refusal(self.records, targets)
        if refused is not None:
            return refused
        names = {stage.worker_id for target in targets for stage in target}
        wait_s = self._backoff.wait_s(names, self._now_s)
        if wait_s > 0:
            return ChangeRefused(f"an earlier attempt was aborted; try again in {wait_s:.1f} s")
        return None

    def _is_being_written(self, targets: Targets) -> bool:
        names = {stage.worker_id for target in targets for stage in target}
        keys = worker_keys(names) | group_keys(sources_of(self.records, targets))
        return bool(keys & self._busy())

    def _call_off(self, event: ReconfigureCalledOff) -> list[Command]:
        """Cancel an attempt before its commit, without back-off: its workers did not fail."""
        for attempt in self._attempts.values():
            is_open = attempt.phase in (AttemptPhase.MARKING, AttemptPhase.PREPARING)
            if is_open and attempt.request_id == event.request_id:
                return [self._end(attempt, event.reason)]
        return []

    def _take_answer(self, answer: MemberAnswered) -> list[Command]:
        """Record a member's answer; answers to other attempts or of other processes are ignored."""
        attempt = self._attempts.get(answer.attempt)
        if attempt is None or attempt.phase is not AttemptPhase.PREPARING:
            return []
        if not attempt.is_from_member(answer):
            return []
        if not answer.ready:
            return self._abort(attempt, f"{answer.worker_id} refused: {answer.reason}")
        attempt.ready.add(answer.worker_id)
        if attempt.ready != attempt.workers.keys():
            return []
        # All members are ready: the change takes effect if and only if this transaction commits.
        attempt.enter(AttemptPhase.COMMITTING)
        transaction = self._track(attempt.commit(self._next_transaction))
        self._attempt_of[transaction.transaction_id] = attempt.attempt_id
        return [transaction]

    def _finish_transaction(self, event: TransactionFinished) -> list[Command]:
        written = self._transactions.pop(event.transaction_id)
        attempt = self._attempts.get(self._attempt_of.pop(event.transaction_id, ""))
        if event.revision is not None:
            lost = self._marks_removed_by(written)
            self.records.apply(written, event.revision)
            return lost if attempt is None else lost + self._advance(attempt, event.revision)
        # Rejected or unknown outcome: read these records again before another decision uses them.
        self._unread |= written.touched
        if attempt is None:
            return []
        return self._abort(attempt, "a record has changed meanwhile, or etcd did not answer")

    def _advance(self, attempt: Attempt, revision: int) -> list[Command]:
        """Move an attempt to the next phase after its transaction was committed."""
        if attempt.phase is AttemptPhase.MARKING:
            attempt.enter(AttemptPhase.PREPARING)
            attempt.marked_revision = revision
            attempt.deadline_s = self._now_s + self._timeout_s(attempt)
            self._choose_holders(attempt)
            return [attempt.prepare(self._timeout_s(attempt))]
        attempt.enter(AttemptPhase.COMMITTED)
        del self._attempts[attempt.attempt_id]
        self._stuck.note_committed(attempt, self._now_s)
        for backoff in (self._backoff, self._restores):
            backoff.note_success(attempt.workers)
        return [ReconfigurationCommitted(attempt.request_id, attempt.epoch)]

    def _choose_holders(self, attempt: Attempt) -> None:
        """Choose the workers outside the attempt that send layers to its members."""
        if not self.config.share_layers:
            return
        busy = {member.worker_id for other in self.attempts for member in other.holders}
        change = self.records, attempt.sources, attempt.targets
        attempt.holders = holders_for(*change, busy)
        attempt.survivors = survivors_for(*change, attempt.holders, self._stuck.suspects)

    def _marks_removed_by(self, written: Transact) -> list[Command]:
        """`AbortMember` for the members of attempts whose mark the transaction has removed."""
        commands: list[Command] = []
        for group in written.groups:
            before = self.records.groups.get(group.group_id)
            if before is None or not before.group.attempt or group.epoch != before.group.epoch:
                continue
            if group.attempt != before.group.attempt:
                commands += [
                    AbortMember(
                        before.group.attempt, written.token, member.worker_id, member.incarnation
                    )
                    for member in before.group.members
                ]
        return commands

    # --- attempts

    def _begin(self, request_id: str | None, targets: Targets, traceparent: str = "") -> Transact:
        """Start an attempt; without a request its outcome is reported under the attempt's id."""
        self._attempts_begun += 1
        attempt_id = f"{self._leadership}-{self._attempts_begun}"
        # The commit compares all records as they are now, so a later change of any aborts it.
        records = self.records
        source_ids = sources_of(records, targets)
        groups = target_groups(records, targets, traceparent)
        names = [stage.worker_id for target in targets for stage in target]
        attempt = Attempt(
            attempt_id,
            self._leadership,
            request_id or attempt_id,
            tuple(replace(records.groups[key].group, attempt=attempt_id) for key in source_ids),
            groups,
            {name: records.workers[name] for name in names},
            {group.group_id: records.group_revision(group.group_id) for group in groups},
            {name: records.assignment_revision(name) for name in names},
        )
        self._attempts[attempt_id] = attempt
        revisions = {group_id: records.group_revision(group_id) for group_id in source_ids}
        transaction = self._track(attempt.mark(self._next_transaction, revisions))
        self._attempt_of[transaction.transaction_id] = attempt_id
        return transaction

    def _abort(self, attempt: Attempt, reason: str) -> list[Command]:
        if self._stuck.note_rebuild_failed(attempt, self._now_s):
            return [self._end(attempt, reason)]  # `_repair` splits the group, without back-off
        backoff = self._restores if attempt.is_restore else self._backoff
        backoff.note_failure(
            attempt.workers, self._now_s, self.config.backoff_s, self.config.backoff_max_s
        )
        return [self._end(attempt, reason)]

    def _end(self, attempt: Attempt, reason: str) -> ReconfigurationFailed:
        """End the attempt; `_repair` then removes its marks from the records."""
        attempt.enter(AttemptPhase.ABORTED)
        del self._attempts[attempt.attempt_id]
        return ReconfigurationFailed(attempt.request_id, reason)

    def _abort_failing(self) -> list[Command]:
        """Abort the attempts that can no longer commit or that missed their deadline."""
        commands: list[Command] = []
        for attempt in list(self._attempts.values()):
            if attempt.phase is not AttemptPhase.PREPARING:
                continue
            reason = attempt.conflict_in(self.records) or self._stuck.abort_reason(attempt)
            if reason is None and self._now_s >= attempt.deadline_s:
                silent = ", ".join(sorted(attempt.workers.keys() - attempt.ready))
                reason = f"{silent} was not ready within {self._timeout_s(attempt):g} s"
            if reason is not None:
                commands += self._abort(attempt, reason)
        return commands

    def _timeout_s(self, attempt: Attempt) -> float:
        config = self.config
        if not self._stuck.is_rebuild(attempt):
            return config.prepare_timeout_s
        return min(
            config.prepare_timeout_s, config.rebuild_timeout_s + self._stuck.iteration_s(attempt)
        )

    # --- reconciliation

    def _decide(self) -> list[Command]:
        """Compare every group and worker with the desired state, and start missing changes."""
        if self.token is None or not self.records.revision:
            return []
        commands = self._abort_failing()
        # Each step below adds its keys to `busy`, so that no two steps write the same record.
        busy = self._busy()
        for group_id in sorted(self.records.groups):
            if self.records.is_live(group_id) and not group_keys([group_id]) & busy:
                commands += self._repair(group_id, busy)
        # Workers without a group: new processes, and those whose records were lost.
        for worker_id in sorted(self.records.workers):
            if self.records.group_of(worker_id) is None and not self._is_in_waiting_group(
                worker_id
            ):
                commands += self._form_singletons(None, {worker_id}, busy)
        return commands + self._remove_departed(busy)

    def _repair(self, group_id: str, busy: set[str]) -> list[Command]:
        """Repair a live group that no attempt of this leadership changes."""
        stored = self.records.groups[group_id]
        if self._waits_for_members(stored.group):
            return []
        # A member is lost, or rebuilds do not help: put the survivors into singleton groups.
        unrecoverable = self._stuck.is_unrecoverable(stored.group)
        if unrecoverable or not self.records.is_sound(group_id):
            names = {member.worker_id for member in stored.group.members}
            return self._form_singletons(group_id, names, busy)
        # A mark of an attempt that has ended, or of an earlier leader: remove it.
        if stored.group.attempt:
            plain = replace(stored.group, attempt="")
            revisions = {group_id: stored.mod_revision}
            removal = Transact(
                self._next_transaction, self._leadership, (plain,), group_revisions=revisions
            )
            busy |= removal.touched
            return [self._track(removal)]
        if stored.group.phase is GroupPhase.DEGRADED:
            return self._restore(stored.group, busy)
        if self._stuck.is_stuck(stored.group):
            return self._rebuild(stored.group, busy)
        return []

    def _waits_for_members(self, group: Group) -> bool:
        """Whether the group is within the grace period for members that lost their leases."""
        names = {member.worker_id for member in group.members}
        absent = names - self.records.workers.keys()
        # A report that the group is stuck shows a real failure, which ends the grace period.
        if len(names) < 2 or not absent or self._stuck.is_stuck(group):
            return False
        away_s = max(self._departed.away_s(name, self._now_s) for name in absent)
        return away_s < self.config.absent_wait_s and self.records.is_sound(
            group.group_id, without=absent
        )

    def _is_in_waiting_group(self, worker_id: str) -> bool:
        """Whether the worker is in a group that waits for absent members."""
        stored = self.records.assignments.get(worker_id)
        group = self.records.groups.get(stored.assignment.group_id) if stored else None
        return group is not None and self._waits_for_members(group.group)

    def _rebuild(self, group: Group, busy: set[str]) -> list[Command]:
        """Rebuild a stuck group: an attempt with the same members and layers, at a new epoch."""
        names = {member.worker_id for member in group.members}
        if busy & worker_keys(names):
            return []
        stages = tuple(Stage(m.worker_id, m.first_layer, m.end_layer) for m in group.members)
        transaction = self._begin(None, (stages,))
        self._stuck.note_rebuild_started(
            group, self._attempts[self._attempt_of[transaction.transaction_id]]
        )
        busy |= transaction.touched | worker_keys(names)
        return [transaction]

    def _restore(self, group: Group, busy: set[str]) -> list[Command]:
        """Start an attempt that restores all layers of a survivor."""
        worker = self.records.workers[group.members[0].worker_id]
        targets = ((Stage(worker.worker_id, 0, worker.num_layers),),)
        names = {worker.worker_id}
        if self._restores.wait_s(names, self._now_s) > 0 or busy & worker_keys(names):
            return []
        if refusal(self.records, targets, may_be_degraded=True) is not None:
            return []
        transaction = self._begin(None, targets)
        busy |= transaction.touched | worker_keys(names)
        return [transaction]

    def _form_singletons(
        self, broken_id: str | None, names: set[str], busy: set[str]
    ) -> list[Command]:
        """Put each registered worker among `names` into a singleton group; dissolve `broken_id`."""
        transaction = form_singletons(
            self.records, broken_id, names, self._next_transaction, self._leadership
        )
        if transaction is None or transaction.touched & busy:
            return []
        busy |= transaction.touched
        return [self._track(transaction)]

    def _remove_departed(self, busy: set[str]) -> list[Command]:
        """Remove the records of long-departed workers, a batch at a time."""
        if FLOOR_KEY in busy:
            return []
        names = self._departed.due(self.records, self._now_s, self.config.gone_after_s, busy)
        if not names:
            return []
        for backoff in (self._backoff, self._restores):
            backoff.note_success(names)
        removal = remove_records(self.records, names, self._next_transaction, self._leadership)
        return [self._track(removal)]

    # --- in-flight work

    @property
    def _leadership(self) -> int:
        """The fencing token; callers must be the leader."""
        assert self.token is not None, "a standby decides nothing"
        return self.token

    def _busy(self) -> set[str]:
        """Keys of groups and workers in a transaction or attempt, or with an unknown record."""
        busy = set(self._unread)
        for transaction in self._transactions.values():
            busy |= transaction.touched
        for attempt in self._attempts.values():
            busy |= worker_keys(attempt.workers) | group_keys(attempt.source_ids)
            busy |= group_keys(group.group_id for group in attempt.targets)
        return busy

    @property
    def _next_transaction(self) -> int:
        """The id of the next transaction; only `_track` advances the counter."""
        return self._transactions_begun + 1

    def _track(self, transaction: Transact) -> Transact:
        self._transactions_begun = transaction.transaction_id
        self._transactions[transaction.transaction_id] = transaction
        return transaction
