"""The planner of a worker: continuous batching with chunked prefill.

Orca forms a new batch in each iteration; Sarathi runs prompts in chunks beside decode steps.

`single.py` plans the iterations of a group of one. The leader of a group of S > 1 keeps S
microbatches in flight, one per stage; `pipeline.py` plans them. The stages run microbatches in
order, so the next chunk of a prompt may follow the one in flight. A sequence whose next token is
being sampled waits for that token.

Everybody may read the state; `handle` and `plan` alone change it, so their calls, in order, repeat
it. `configuration_handlers.py` has what changes of groups do to it. `fast_forward.py` has
short-cuts of a simulator.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from services.core.line_order import Scheduling
from services.core.logprobs import LogprobRows
from services.core.planner import configuration_events as changes
from services.core.planner.batch import Batch, Microbatch, SampleNotes, new_tuple
from services.core.planner.block_pool import BlockPool
from services.core.planner.block_table import StageTable
from services.core.planner.bros_planner import BrosPlanner
from services.core.planner.config import IterationConfig
from services.core.planner.configuration_handlers import ConfigurationHandlers
from services.core.planner.events import (
    Command,
    EmitToken,
    Event,
    IterationDropped,
    IterationFinished,
    IterationSuspended,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
    WaitLooked,
)
from services.core.planner.feedback import Feedback, feedback_of
from services.core.planner.flight import Flight
from services.core.planner.pipeline import PipelinePlanner
from services.core.planner.plan import Plan
from services.core.planner.preemption import (
    OnlineRequest,
    Preempt,
    PreemptedWork,
    gives_way,
    is_abandoned,
)
from services.core.planner.refusal import known_already, queue_full, returned, too_large
from services.core.planner.returns import (
    KEEP_QUEUED,
    REQUEUE_SOON,
    RETURN_AFTER_S,
    RequeueDelays,
    RequeueTimers,
)
from services.core.planner.sequence import Phase, Sequence, SequenceState
from services.core.planner.sequence_table import SequenceTable
from services.core.planner.single import PrefillFirstPlanner, RoundRobinPlanner, SinglePlanner
from services.core.planner.slo import SloPlanner
from services.core.planner.slo_pipeline import SloPipelinePlanner
from services.core.planner.victims import precedence_of
from services.core.planner.waiting_time import WaitingTimePlanner
from services.core.report import Load

_PLANNERS: Mapping[Scheduling, type[SinglePlanner] | type[WaitingTimePlanner]] = {
    Scheduling.ROUND_ROBIN: RoundRobinPlanner,
    Scheduling.WAITING_TIME: WaitingTimePlanner,
    Scheduling.PREFILL_FIRST: PrefillFirstPlanner,
}
Planner = SinglePlanner | SloPlanner | BrosPlanner | WaitingTimePlanner | PipelinePlanner


@dataclass(slots=True)
class PlannerState:
    """Sequences, their blocks and the microbatches that run now.

    `table` is the worker's own, which outlives this state's configurations.
    """

    config: IterationConfig
    table: StageTable = field(init=False)
    sequence_table: SequenceTable = field(init=False)
    _planner: Planner = field(init=False)
    _feedback: Feedback | None = field(init=False)  # with `slo` alone
    _flight: Flight = field(default_factory=Flight)
    _changes: ConfigurationHandlers = field(init=False)
    _arrivals: int = 0
    _newest_s: float = float("-inf")
    _requeue: RequeueTimers = field(default_factory=RequeueTimers)
    preempted_iterations_total: int = 0
    resumed_iterations_total: int = 0

    def __post_init__(self) -> None:
        self.table = StageTable(BlockPool(self.config.num_blocks))
        config = self.config
        self.sequence_table = SequenceTable(
            config.block_size,
            self.table,
            config.prefix_caching,
            precedence_of(config.scheduling, config.victims),
        )
        self._feedback = feedback_of(config.scheduling, config.harvest)
        self._planner = self._new_planner()
        self._changes = ConfigurationHandlers(
            config, self.sequence_table, self._flight, self._feedback
        )

    @property
    def pool(self) -> BlockPool:
        """The worker's blocks."""
        return self.table.pool

    @property
    def sequences(self) -> dict[str, Sequence]:
        """All sequences by request id."""
        return self.sequence_table.sequences

    @property
    def running(self) -> list[Sequence]:
        """Running sequences, oldest first."""
        return self.sequence_table.running

    @property
    def waiting(self) -> deque[Sequence]:
        """Sequences that wait for blocks, oldest first."""
        return self.sequence_table.waiting

    @property
    def held(self) -> list[Sequence]:
        """Sequences that have blocks and are not planned, oldest first."""
        return self.sequence_table.held

    @property
    def in_flight(self) -> deque[Plan]:
        """Microbatches in flight, oldest first."""
        return self._flight.plans

    @property
    def preemptions_total(self) -> int:
        """How often a sequence lost its blocks."""
        return self.sequence_table.preemptions_total

    @property
    def stages(self) -> int:
        """Stages of the group, which is also how many microbatches may be in flight."""
        return self.sequence_table.ledger.stages

    @property
    def has_slot(self) -> bool:
        """Whether another microbatch may be planned now."""
        return len(self.in_flight) < self.stages

    # --- events

    def handle(self, event: Event) -> list[Command]:
        """Apply one event; return what the driver must do: tell clients, stages or the memory.

        Raises ValueError if the event contradicts the state, such as a sequence that is to run
        where its blocks are missing.
        """
        suspended = self.sequence_table.suspended
        if suspended is not None and self._invalidates(event, suspended):
            self.sequence_table.discard_suspended()
        return _HANDLERS[type(event)](self, event)

    def _invalidates(self, event: Event, plan: Plan) -> bool:
        """Whether `plan`, which is suspended, cannot go on after this.

        Its blocks may be another's then, since it is overtaken by what runs meanwhile.
        """
        if isinstance(event, _HARMLESS_EVENTS):
            return False
        if isinstance(event, RequestAborted):
            sequence = self.sequences.get(event.request_id)
            return sequence is not None and plan.includes(sequence)
        return True

    def load(self) -> Load:
        """How busy the worker is now."""
        block_size, batch = self.config.block_size, self.sequence_table.batch.values()
        prefixes = self.sequence_table.prefixes
        batch_waiting = sum(sequence.phase is Phase.WAITING for sequence in batch)
        yields = self.sequence_table.precedence.batch_yields
        return Load(
            running=self.sequence_table.running_count + len(self.held),
            waiting=len(self.waiting),
            kv_blocks_free=max(0, self.sequence_table.ledger.free),
            kv_blocks_wanted=sum(
                seq.blocks_to_admit(block_size)
                for seq in self.waiting
                if seq.request.service.online or not yields
            ),
            preemptions_total=self.preemptions_total,
            kv_blocks_total=self.sequence_table.ledger.least_capacity,
            prompt_tokens_total=self.sequence_table.prompt_tokens_total,
            batch_running=len(batch) - batch_waiting,
            batch_waiting=batch_waiting,
            kv_blocks_batch=self.table.count_only(self.sequence_table.batch),
            batch_yields=yields,
            prefill_tokens=self.sequence_table.prefill_tokens,
            prefix_queries_total=prefixes.queries_total,
            prefix_hits_total=prefixes.hits_total,
            preempted_iterations_total=self.preempted_iterations_total,
            resumed_iterations_total=self.resumed_iterations_total,
            discarded_tokens_total=self.sequence_table.discarded_tokens_total,
            tokens=self.sequence_table.tokens.counts(self.sequences.values(), batch),
        )

    def check_invariants(self) -> None:
        """Blocks, phases and queues agree; call it after every event in tests."""
        self.sequence_table.check_invariants()
        self._flight.check_invariants(self.stages)
        for seq in self.running:
            assert seq.remaining >= 0 and (seq.remaining or self.in_flight)

    # --- planning

    def plan(self, now_s: float) -> Microbatch | None:
        """Start the next microbatch at `now_s`; None when there is nothing to run.

        In a pipeline, an empty one is planned when there is nothing to run, but blocks to release
        at the stages.
        """
        table = self.sequence_table
        alone = table.ledger.stages == 1
        if alone and not (table.running or table.waiting or table.suspended):
            return None
        plan = None if table.suspended is None else self._resume(table.suspended, now_s)
        if plan is None:
            plan = self._decide(now_s)
        if plan.made is not None:
            batch = plan.made
        elif plan:
            batch = plan.batch(self.table)
        elif not alone and table.released and not self.in_flight:
            batch = Batch(())
        else:
            return None
        preemptible = self._may_be_preempted(plan)
        if preemptible and self.config.preempted_work is PreemptedWork.RESUME:
            plan.made = batch
        self._flight.launch(plan)
        released = table.take_released()
        if released:
            self._flight.note_released(plan, released)
        if alone:
            return Microbatch(
                plan.number, batch, released, preemptible=preemptible, resumes=plan.resumes
            )
        prefixes = table.prefixes.take_update(plan.sequences())
        return Microbatch(plan.number, batch, released, prefixes)

    def _may_be_preempted(self, plan: Plan) -> bool:
        """Whether it runs in a group of one, for nobody who waits; one is suspended at most."""
        if self.config.preempt is Preempt.OFF or self.stages > 1 or self.sequence_table.suspended:
            return False
        return not any(sequence.online for sequence in plan.sequences())

    def _resume(self, plan: Plan, now_s: float) -> Plan | None:
        """`plan`, which is suspended, unless something online can run now and has no time for it.

        It is discarded here if it has waited for too long.
        """
        table = self.sequence_table
        if self.online_can_run and not self._has_time_for(plan, now_s):
            joins_others = self._feedback is None or self._feedback.harvest.most > 0
            if joins_others and is_abandoned(plan.ran_s, now_s - plan.suspended_s):
                table.discard_suspended()
            return None
        table.take_suspended()
        assert not self.in_flight
        plan.resumes, plan.number, plan.planned_s = plan.number, self._flight.number + 1, now_s
        self.resumed_iterations_total += 1
        return plan

    def _has_time_for(self, plan: Plan, now_s: float) -> bool:
        planner = self._planner
        return isinstance(planner, SloPlanner) and planner.has_time_for(plan, now_s)

    @property
    def online_can_run(self) -> bool:
        """Whether an online sequence runs, or can start."""
        table, config = self.sequence_table, self.config
        if any(sequence.online for sequence in table.running):
            return True
        if not any(sequence.online for sequence in table.waiting):
            return False
        return table.next_to_admit(config.max_running, config.overtaken_max) is not None

    def gives_way(self, batch: Batch, ran_s: float, waiting: Iterable[OnlineRequest]) -> bool:
        """Whether `batch`, which is in flight and preemptible, ends here for those that wait.

        It has run for `ran_s` since it was launched, or since it went on.
        """
        config, feedback = self.config, self._feedback
        elapsed_s = sum((plan.ran_s for plan in self.in_flight), ran_s)
        budget = None if feedback is None else feedback.budget
        return gives_way(config.preempt, batch, elapsed_s, waiting, config.cost_model, budget)

    def export(self, request_id: str) -> SequenceState:
        """What another leader needs to go on with a sequence, none of which is in flight.

        Does not modify the state: hold the sequence before, forget it when it was adopted.
        """
        return self._changes.export(request_id)

    # --- changes of configurations

    def _change(self, event: changes.ConfigurationEvent) -> list[Command]:
        return self._changes.handle(event)

    def _configure(self, event: changes.StagesConfigured) -> list[Command]:
        commands = self._changes.handle(event)
        if self._feedback is not None:
            self._feedback.configured(self.stages)
        self._planner = self._new_planner()
        return commands

    def _new_planner(self) -> Planner:
        config, table, feedback = self.config, self.sequence_table, self._feedback
        if self.stages > 1:
            if feedback is not None:
                return SloPipelinePlanner(config, table, self.stages, feedback=feedback)
            return PipelinePlanner(config, table, self.stages)
        if feedback is not None:
            bros = config.scheduling is Scheduling.BROS
            return (BrosPlanner if bros else SloPlanner)(config, table, feedback)
        return _PLANNERS.get(config.scheduling, SinglePlanner)(config, table)

    # --- requests

    @property
    def return_due_s(self) -> float | None:
        """As `return_due`, of a worker that plans."""
        return self.return_due()

    def return_due(self, *, may_start: bool = True) -> float | None:
        """From when `WaitLooked` gives requests back; None if it gives none back.

        Unless they `may_start`, this worker plans nothing.
        """
        if not self._requeue.any_waiting(self.sequences):
            return None
        return self._requeue.due_s(self.sequences, self._requeue_delays(may_start))

    def _requeue_delays(self, may_start: bool) -> RequeueDelays:
        """How long requests wait here now, by whether the first of them could start."""
        table, config = self.sequence_table, self.config
        running_max = config.max_running * self.stages
        if not may_start or table.next_to_admit(running_max, config.overtaken_max) is None:
            return REQUEUE_SOON
        if not table.precedence.batch_yields:
            return KEEP_QUEUED
        return RequeueDelays(batch_s=max(RETURN_AFTER_S, config.shelf_max_s))

    def _requeue_waiting(self, event: WaitLooked) -> list[Command]:
        """Give back the requests that have waited here for long without having begun."""
        patience = self._requeue_delays(event.may_start)
        found = self._requeue.take(self.sequences, event.now_s, patience)
        for sequence in found:
            self.sequence_table.end(sequence)
        return [returned(sequence.request_id) for sequence in found]

    def _arrive(self, event: RequestArrived) -> list[Command]:
        request = event.request
        # Not older than the request before it, so that times of several gateways keep the order.
        arrival_s = max(request.arrival_s, self._newest_s)
        sequence = Sequence(request, self._arrivals + 1, arrival_s)
        if request.request_id in self.sequences:
            return [known_already(sequence.request_id)]
        if refusal := too_large(sequence, self.config):
            return [refusal]
        if len(self.waiting) >= self.config.max_waiting:
            return [queue_full(sequence.request_id)]
        self._arrivals += 1
        self._newest_s = arrival_s
        if self._feedback is not None:
            self._feedback.arrived(sequence, event.now_s)
        self.sequence_table.add(sequence)
        self._requeue.note(sequence, event.now_s, self.sequences)
        return []

    def _abort(self, event: RequestAborted) -> list[Command]:
        if event.request_id in self.sequences:
            self.sequence_table.end(self.sequences[event.request_id])
        return []

    # --- iterations

    def _drop_iteration(self, _event: IterationDropped) -> list[Command]:
        assert self.stages == 1, "a pipeline's microbatches are discarded together"
        assert self.in_flight, "no iteration is running"
        plan = self.in_flight[0]
        self.preempted_iterations_total += self._may_be_preempted(plan)
        self.sequence_table.discarded_tokens_total += plan.tokens
        self._changes.discard_flight()
        return []

    def _suspend_iteration(self, event: IterationSuspended) -> list[Command]:
        self._flight.suspend(self.sequence_table, event.now_s)
        self.preempted_iterations_total += 1
        return []

    def _next_result(self, number: int | None, now_s: float) -> Plan | None:
        """The oldest plan in flight, whose result is here; None if that plan was discarded."""
        plan = self._flight.next_result(number)
        if plan is None:
            return None
        if self.config.prefix_caching:
            self.sequence_table.prefixes.publish(plan.sequences())
        if self._feedback is not None:
            self._feedback.finished(plan, now_s)
        if plan.prefills:
            self.sequence_table.tokens.note_prefills(plan.prefills)
        return plan

    def _finish_iteration(self, event: IterationFinished) -> list[Command]:
        plan = self._next_result(event.number, event.now_s)
        if plan is None:
            return []
        samplers = plan.decodes
        if plan.prefills:
            samplers = samplers + [one.sequence for one in plan.prefills if one.samples]
        notes = event.notes
        if notes is not None:
            return self._take_notes(plan, samplers, event.sampled, notes)
        sampled = event.sampled
        return [
            self._append(sequence, sampled[sequence.request.request_id])
            for sequence in samplers
            if sequence.phase is not Phase.ENDED
        ]

    def _take_notes(
        self, plan: Plan, samplers: list[Sequence], sampled: Mapping[str, int], notes: SampleNotes
    ) -> list[Command]:
        """End a microbatch that has notes beside its tokens."""
        commands: list[Command] = []
        for prefill in plan.prefills:
            found = notes.prompt_logprobs.get(prefill.sequence.request_id)
            if found is not None:
                prefill.sequence.take_prompt_logprobs(found)
        for sequence in samplers:
            request_id = sequence.request_id
            if sequence.phase is Phase.ENDED:
                continue
            if (reason := notes.failed.get(request_id)) is not None:
                self.sequence_table.end(sequence)
                commands.append(RefuseRequest(request_id, reason))
            else:
                rows = notes.logprobs.get(request_id)
                commands.append(self._append(sequence, sampled[request_id], rows))
        return commands

    def _append(
        self, sequence: Sequence, token_id: int, logprobs: LogprobRows | None = None
    ) -> EmitToken:
        """A token of a sequence, which may end with it."""
        index = len(sequence.token_ids) - sequence.prompt_tokens
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
        reason = sequence.append(token_id)
        if reason is not None:
            self.sequence_table.end(sequence)
        name = sequence.request.request_id
        if index:
            return new_tuple(EmitToken, (name, index, token_id, reason, logprobs, None, 0))
        self.sequence_table.prompt_tokens_total += sequence.prompt_tokens
        self.sequence_table.tokens.note_first_output(sequence)
        first, cached = sequence.prompt_logprobs, sequence.cached_tokens
        return EmitToken(name, index, token_id, reason, logprobs, first, cached)

    def _decide(self, now_s: float) -> Plan:
        """Choose what runs next, and take the blocks for it."""
        flight = self._flight
        assert not flight.plans or self.has_slot, "no microbatch has finished"
        plan = Plan(flight.number + 1, planned_s=now_s)
        self._planner.schedule(plan, flight.plans)
        return plan


_HARMLESS_EVENTS = (
    RequestArrived,
    IterationFinished,
    IterationDropped,
    IterationSuspended,
    WaitLooked,
)
_HANDLERS: dict[type[Any], Callable[[PlannerState, Any], list[Command]]] = {
    RequestArrived: PlannerState._arrive,
    RequestAborted: PlannerState._abort,
    IterationFinished: PlannerState._finish_iteration,
    IterationDropped: PlannerState._drop_iteration,
    IterationSuspended: PlannerState._suspend_iteration,
    WaitLooked: PlannerState._requeue_waiting,
    changes.StagesConfigured: PlannerState._configure,
}
_HANDLERS |= {
    change: PlannerState._change
    for change in get_args(changes.ConfigurationEvent)
    if change is not changes.StagesConfigured
}
