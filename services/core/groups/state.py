"""Group protocol: which groups there are, and how they change safely whatever process fails.

Only a committed record tells which process may act. So every decision here is a transaction that
compares all records that it rests on. Epochs never go back; a dissolved group's record stays as a
tombstone for that, until its worker has been gone for long (`departed`). docs/protocol.md has the
rules and the invariants I1-I10.

A registered worker forms the group `group_id_of(worker)` alone, with all layers. `Reconfigure`
merges and splits groups in three steps: mark their records with a fresh attempt, have every member
prepare itself, commit. A failure before the commit leaves everything as it was. A coordinator
removes marks of other coordinators. When a member of a merged group is lost, the group is DEGRADED:
each survivor gets a record of its own with the layers that it holds, serves nothing, and comes back
by an attempt that gives it all layers.

A group may be stuck although all its members are registered: a lane between two is cut, a process
stands still, or its lease has yet to end. Its members say so (`GroupStuck`). It is made anew with
the same members, which connect again and keep their KV. If that fails, if a member says that its
engine stands still (`EngineHung`), or if the group is stuck again soon after it has been made anew
twice in a row, it is treated like a group that has lost a member. Both are safe whoever lives,
since epochs fence what the others do.
"""

from dataclasses import dataclass, field, replace

from services.core.groups.attempt import Attempt, AttemptPhase
from services.core.groups.backoff import Backoff
from services.core.groups.layer_map import Stage
from services.core.groups.reconfiguration import refusal, sources_of, target_groups
from services.core.groups.records import Records
from services.core.groups.singleton_groups import DepartedWorkers, form_singletons, remove_records
from services.core.groups.stuck_groups import StuckGroups
from services.core.groups.vocabulary import (
    FLOOR_KEY,
    AbortMember,
    CalledOff,
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
    """How long members may prepare, and how long they are left alone after an abort.

    Records of workers that have not been registered for `gone_after_s` are removed. Members of a
    stuck group have `renew_timeout_s` to connect again, beyond the longest iteration of one that
    has reported lately. A group whose members lose their leases
    stays as it is for `absent_wait_s`, unless one of them reports it: after an outage of etcd all
    leases have ended, and all are back in a moment.
    """

    prepare_timeout_s: float = seconds(60.0)
    backoff_s: float = seconds(1.0)
    backoff_max_s: float = seconds(30.0)
    gone_after_s: float = seconds(3600.0)
    renew_timeout_s: float = seconds(1.5)
    absent_wait_s: float = seconds(3.0)


@dataclass(slots=True)
class GroupState:
    """Compares the groups that are with those that should be, and orders what is missing.

    Decides nothing before a listing and without leadership. A group or worker is in at most one
    transaction and one attempt at a time; after a transaction that was not committed it is left
    alone until the next listing.
    """

    config: ProtocolConfig = field(default_factory=ProtocolConfig)
    records: Records = field(default_factory=Records)
    token: int | None = None
    _now_s: float = 0.0
    _attempts: dict[str, Attempt] = field(default_factory=dict)
    _transactions: dict[int, Transact] = field(default_factory=dict)
    _committing: dict[int, str] = field(default_factory=dict)  # transaction -> attempt
    _unread: set[str] = field(default_factory=set)
    _backoff: Backoff = field(default_factory=Backoff)
    # A survivor waits for its own failures alone, not for those of the group that it was in.
    _restores: Backoff = field(default_factory=Backoff)
    _departed: DepartedWorkers = field(default_factory=DepartedWorkers)
    _stuck: StuckGroups = field(default_factory=StuckGroups)
    _transactions_begun: int = 0
    _attempts_begun: int = 0

    def handle(self, event: Event) -> list[Command]:
        """Apply one event; return what the driver must do next."""
        self._now_s = max(self._now_s, event.now_s)
        commands: list[Command] = []
        match event:
            case ClusterListed():
                if event.revision >= self.records.revision:
                    self._unread.clear()
                self.records.take(event)
                self._departed.note(self.records, self._now_s)
            case LeadershipChanged():
                commands += self._change_leader(event.token)
            case Reconfigure():
                commands += self._reconfigure(event)
            case CalledOff():
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
        """The attempts that run."""
        return tuple(self._attempts.values())

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        self.records.check_invariants()
        for attempt in self._attempts.values():
            attempt.check_invariants()
            assert attempt.token == self.token
        members = [name for attempt in self._attempts.values() for name in attempt.workers]
        assert len(members) == len(set(members)), "a worker is in two attempts"
        keys = [key for one in self._transactions.values() for key in one.touched]
        assert len(keys) == len(set(keys)), "a record is in two transactions"

    # --- events

    def _change_leader(self, token: int | None) -> list[Command]:
        """The next leader removes the marks of the attempts that end here."""
        if token == self.token:
            return []
        self.token = token
        ended = list(self._attempts.values())
        for attempt in ended:
            attempt.move(AttemptPhase.ABORTED)
        self._attempts.clear()
        self._committing.clear()
        reason = "the memory manager has lost its leadership; ask the next one"
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
            return ChangeRefused("this memory manager does not lead; ask the one that does")
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

    def _call_off(self, event: CalledOff) -> list[Command]:
        """End an attempt before its commit; its workers have not failed, so nobody backs off."""
        for attempt in self._attempts.values():
            is_open = attempt.phase in (AttemptPhase.MARKING, AttemptPhase.PREPARING)
            if is_open and attempt.request_id == event.request_id:
                return [self._end(attempt, event.reason)]
        return []

    def _take_answer(self, answer: MemberAnswered) -> list[Command]:
        """An answer to another attempt, or from another incarnation, has no effect."""
        attempt = self._attempts.get(answer.attempt)
        if attempt is None or attempt.phase is not AttemptPhase.PREPARING:
            return []
        if not attempt.awaits(answer):
            return []
        if not answer.ready:
            return self._abort(attempt, f"{answer.worker_id} refused: {answer.reason}")
        attempt.ready.add(answer.worker_id)
        if attempt.ready != attempt.workers.keys():
            return []
        attempt.move(AttemptPhase.COMMITTING)
        transaction = self._track(attempt.commit(self._next_transaction))
        self._committing[transaction.transaction_id] = attempt.attempt_id
        return [transaction]

    def _finish_transaction(self, event: TransactionFinished) -> list[Command]:
        written = self._transactions.pop(event.transaction_id)
        attempt = self._attempts.get(self._committing.pop(event.transaction_id, ""))
        if event.revision is not None:
            lost = self._marks_removed_by(written)
            self.records.apply(written, event.revision)
            return lost if attempt is None else lost + self._advance(attempt, event.revision)
        self._unread |= written.touched
        if attempt is None:
            return []
        return self._abort(attempt, "a record has changed meanwhile, or etcd gave no answer")

    def _advance(self, attempt: Attempt, revision: int) -> list[Command]:
        """The attempt's transaction was committed."""
        if attempt.phase is AttemptPhase.MARKING:
            attempt.move(AttemptPhase.PREPARING)
            attempt.marked_revision = revision
            attempt.deadline_s = self._now_s + self._timeout_s(attempt)
            return [attempt.prepare(self._timeout_s(attempt))]
        attempt.move(AttemptPhase.COMMITTED)
        del self._attempts[attempt.attempt_id]
        self._stuck.committed(attempt, self._now_s)
        for backoff in (self._backoff, self._restores):
            backoff.succeeded(attempt.workers)
        return [ReconfigurationCommitted(attempt.request_id, attempt.epoch)]

    def _marks_removed_by(self, written: Transact) -> list[Command]:
        """Tell members of an attempt that their record no longer bears it."""
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
        """Without a request the attempt's outcome is told under its own id."""
        self._attempts_begun += 1
        attempt_id = f"{self._leadership}-{self._attempts_begun}"
        records = self.records
        source_ids = sources_of(records, targets)
        groups = target_groups(records, targets, traceparent)
        names = [stage.worker_id for target in targets for stage in target]
        attempt = Attempt(
            attempt_id,
            self._leadership,
            request_id or attempt_id,
            tuple(replace(records.groups[one].group, attempt=attempt_id) for one in source_ids),
            groups,
            {name: records.workers[name] for name in names},
            {group.group_id: records.group_revision(group.group_id) for group in groups},
            {name: records.assignment_revision(name) for name in names},
        )
        self._attempts[attempt_id] = attempt
        revisions = {one: records.group_revision(one) for one in source_ids}
        transaction = self._track(attempt.mark(self._next_transaction, revisions))
        self._committing[transaction.transaction_id] = attempt_id
        return transaction

    def _abort(self, attempt: Attempt, reason: str) -> list[Command]:
        if self._stuck.rebuild_failed(attempt):
            return [self._end(attempt, reason)]  # its members are on their own now
        backoff = self._restores if attempt.restores else self._backoff
        backoff.failed(
            attempt.workers, self._now_s, self.config.backoff_s, self.config.backoff_max_s
        )
        return [self._end(attempt, reason)]

    def _end(self, attempt: Attempt, reason: str) -> ReconfigurationFailed:
        """Forget the attempt; its marks are then nobody's, and are removed as such."""
        attempt.move(AttemptPhase.ABORTED)
        del self._attempts[attempt.attempt_id]
        return ReconfigurationFailed(attempt.request_id, reason)

    def _abort_what_cannot_be(self) -> list[Command]:
        commands: list[Command] = []
        for attempt in list(self._attempts.values()):
            if attempt.phase is not AttemptPhase.PREPARING:
                continue
            reason = attempt.change_in(self.records) or self._stuck.abort_reason(attempt)
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
            config.prepare_timeout_s, config.renew_timeout_s + self._stuck.iteration_s(attempt)
        )

    # --- groups as they should be

    def _decide(self) -> list[Command]:
        if self.token is None or not self.records.revision:
            return []
        commands = self._abort_what_cannot_be()
        busy = self._busy()
        for group_id in sorted(self.records.groups):
            if self.records.is_live(group_id) and not group_keys([group_id]) & busy:
                commands += self._mend(group_id, busy)
        for worker_id in sorted(self.records.workers):
            if self.records.group_of(worker_id) is None and not self._is_awaited(worker_id):
                commands += self._form_singletons(None, {worker_id}, busy)
        return commands + self._remove_departed(busy)

    def _mend(self, group_id: str, busy: set[str]) -> list[Command]:
        """What a live group without an attempt of ours needs."""
        stored = self.records.groups[group_id]
        if self._awaits(stored.group):
            return []
        hopeless = self._stuck.is_unrecoverable(stored.group)
        if hopeless or not self.records.is_sound(group_id):
            names = {member.worker_id for member in stored.group.members}
            return self._form_singletons(group_id, names, busy)
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

    def _awaits(self, group: Group) -> bool:
        """Whether members have lost their leases, may be back soon, and are not reported."""
        names = {member.worker_id for member in group.members}
        absent = names - self.records.workers.keys()
        if len(names) < 2 or not absent or self._stuck.is_stuck(group):
            return False
        away_s = max(self._departed.away_s(name, self._now_s) for name in absent)
        return away_s < self.config.absent_wait_s and self.records.is_sound(
            group.group_id, without=absent
        )

    def _is_awaited(self, worker_id: str) -> bool:
        """Whether the worker is in a group that waits for other members."""
        stored = self.records.assignments.get(worker_id)
        group = self.records.groups.get(stored.assignment.group_id) if stored else None
        return group is not None and self._awaits(group.group)

    def _rebuild(self, group: Group, busy: set[str]) -> list[Command]:
        """Make a stuck group anew with the same members."""
        names = {member.worker_id for member in group.members}
        if busy & worker_keys(names):
            return []
        stages = tuple(Stage(m.worker_id, m.first_layer, m.end_layer) for m in group.members)
        transaction = self._begin(None, (stages,))
        self._stuck.rebuild_started(
            group, self._attempts[self._committing[transaction.transaction_id]]
        )
        busy |= transaction.touched | worker_keys(names)
        return [transaction]

    def _restore(self, group: Group, busy: set[str]) -> list[Command]:
        """Give a survivor all its layers back."""
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
        """Give each registered worker among `names` a group of its own; `broken_id` goes."""
        settlement = form_singletons(
            self.records, broken_id, names, self._next_transaction, self._leadership
        )
        if settlement is None or settlement.touched & busy:
            return []
        busy |= settlement.touched
        return [self._track(settlement)]

    def _remove_departed(self, busy: set[str]) -> list[Command]:
        """Remove the records of workers that have gone for good, some at a time."""
        if FLOOR_KEY in busy:
            return []
        names = self._departed.due(self.records, self._now_s, self.config.gone_after_s, busy)
        if not names:
            return []
        for backoff in (self._backoff, self._restores):
            backoff.succeeded(names)
        removal = remove_records(self.records, names, self._next_transaction, self._leadership)
        return [self._track(removal)]

    # --- what is under way

    @property
    def _leadership(self) -> int:
        """The token of a coordinator that decides."""
        assert self.token is not None, "a standby decides nothing"
        return self.token

    def _busy(self) -> set[str]:
        """Keys of groups and workers that a transaction or an attempt has, or that are unread."""
        busy = set(self._unread)
        for transaction in self._transactions.values():
            busy |= transaction.touched
        for attempt in self._attempts.values():
            busy |= worker_keys(attempt.workers) | group_keys(attempt.source_ids)
            busy |= group_keys(group.group_id for group in attempt.targets)
        return busy

    @property
    def _next_transaction(self) -> int:
        """It counts once it is tracked, so that time that only passes changes nothing."""
        return self._transactions_begun + 1

    def _track(self, transaction: Transact) -> Transact:
        self._transactions_begun = transaction.transaction_id
        self._transactions[transaction.transaction_id] = transaction
        return transaction
