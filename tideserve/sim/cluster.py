"""A simulated cluster: clients, the scheduler's state machine, instances, delays between them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.core.ask import NO_PREFIX, FailedAssignment
from services.core.groups.vocabulary import StoredGroup
from services.core.ids import group_id_of
from services.core.overload.worker_facts import WorkerFacts
from services.core.planner.config import IterationConfig
from services.core.planner.events import EmitToken, RefuseRequest
from services.core.prefix.block_hash import ThinHashes, prompt_prefix
from services.core.report import LoadReport
from services.core.request import Limits, Request, Sampling, admission_blocks
from services.core.role import Role
from services.core.scheduler.state_config import StateConfig
from services.core.scheduler.vocabulary import (
    Asked,
    Command,
    Event,
    GroupJoined,
    GroupLeft,
    LoadReported,
    OutcomeReported,
    RequestPlaced,
    SendAssignment,
    SendRefusal,
    ServingGroup,
    ShortfallsReported,
    Ticked,
)
from tideserve.sim.change_spec import ChangeSpec
from tideserve.sim.coordinator import FIRST_EPOCH, Coordinator, RecordStore, workers_of
from tideserve.sim.delays import Delays
from tideserve.sim.engine import Simulation
from tideserve.sim.instance import Instance
from tideserve.sim.member import KV_LAYOUT, SimulatedMember, World
from tideserve.sim.moved_requests import MovedRequests
from tideserve.sim.network import Network
from tideserve.sim.report import KvSample, Outcome, Outcomes, Record, sum_of
from tideserve.sim.senders import Senders
from tideserve.sim.time_model import TimeModel
from tideserve.sim.token_times import TokenTimes
from tideserve.sim.workload import Arrival, CoServed, Workload

MODEL = "simulated"
STREAM_ID = 1
TICK_S = 0.1
DRAIN_S = 3600.0
_SAMPLING = Sampling()
Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Configuration of a simulation.

    `drain_s`: longest time that requests may run after the last arrival. With `change`, a simulated
    memory manager may merge and split groups.
    """

    instances: int
    iteration: IterationConfig
    max_model_len: int
    scheduler: StateConfig = field(default_factory=StateConfig)
    delays: Delays = field(default_factory=Delays)
    fast_forward: bool = True
    sample_s: float = 1.0
    drain_s: float = DRAIN_S
    change: ChangeSpec | None = None
    host_slots: int = 0  # KV blocks in host memory of each instance, if `iteration` has `host`


@dataclass(frozen=True, slots=True)
class _Client:
    """A client with a request in flight, number `number` of all.

    `in_closed_loop`: the client sends its next request when this request has ended.
    """

    record: Record
    arrival: Arrival
    number: int
    prefix: ThinHashes
    in_closed_loop: bool


class Cluster:
    """Runs a workload, deterministically for the same workload and time model. A `Listener`."""

    def __init__(self, spec: ClusterSpec, time_model: TimeModel, workload: Workload) -> None:
        self._spec = spec
        self._workload = workload
        self._simulation = Simulation()
        self._senders = Senders(self._simulation, workload, self._send, self._end_arrivals)
        self._token_times: TokenTimes | None = None
        if isinstance(workload, CoServed):
            self._token_times = TokenTimes(workload.window_s)
        self.scheduler = spec.scheduler.state()
        self.instances = {
            name: Instance(
                name,
                spec.iteration,
                self._simulation,
                time_model,
                spec.delays,
                self,
                spec.fast_forward,
                self._token_times,
                spec.host_slots,
            )
            for name in (f"worker-{index:04d}" for index in range(spec.instances))
        }
        self.outcomes = Outcomes(spec.instances * spec.iteration.num_blocks)
        self.members: dict[str, SimulatedMember] = {}
        self.coordinator: Coordinator | None = None
        if spec.change is not None:
            self.coordinator = self._coordinator(spec.change, time_model)
        self._active: dict[str, _Client] = {}  # by request id, until the request ends
        self._queued: dict[str, int] = {}  # blocks that each request in the scheduler's queue needs
        self._queued_blocks = 0  # their sum
        self._assignments: dict[str, SendAssignment] = {}  # latest, of each running request
        self._serving: dict[str, ServingGroup] = {}
        self._roles: dict[str, Role] = {}  # by worker id, without mixed ones
        self._moved: MovedRequests | None = None  # None: no requests move
        if spec.change is not None and spec.change.ships:
            self._moved = MovedRequests()
        self._awaited = 0  # active requests that the end of the simulation waits for
        self._arrivals_over = False

    def run(
        self, progress: Progress | None = None, check: Callable[[], None] | None = None
    ) -> Outcomes:
        """Simulate until all requests have ended, or until `drain_s` after the last arrival.

        `progress` is called with the simulated time at each sample, `check` after every event.
        """
        self._join_instances()
        simulation = self._simulation
        simulation.at(0.0, self._tick)
        simulation.at(0.0, self._sample, progress)
        if isinstance(self._workload, CoServed):
            # Throughput is the difference between the token counts at both ends of the window.
            for time_s in self._workload.window_s:
                simulation.at(time_s, self._note_tokens)
        self._senders.start()
        simulation.run(float("inf"), check)
        outcomes = self.outcomes
        pipelines = [member.pipeline for member in self.members.values()]
        outcomes.changes.note_pipelines(pipeline for pipeline in pipelines if pipeline is not None)
        outcomes.preemptions = sum(
            instance.state.preemptions_total for instance in self.instances.values()
        )
        outcomes.iterations = sum(instance.iterations for instance in self.instances.values())
        outcomes.iterations_fast_forwarded = sum(
            instance.iterations_fast_forwarded for instance in self.instances.values()
        )
        loads = [instance.state.load() for instance in self.instances.values()]
        outcomes.prefix_queries = sum(load.prefix_queries_total for load in loads)
        outcomes.prefix_hits = sum(load.prefix_hits_total for load in loads)
        if self._token_times is not None:
            outcomes.gaps = dict(self._token_times.gaps)
            outcomes.second_gaps = self._token_times.second_gaps
            # Request ids are "r" and the index of the record.
            for request_id, groups in self._token_times.groups.items():
                outcomes.records[int(request_id[1:])].groups = groups
        outcomes.events = simulation.events_total
        outcomes.simulated_s = simulation.now_s
        return outcomes

    def check_invariants(self) -> None:
        """Check the state machines of all workers, the scheduler and the coordinator; for tests."""
        self.scheduler.check_invariants()
        for member in self.members.values():
            member.check_invariants()
        if self.coordinator is not None:
            self.coordinator.check_invariants()

    def _coordinator(self, change: ChangeSpec, time_model: TimeModel) -> Coordinator:
        """Make the memory manager; every instance begins as the only member of its group."""
        network = Network(self._simulation, change.link)
        log = self.outcomes.changes
        world = World(self._simulation, network, time_model, change, log, self.members)
        store = RecordStore(workers_of(list(self.instances), MODEL, change.shape.num_layers))
        facts = {}
        for index, (name, instance) in enumerate(self.instances.items()):
            group = store.groups[group_id_of(name)].group
            member = self.members[name] = SimulatedMember(instance, world, group)
            assert member.memory.blocks >= self._spec.iteration.num_blocks
            host = index // change.workers_per_host
            facts[name] = WorkerFacts(
                name,
                MODEL,
                self._spec.iteration.block_size,
                self._spec.iteration.num_blocks,
                change.arena_bytes,
                change.shape,
                (f"rack-{host // change.hosts_per_rack}", f"host-{host}"),
                can_drop=True,
                model_digest=KV_LAYOUT,
                build=KV_LAYOUT,
                hands_over=self._spec.iteration.prefix_caching,
                cost_model=self._spec.iteration.cost_model,
                max_batch_tokens=self._spec.iteration.max_batch_tokens,
            )
        return Coordinator(
            *(world, facts, store, self.scheduler.demands),
            *(self._note_groups, self._note_shortfalls, self._note_roles),
        )

    # --- clients

    def _end_arrivals(self) -> None:
        if not self._arrivals_over:
            self._arrivals_over = True
            self._simulation.after(self._spec.drain_s, self._simulation.stop)
        self._stop_if_done()

    def _send(self, arrival: Arrival, in_closed_loop: bool) -> None:
        now_s = self._simulation.now_s
        number = len(self.outcomes.records)
        request_id = f"r{number}"
        record = Record(
            now_s,
            arrival.prompt_tokens,
            arrival.output_tokens,
            service=arrival.service,
        )
        self.outcomes.records.append(record)
        prefix = NO_PREFIX
        # Only the dispatch score "prefix" compares hashes, and hashing takes time.
        if self._spec.scheduler.ttft is not None and arrival.prefix_ids:
            prompt_ids = arrival.prompt_ids(number)
            prefix = prompt_prefix(prompt_ids, "", self._spec.iteration.block_size)
        client = _Client(record, arrival, number, prefix, in_closed_loop)
        self._active[request_id] = client
        self._awaited += self._is_awaited(client)
        self._simulation.after(self._spec.delays.ask_s, self._submit, request_id)

    def _end(self, request_id: str, outcome: Outcome, reason: str = "") -> None:
        """End a request; its client is notified after the delay of a token."""
        client = self._active.pop(request_id)
        record = client.record
        self._awaited -= self._is_awaited(client)
        self._assignments.pop(request_id, None)
        if self._moved is not None:
            self._moved.end(request_id)
        record.end_s = self._simulation.now_s + self._spec.delays.token_s
        record.outcome, record.reason = outcome, reason
        if client.in_closed_loop:
            self._senders.note_end(record.end_s)
        self._stop_if_done()

    def _is_awaited(self, client: _Client) -> bool:
        """Whether the simulation waits for the request: an endless backlog is not waited for."""
        return not (client.in_closed_loop and isinstance(self._workload, CoServed))

    def _stop_if_done(self) -> None:
        if self._arrivals_over and not self._awaited:
            self._simulation.stop()

    def _note_tokens(self) -> None:
        """Record how many tokens all workers have processed so far."""
        counts = [instance.state.load().tokens for instance in self.instances.values()]
        self.outcomes.tokens.append((self._simulation.now_s, sum_of(counts)))

    # --- scheduler

    def _join_instances(self) -> None:
        delays = self._spec.delays
        for index, (name, instance) in enumerate(self.instances.items()):
            self._join(group_id_of(name), FIRST_EPOCH, name, 1)
            self.note_report(instance.reporter.snapshot())
            # Heartbeats of the instances are spread evenly over the interval.
            instance.reporter.start(delays.heartbeat_s * (index + 1) / len(self.instances))
        if self.coordinator is not None:
            self.coordinator.start()

    def _join(self, group_id: str, epoch: int, leader: str, members: int) -> None:
        spec = self._spec
        group = ServingGroup(
            group_id=group_id,
            epoch=epoch,
            worker_id=leader,
            incarnation=leader,
            address=leader,
            model=MODEL,
            capacity_blocks=spec.iteration.num_blocks,
            block_size=spec.iteration.block_size,
            max_model_len=spec.max_model_len,
            members=members,
            max_batch_tokens=spec.iteration.max_batch_tokens,
            role=self._roles.get(leader, Role.MIXED) if members == 1 else Role.MIXED,
        )
        self._serving[group_id] = group
        self.scheduler.handle(GroupJoined(self._simulation.now_s, group))

    def _note_groups(self, written: tuple[StoredGroup, ...]) -> None:
        """Deliver written group records to the scheduler."""
        for stored in written:
            group = stored.group
            if group.members:
                leader = group.members[0].worker_id
                self._join(group.group_id, group.epoch, leader, len(group.members))
            else:
                self._serving.pop(group.group_id, None)
                self.scheduler.handle(GroupLeft(self._simulation.now_s, group.group_id))

    def _note_roles(self, roles: dict[str, Role]) -> None:
        """Deliver written roles to the scheduler; workers without one are mixed."""
        self._roles = roles
        for group in list(self._serving.values()):
            self._join(group.group_id, group.epoch, group.worker_id, group.members)

    def _note_shortfalls(self, shortfalls: dict[str, int]) -> None:
        self._apply(ShortfallsReported(self._simulation.now_s, shortfalls))

    def _submit(self, request_id: str) -> None:
        client = self._active[request_id]
        record = client.record
        output = 0 if self._moved is None else self._moved.output_of(request_id)
        blocks = admission_blocks(
            record.prompt_tokens + output,
            record.prompt_tokens + record.output_tokens,
            self._spec.iteration.block_size,
        )
        self._queued[request_id] = blocks
        self._queued_blocks += blocks
        # A request that asks again after an assignment was returned by its worker.
        now_s, returned = self._simulation.now_s, self._assignments.pop(request_id, None)
        self._apply(
            Asked(
                request_id,
                MODEL,
                record.prompt_tokens + output,
                record.output_tokens - output,
                resumed=output > 0,
                service=client.arrival.service,
                prefix=client.prefix,
                now_s=now_s,
                stream_id=STREAM_ID,
                waited_s=now_s - record.sent_s,
                failed=None
                if returned is None
                else FailedAssignment(returned.group_id, returned.epoch, returned=True),
            )
        )

    def _decide(self, event: Event) -> list[Command]:
        return self.scheduler.handle(event)

    def _apply(self, event: Event) -> None:
        for command in self._decide(event):
            match command:
                case SendAssignment():
                    self._queued_blocks -= self._queued.pop(command.request_id)
                    self._assignments[command.request_id] = command
                    self._simulation.after(self._spec.delays.start_s, self._start, command)
                case SendRefusal(request_id=request_id, reason=reason):
                    self._queued_blocks -= self._queued.pop(request_id)
                    self._end(request_id, Outcome.REJECTED, reason.value)

    def _start(self, assignment: SendAssignment) -> None:
        client = self._active[assignment.request_id]
        client.record.worker_id = assignment.worker_id
        request = self._request(client, assignment)
        if self._moved is not None:
            request = self._moved.resumed(request)
        self.instances[assignment.worker_id].receive(request)

    def _request(self, client: _Client, assignment: SendAssignment) -> Request:
        prompt_ids = client.arrival.prompt_ids(client.number)
        limits = Limits(client.record.output_tokens, client.record.output_tokens)
        now_s = self._simulation.now_s
        return Request(
            assignment.request_id,
            prompt_ids,
            _SAMPLING,
            limits,
            now_s,
            service=client.arrival.service,
            waited_s=now_s - client.record.sent_s,
            returnable=assignment.returnable,
            hand_to=assignment.hand_to,
        )

    def _go_on(self, refusal: RefuseRequest) -> None:
        """Start a request where its KV is; ask the scheduler if that group has changed."""
        request_id, place = refusal.request_id, refusal.go_to
        assert place is not None
        assignment = self._assignments[request_id] = replace(
            self._assignments[request_id],
            group_id=place.group_id,
            epoch=place.epoch,
            worker_id=place.worker_id,
        )
        if self.members[place.worker_id].configuration.epoch != place.epoch:
            self._submit(request_id)
            return
        now_s = self._simulation.now_s
        self.scheduler.handle(RequestPlaced(now_s, request_id, place.group_id, place.epoch))
        self._start(assignment)

    def _tick(self) -> None:
        self._apply(Ticked(self._simulation.now_s))
        self._simulation.after(TICK_S, self._tick)

    def _deliver_report(self, report: LoadReport, passed_on: bool = False) -> None:
        self._apply(LoadReported(self._simulation.now_s, report, passed_on))

    # --- callbacks of instances

    def note_token(self, token: EmitToken) -> None:
        if token.index == 0:
            record = self._active[token.request_id].record
            record.first_s = self._simulation.now_s + self._spec.delays.token_s
            self._report_outcome(token.request_id, record.first_s - record.sent_s)
        if token.finish_reason is not None:
            self._report_outcome(token.request_id, 0.0, token.index + 1)
            self._end(token.request_id, Outcome.COMPLETED)

    def _report_outcome(self, request_id: str, ttft_s: float, output_tokens: int = 0) -> None:
        """Report a first token or an end to a scheduler that predicts waits."""
        if self._spec.scheduler.lateness:
            event = OutcomeReported(self._simulation.now_s, request_id, ttft_s, output_tokens)
            self._apply(event)

    def note_refused(self, refusal: RefuseRequest) -> None:
        if refusal.returned:
            delays = self._spec.delays
            self.outcomes.returns += 1
            self._simulation.after(delays.token_s + delays.ask_s, self._submit, refusal.request_id)
            return
        self._end(refusal.request_id, Outcome.REJECTED, refusal.message)

    def note_shipped(self, refusal: RefuseRequest, output_tokens: int) -> None:
        assert self._moved is not None
        self._moved.note(refusal, output_tokens)
        delays = self._spec.delays
        self._simulation.after(delays.token_s + delays.start_s, self._go_on, refusal)

    def note_report(self, report: LoadReport) -> None:
        self._simulation.after(self._spec.delays.report_s, self._deliver_report, report)

    def note_ends(self, report: LoadReport) -> None:
        """See `Listener`; the gateway passes this report on with the last tokens."""
        self._simulation.after(self._spec.delays.token_s, self._deliver_report, report, True)

    def _sample(self, progress: Progress | None) -> None:
        now_s = self._simulation.now_s
        used = wanted = running = capacity = processed = 0
        for instance in self.instances.values():
            load = instance.state.load()
            if load.running or load.waiting or instance.launches:
                # In a pipeline, the leader's planner holds the requests of all stages.
                capacity += load.kv_blocks_total
                used += load.kv_blocks_total - load.kv_blocks_free
            wanted += load.kv_blocks_wanted
            running += load.running
            processed += load.tokens.online_processed_tokens_total
            processed += load.tokens.batch_processed_tokens_total
        queued = self._queued_blocks
        self.outcomes.samples.append(
            KvSample(
                *(now_s, used, wanted + queued, running, len(self._queued), capacity, processed)
            )
        )
        if progress is not None:
            progress(now_s)
        self._simulation.after(self._spec.sample_s, self._sample, progress)
