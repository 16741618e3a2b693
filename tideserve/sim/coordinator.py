"""The memory manager of a simulated cluster: monitor, plan and protocol of `services.core`.

A record store and delays replace etcd and gRPC. Each tick uses the memory state of that moment;
the reports that the real service uses are slightly older.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.core.demand import ModelDemand
from services.core.destination import Destination
from services.core.groups.coordinator import (
    ChangeCalledOff,
    ChangePhase,
    ChangeRequested,
    ChangeStepped,
    Command,
    CoordinatorConfig,
    CoordinatorState,
    Event,
    MembersPolled,
    MemberStatus,
    PollMembers,
)
from services.core.groups.fence import AbortCall, prepare_calls
from services.core.groups.records import assignment_of
from services.core.groups.vocabulary import (
    AbortMember,
    ClusterListed,
    Group,
    GroupPhase,
    LeadershipChanged,
    Member,
    MemberAnswered,
    PrepareMembers,
    StoredAssignment,
    StoredGroup,
    TimePassed,
    Transact,
    TransactionFinished,
    Worker,
)
from services.core.ids import group_id_of
from services.core.overload.action_plan import Change
from services.core.overload.actions import LOAD_IS_BACK, ActionState
from services.core.overload.events import (
    Action,
    Decision,
    DemandReported,
    GroupsSeen,
    GroupUse,
    MergesPlanned,
    MoveEnded,
)
from services.core.overload.group_use import group_uses
from services.core.overload.monitor import OverloadMonitor
from services.core.overload.roles import RoleAssigner, RolesDue
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import EngineReport
from services.core.role import Role
from services.core.shipments.vocabulary import ShippingAsked, ShippingOver
from tideserve.sim.member import World
from tideserve.sim.pipeline import ChangeRecord

TOKEN = 1
"""Leadership token of the only coordinator."""
FIRST_EPOCH = 1


class RecordStore:
    """Records of workers, groups and assignments; every worker begins in its own group."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.revision = 1
        self.workers = {worker.worker_id: worker for worker in workers}
        self.groups: dict[str, StoredGroup] = {}
        self.assignments: dict[str, StoredAssignment] = {}
        for worker in self.workers.values():
            member = Member(worker.worker_id, worker.incarnation, 0, worker.num_layers)
            group_id = group_id_of(worker.worker_id)
            group = Group(group_id, FIRST_EPOCH, GroupPhase.STABLE, (member,), worker.model)
            self.groups[group_id] = StoredGroup(group, self.revision)
            assignment = assignment_of(group, member)
            self.assignments[worker.worker_id] = StoredAssignment(assignment, self.revision)

    def listing(self, now_s: float) -> ClusterListed:
        """Return all records as an event."""
        return ClusterListed(
            now_s,
            self.revision,
            tuple(self.workers.values()),
            tuple(self.groups.values()),
            tuple(self.assignments.values()),
        )

    def write(self, command: Transact) -> int | None:
        """Commit a transaction and return its revision; None if a record that it read changed."""
        # As in etcd: compare the token and the revisions that the transaction read, then write.
        if command.token != TOKEN or not self._holds(command):
            return None
        self.revision += 1
        for group in command.groups:
            self.groups[group.group_id] = StoredGroup(group, self.revision)
        for assignment in command.assignments:
            stored = StoredAssignment(assignment, self.revision)
            self.assignments[assignment.worker_id] = stored
        return self.revision

    def _holds(self, command: Transact) -> bool:
        groups = {key: stored.mod_revision for key, stored in self.groups.items()}
        assignments = {key: stored.mod_revision for key, stored in self.assignments.items()}
        workers = {key: worker.create_revision for key, worker in self.workers.items()}
        return all(
            stored.get(key, 0) == revision
            for stored, expected in (
                (groups, command.group_revisions),
                (assignments, command.assignment_revisions),
                (workers, command.worker_revisions),
            )
            for key, revision in expected.items()
        )


Demands = Callable[[float], tuple[ModelDemand, ...]]
GroupsWritten = Callable[[tuple[StoredGroup, ...]], None]


@dataclass(frozen=True, slots=True)
class _RunningChange:
    change: Change
    decided_s: float


class Coordinator:
    """Drives monitor and protocol; the only candidate, so it leads from start to end."""

    def __init__(
        self,
        world: World,
        facts: dict[str, WorkerFacts],
        store: RecordStore,
        demands: Demands,
        groups_written: GroupsWritten,
        shortfalls_changed: Callable[[dict[str, int]], None],
        roles_changed: Callable[[dict[str, Role]], None],
    ) -> None:
        """`demands` reads the scheduler's demand; the last three callbacks notify the scheduler."""
        spec = world.spec
        self.state = CoordinatorState(
            CoordinatorConfig(
                spec.protocol,
                spec.costs.changes_max,
                spec.costs.tick_s,
                change_over_timeout_s=spec.costs.change_over_timeout_s,
            )
        )
        self.monitor = OverloadMonitor(spec.monitor)
        self._role_assigner = RoleAssigner(spec.roles)
        self._actions = ActionState(spec.protocol.backoff_s, spec.protocol.backoff_max_s)
        self._world = world
        self._facts = facts
        self._store = store
        self._demands = demands
        self._groups_written = groups_written
        self._shortfalls_changed = shortfalls_changed
        self._roles_changed = roles_changed
        self._roles: dict[str, Role] = {}  # as written, by worker id, without mixed ones
        self._shortfalls: dict[str, int] = {}  # as the scheduler knows them, by model
        self._running: dict[str, _RunningChange] = {}  # until stable or failed, by change id
        self._changes_total = 0
        self._orders_total = 0

    def start(self) -> None:
        """Read the records, then evaluate the cluster every tick."""
        now_s = self._now_s
        self._apply(LeadershipChanged(now_s, TOKEN))
        self._apply(self._store.listing(now_s))
        self._world.simulation.after(self._world.spec.costs.tick_s, self._tick)

    def check_invariants(self) -> None:
        """Check the invariants of both state machines."""
        self.state.check_invariants()
        self.monitor.check_invariants()

    @property
    def stable_groups(self) -> tuple[Group, ...]:
        """The groups that serve, by id."""
        groups = [stored.group for _, stored in sorted(self.state.records.groups.items())]
        return tuple(group for group in groups if group.phase is GroupPhase.STABLE)

    @property
    def _now_s(self) -> float:
        return self._world.simulation.now_s

    # --- monitor and plan

    def _tick(self) -> None:
        now_s = self._now_s
        if self.state.attempts:
            self._apply(TimePassed(now_s))
        reports = self._reports()
        self._actions.note_workers({name: name for name in reports}, now_s)
        groups = self.stable_groups
        decisions = self.monitor.handle(DemandReported(now_s, self._demands(now_s)))
        uses = group_uses(groups, reports, self._facts)
        decisions += self.monitor.handle(GroupsSeen(now_s, uses))
        for decision in decisions:
            self._world.log.decisions.append(decision)
            if decision.action is not Action.EXHAUSTED:
                self._act(decision)
        self._report_shortfalls()
        self._assign_roles(uses)
        self._world.simulation.after(self._world.spec.costs.tick_s, self._tick)

    def _report_shortfalls(self) -> None:
        shortfalls = {model: tokens for model, tokens in self.monitor.shortfalls.items() if tokens}
        if shortfalls != self._shortfalls:
            self._shortfalls = shortfalls
            self._shortfalls_changed(shortfalls)

    def _assign_roles(self, uses: tuple[GroupUse, ...]) -> None:
        if self._world.spec.roles.off:
            return
        demands = {demand.model: demand for demand in self._demands(self._now_s)}
        loads = {use.model: self.monitor.load(use.model) for use in uses}
        roles = self._role_assigner.assign(
            RolesDue(self._now_s, uses, self._facts, loads, demands, self._roles)
        )
        if roles != self._roles:
            self._roles = roles
            costs = self._world.spec.costs
            self._world.simulation.after(costs.store_s + costs.watch_s, self._roles_changed, roles)

    def _reports(self) -> dict[str, EngineReport]:
        return {
            name: EngineReport(member.instance.reporter.load, member.configuration.epoch)
            for name, member in self._world.members.items()
        }

    def _act(self, decision: Decision) -> None:
        if decision.action is Action.MOVE:
            self._move(decision)
            return
        if decision.action is Action.CALL_OFF:
            for change in self._actions.to_call_off(decision):
                self._apply(ChangeCalledOff(decision.now_s, change.targets, LOAD_IS_BACK))
            return
        plan = self._actions.begin(
            decision, self.stable_groups, self._facts, self._reports(), decision.now_s
        )
        # The monitor reports the model as exhausted if all possible merges free too little.
        if plan.short_tokens is not None:
            planned = MergesPlanned(decision.now_s, decision.model, plan.short_tokens)
            self._world.log.decisions += self.monitor.handle(planned)
        if not plan.changes:
            self._world.log.note_failed(plan.reason)
            return
        for change in plan.changes:
            self._changes_total += 1
            change_id = f"change-{self._changes_total}"
            self._running[change_id] = _RunningChange(change, decision.now_s)
            self._apply(ChangeRequested(decision.now_s, change_id, change.targets))

    def _move(self, decision: Decision) -> None:
        """Order the worker of a group to move requests to that of another."""
        records = self.state.records.groups
        (source, target) = [records[group_id].group for group_id in decision.group_ids]
        self._orders_total += 1
        order, spec = f"order-{self._orders_total}", self._world.spec
        (giver, taker) = (source.members[0].worker_id, target.members[0].worker_id)

        def begin() -> None:
            place = Destination(taker, taker, target.group_id, target.epoch)
            blocks = max(1, decision.needed_tokens // self._facts[giver].block_size)
            requests = decision.requests_max
            self._world.members[giver].post(
                ShippingAsked(self._now_s, order, place, requests, blocks_max=blocks)
            )

        def over(answer: ShippingOver) -> None:
            self._world.log.shipped_none += not answer.moved
            self._world.simulation.after(spec.costs.call_s, ended, answer)

        def ended(answer: ShippingOver) -> None:
            ids = source.group_id, target.group_id
            self.monitor.handle(MoveEnded(self._now_s, decision.model, ids, answer.moved))

        self._world.orders[order] = over
        self._world.simulation.after(spec.costs.call_s + spec.costs.connect_s, begin)

    def _note_step(self, step: ChangeStepped) -> None:
        if step.phase not in (ChangePhase.STABLE, ChangePhase.FAILED):
            return
        is_stable = step.phase is ChangePhase.STABLE
        if not is_stable:
            self._world.log.note_failed(step.message)
        self._actions.ended(self._running.pop(step.change_id).change, is_stable, self._now_s)

    # --- protocol

    def _apply(self, event: Event) -> None:
        for command in self.state.handle(event):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        simulation, spec = self._world.simulation, self._world.spec
        match command:
            case Transact():
                simulation.after(spec.costs.store_s, self._transact, command)
            case PrepareMembers():
                self._prepare(command)
            case AbortMember():
                asked = AbortCall(command.token, command.attempt, command.incarnation)
                member = self._world.members[command.worker_id]
                simulation.after(spec.costs.call_s, member.abort, asked)
            case PollMembers() if command.after_s:
                simulation.after(command.after_s, self._poll_members, command)
            case PollMembers():
                self._poll_members(command)
            case ChangeStepped():
                self._note_step(command)

    def _transact(self, command: Transact) -> None:
        revision = self._store.write(command)
        if revision is not None:
            self._note_commit(command)
            written = tuple(StoredGroup(group, revision) for group in command.groups)
            self._world.simulation.after(
                self._world.spec.costs.watch_s, self._notify_watchers, written
            )
        self._apply(TransactionFinished(self._now_s, command.transaction_id, revision))
        if revision is None:
            # The coordinator's copy of the records is stale.
            self._apply(self._store.listing(self._now_s))

    def _note_commit(self, command: Transact) -> None:
        """Log the commit of a change before its members are notified."""
        # Only commits of changes write assignments.
        if not command.assignments:
            return
        workers = tuple(sorted(assignment.worker_id for assignment in command.assignments))
        running = next(
            candidate
            for candidate in self._running.values()
            if workers == tuple(sorted(s.worker_id for t in candidate.change.targets for s in t))
        )
        shape = self._world.spec.shape
        before = sum(
            shape.parameter_bytes(len(self.state.records.groups[group_id].group.members))
            for group_id in running.change.group_ids
        )
        after = sum(shape.parameter_bytes(len(target)) for target in running.change.targets)
        self._world.log.note_committed(
            ChangeRecord(workers, before > after, before - after, running.decided_s, self._now_s)
        )

    def _notify_watchers(self, written: tuple[StoredGroup, ...]) -> None:
        self._groups_written(written)
        for stored in written:
            for member in stored.group.members:
                self._world.members[member.worker_id].observe(written)

    def _prepare(self, command: PrepareMembers) -> None:
        simulation, spec = self._world.simulation, self._world.spec

        def answered(attempt: str, worker_id: str, ready: bool, reason: str) -> None:
            simulation.after(spec.costs.call_s, self._answered, attempt, worker_id, ready, reason)

        for worker_id, asked in prepare_calls(command).items():
            member = self._world.members[worker_id]
            simulation.after(spec.costs.call_s, member.ask, asked, command.targets, answered)

    def _answered(self, attempt: str, worker_id: str, ready: bool, reason: str) -> None:
        now_s = self._now_s
        self._apply(MemberAnswered(now_s, attempt, worker_id, worker_id, ready, reason))

    def _poll_members(self, command: PollMembers) -> None:
        members, log = self._world.members, self._world.log
        seen = tuple(
            MemberStatus(name, members[name].instance.reporter.epoch, log.has_settled(name))
            for name in command.worker_ids
        )
        self._apply(MembersPolled(self._now_s, command.change_id, seen))


def workers_of(names: list[str], model: str, num_layers: int) -> list[Worker]:
    """Registrations of workers; a simulated process never restarts, so its name identifies it."""
    return [Worker(name, name, model, num_layers, create_revision=1) for name in names]
