"""The planner of a worker: continuous batching (Orca) with chunked prefill (Sarathi).

It holds the worker's sequences and decides which tokens the engine runs next. `single.py`, `slo.py`
and others plan the iterations of a single worker. Merged workers form a *group*, a pipeline of
S > 1 *stages*. The worker with the first stage is the *leader* and plans for all: it keeps up to S
*microbatches* in flight, one per stage; `pipeline.py` and `slo_pipeline.py` plan them. An iteration
of a single worker is a microbatch, too. Stages run microbatches in order, so the next chunk of a
prompt may be launched while the previous chunk is in flight. A sequence whose next token is being
sampled waits for that token.

A *change-over* replaces the configuration (stages and layers) of a group, see
`configuration_handlers.py`. A *held* sequence keeps its blocks meanwhile and is not planned.

Drivers read the state, but only `handle` and `plan` mutate it, so replaying their calls in order
reproduces it. `fast_forward.py` has shortcuts for the simulator. Ids are sequence ids, see
`sequence_ids.py`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from services.core.cost.padded import Execution
from services.core.host.vocabulary import HostEvent
from services.core.logprobs import LogprobRows
from services.core.planner import configuration_events as changes
from services.core.planner import pin_events
from services.core.planner.batch import Batch, Microbatch, SampleNotes, new_tuple
from services.core.planner.block_pool import BlockPool
from services.core.planner.block_table import StageTable
from services.core.planner.bros_planner import BrosPlanner
from services.core.planner.config import IterationConfig
from services.core.planner.configuration_handlers import ConfigurationHandlers
from services.core.planner.drain import Candidate, DrainPace
from services.core.planner.events import (
    BlocksBorrowed,
    Command,
    CostModelLearned,
    DrainContinued,
    EmitToken,
    Event,
    IterationDropped,
    IterationFinished,
    IterationSuspended,
    LendBlocks,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
    RequeueChecked,
)
from services.core.planner.feedback import Feedback, feedback_of
from services.core.planner.flight import Flight
from services.core.planner.host_tier import HostTier
from services.core.planner.pin_handlers import PinHandlers
from services.core.planner.pipeline import PipelinePlanner
from services.core.planner.plan import Plan
from services.core.planner.preemption import (
    OnlineRequest,
    Preempt,
    PreemptedWork,
    should_discard,
    should_preempt,
)
from services.core.planner.refusal import (
    duplicate_id,
    queue_full,
    returned,
    returned_by_drain,
    too_large,
)
from services.core.planner.requeue import (
    KEEP_QUEUED,
    REQUEUE_AFTER_S,
    REQUEUE_SOON,
    RequeueDelays,
    RequeueTimers,
)
from services.core.planner.sequence import Phase, Sequence, SequenceState
from services.core.planner.sequence_table import SequenceTable
from services.core.planner.single import PrefillFirstPlanner, RoundRobinPlanner, SinglePlanner
from services.core.planner.slo import SloPlanner
from services.core.planner.slo_pipeline import SloPipelinePlanner
from services.core.planner.static import StaticPlanner
from services.core.planner.victims import precedence_of
from services.core.planner.waiting_time import WaitingTimePlanner
from services.core.queue_order import Scheduling
from services.core.report import DeadlineUse, Load

_PLANNERS: Mapping[Scheduling, type[SinglePlanner] | type[WaitingTimePlanner]] = {
    Scheduling.ROUND_ROBIN: RoundRobinPlanner,
    Scheduling.WAITING_TIME: WaitingTimePlanner,
    Scheduling.PREFILL_FIRST: PrefillFirstPlanner,
}
Planner = SinglePlanner | SloPlanner | BrosPlanner | WaitingTimePlanner | PipelinePlanner


@dataclass(slots=True)
class PlannerState:
    """State machine of a worker's scheduler: sequences, their blocks and microbatches in flight."""

    config: IterationConfig
    table: StageTable = field(init=False)  # block tables of this stage; outlives configurations
    sequence_table: SequenceTable = field(init=False)
    _planner: Planner = field(init=False)  # depends on policy and number of stages
    _feedback: Feedback | None = field(init=False)  # None under policies without deadlines
    _flight: Flight = field(default_factory=Flight)  # microbatches in flight
    _changes: ConfigurationHandlers = field(init=False)  # handles change-over events
    _pins: PinHandlers = field(init=False)  # handles events of shipments
    host: HostTier | None = field(init=False, default=None)  # copies of KV in host memory
    _arrivals: int = 0  # requests accepted so far: the ordinal of the newest
    _newest_s: float = float("-inf")  # latest arrival time so far
    _requeue: RequeueTimers = field(default_factory=RequeueTimers)  # of requests not yet started
    _drain: DrainPace = field(init=False)  # of the returns while this worker shuts down
    preempted_iterations_total: int = 0  # interrupted batch-only iterations
    resumed_iterations_total: int = 0  # those of them that continued at their layer

    def __post_init__(self) -> None:
        self.table = StageTable(BlockPool(self.config.num_blocks))
        config = self.config
        self.sequence_table = SequenceTable(
            config.block_size,
            self.table,
            config.prefix_caching,
            precedence_of(config.scheduling, config.victims),
            config.block_sharing,
        )
        self._feedback = feedback_of(config.scheduling, config.harvest)
        self._drain = DrainPace(config.max_batch_tokens)
        self._planner = self._new_planner()
        self._changes = ConfigurationHandlers(
            config, self.sequence_table, self._flight, self._feedback
        )
        self._pins = PinHandlers(self.sequence_table)
        if config.host is not None:
            self.host = HostTier(config, config.host, self.sequence_table)

    @property
    def pool(self) -> BlockPool:
        """The KV blocks of this worker."""
        return self.table.pool

    @property
    def sequences(self) -> dict[str, Sequence]:
        """All sequences, by sequence id."""
        return self.sequence_table.sequences

    @property
    def running(self) -> list[Sequence]:
        """Running sequences, oldest first."""
        return self.sequence_table.running

    @property
    def waiting(self) -> deque[Sequence]:
        """Sequences that wait for blocks, in queue order."""
        return self.sequence_table.waiting

    @property
    def held(self) -> list[Sequence]:
        """Held sequences (not planned, for example while their KV moves), oldest first."""
        return self.sequence_table.held

    @property
    def in_flight(self) -> deque[Plan]:
        """Microbatches in flight, oldest first."""
        return self._flight.plans

    @property
    def preemptions_total(self) -> int:
        """Number of preemptions by recomputation so far."""
        return self.sequence_table.preemptions_total

    @property
    def stages(self) -> int:
        """Number of stages, which is also the maximum number of microbatches in flight."""
        return self.sequence_table.ledger.stages

    @property
    def has_slot(self) -> bool:
        """Whether another microbatch may be planned now."""
        return len(self.in_flight) < self.stages

    # --- events

    def handle(self, event: Event) -> list[Command]:
        """Apply an event; returns commands, which the driver carries out in order.

        Raises:
            ValueError: if the event contradicts the state, such as a sequence resumed at a stage
                that lacks its blocks.
        """
        suspended = self.sequence_table.suspended
        if suspended is not None and self._invalidates(event, suspended):
            self.sequence_table.discard_suspended()
        return _HANDLERS[type(event)](self, event)

    def _invalidates(self, event: Event, plan: Plan) -> bool:
        """Whether the suspended `plan` cannot resume after the event.

        It also needs the blocks of its sequences, which an abort or a change-over may free.
        """
        if isinstance(event, _HARMLESS_EVENTS):
            return False
        if isinstance(event, RequestAborted):
            sequence = self.sequences.get(event.request_id)
            return sequence is not None and plan.includes(sequence)
        return True

    def load(self) -> Load:
        """Load report of the worker."""
        batch = self.sequence_table.batch.values()
        prefixes = self.sequence_table.prefixes
        batch_waiting = sum(sequence.phase is Phase.WAITING for sequence in batch)
        # Batch work that yields is no demand: the memory manager makes no room for it.
        yields = self.sequence_table.precedence.batch_yields
        return Load(
            running=self.sequence_table.running_count + len(self.held),
            waiting=len(self.waiting),
            kv_blocks_free=max(0, self.sequence_table.ledger.free),
            kv_blocks_wanted=sum(
                self.sequence_table.blocks_wanted(seq)
                for seq in self.waiting
                if seq.request.service.online or not yields
            ),
            preemptions_total=self.preemptions_total,
            kv_blocks_total=self.sequence_table.ledger.least_capacity,
            prompt_tokens_total=self.sequence_table.prompt_tokens_total,
            batch_running=len(batch) - batch_waiting,
            batch_waiting=batch_waiting,
            kv_blocks_batch=self.table.count_exclusive(
                [*self.sequence_table.batch, *self.sequence_table.pins.batch_names]
            ),
            batch_yields=yields,
            prefill_tokens=self.sequence_table.prefill_tokens,
            prefix_queries_total=prefixes.queries_total,
            prefix_hits_total=prefixes.hits_total,
            preempted_iterations_total=self.preempted_iterations_total,
            resumed_iterations_total=self.resumed_iterations_total,
            discarded_tokens_total=self.sequence_table.discarded_tokens_total,
            host_blocks_total=0 if self.host is None else self.host.cache.slots,
            shared_tails_total=self.sequence_table.tails.shared_total,
            lost_tail_tokens_total=self.sequence_table.tails.lost_tokens_total,
            tokens=self.sequence_table.tokens.counts(self.sequences.values(), batch),
        )

    @property
    def deadline_use(self) -> DeadlineUse:
        """How the time before deadlines was used; empty under policies without deadlines."""
        return DeadlineUse() if self._feedback is None else self._feedback.deadline_use

    def check_invariants(self) -> None:
        """Blocks, phases and queues are consistent."""
        self.sequence_table.check_invariants()
        self._flight.check_invariants(self.stages)
        if self.host is not None:
            self.host.check_invariants()
        for seq in self.running:
            assert seq.remaining >= 0 and (seq.remaining or self.in_flight)

    # --- planning

    def plan(self, now_s: float) -> Microbatch | None:
        """Launch the next microbatch at `now_s`; None if there is nothing to run."""
        table = self.sequence_table
        alone = table.ledger.stages == 1  # a single worker
        if alone and not (table.running or table.waiting or table.suspended):
            return None
        if self.host is not None and self.host.stalls:
            return None
        # Resume a suspended microbatch before planning another, unless online work needs the time.
        plan = None if table.suspended is None else self._resume(table.suspended, now_s)
        if plan is None:
            plan = self._decide(now_s)
        if plan.kept_batch is not None:
            batch = plan.kept_batch
        elif plan:
            batch = self._batch_of(plan)
        elif not alone and table.released and not self.in_flight:
            batch = Batch(())  # an empty microbatch, to send released ids to idle stages
        else:
            return None
        preemptible = self._may_be_preempted(plan)
        if preemptible and self.config.preempted_work is PreemptedWork.RESUME:
            plan.kept_batch = batch
        self._flight.launch(plan)
        # Releases travel with the microbatch, so that stages free blocks in planning order.
        released = table.take_released()
        if released:
            self._flight.note_released(plan, released)
        if alone:
            return Microbatch(
                *(plan.number, batch, released),
                preemptible=preemptible,
                resumes=plan.resumes,
                turns=table.tails.take_turns(),
            )
        prefixes = table.prefixes.take_update(plan.sequences())
        return Microbatch(plan.number, batch, released, prefixes)

    def _batch_of(self, plan: Plan) -> Batch:
        batch, tails = plan.batch(self.table), self.sequence_table.tails
        if not tails.turned:
            return batch
        return Batch(batch.chunks, tails.turned_in(plan), tails.shared_in(plan))

    def _may_be_preempted(self, plan: Plan) -> bool:
        """Whether `plan` is a batch-only iteration of a single worker that may be suspended."""
        if (
            self.config.preemption is Preempt.OFF
            or self.stages > 1
            or self.sequence_table.suspended
        ):
            return False
        return not any(sequence.online for sequence in plan.sequences())

    def _resume(self, plan: Plan, now_s: float) -> Plan | None:
        """Resume the suspended `plan`; None if runnable online work leaves no time for it.

        Discards it then if it has waited for too long.
        """
        table = self.sequence_table
        if self.online_can_run and not self._has_time_for(plan, now_s):
            # Discard it only if its sequences can run beside online work instead.
            joins_others = self._feedback is None or self._feedback.harvest.maximum > 0
            if joins_others and should_discard(plan.ran_s, now_s - plan.suspended_s):
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
        """Whether an online sequence runs or can start."""
        table, config = self.sequence_table, self.config
        if any(sequence.online for sequence in table.running):
            return True
        if not any(sequence.online for sequence in table.waiting):
            return False
        return table.next_to_admit(config.max_running, config.overtaken_max) is not None

    def should_preempt(self, batch: Batch, ran_s: float, waiting: Iterable[OnlineRequest]) -> bool:
        """Whether the preemptible `batch` in flight must yield to the `waiting` online requests.

        The batch has run for `ran_s` since its launch or resumption.
        """
        config, feedback = self.config, self._feedback
        elapsed_s = sum((plan.ran_s for plan in self.in_flight), ran_s)
        budget = None if feedback is None else feedback.budget
        return should_preempt(
            config.preemption, batch, elapsed_s, waiting, config.cost_model, budget
        )

    def export(self, seq_id: str) -> SequenceState:
        """State with which another leader can continue a sequence; changes nothing here.

        The driver holds the sequence before, and forgets it once the other leader has adopted it.

        Raises:
            ValueError: if the sequence is in a microbatch in flight.
        """
        return self._changes.export(seq_id)

    # --- changes of configurations

    def _change(self, event: changes.ConfigurationEvent) -> list[Command]:
        self.sequence_table.yield_tails()
        return self._changes.handle(event)

    def _end_configuration(self, event: changes.ConfigurationEnded) -> list[Command]:
        # Their blocks go before those of sequences that run.
        commands: list[Command] = [] if self.host is None else [*self.host.end_configuration()]
        return commands + self._changes.handle(event)

    def _copy(self, event: HostEvent) -> list[Command]:
        if self.host is None:
            return []
        return [*self.host.handle(event, bool(self.in_flight))]

    def _ship(self, event: pin_events.PinEvent) -> list[Command]:
        return self._pins.handle(event)

    def _configure(self, event: changes.StagesConfigured) -> list[Command]:
        self.sequence_table.yield_tails()
        commands = self._changes.handle(event)
        if self._feedback is not None:
            self._feedback.set_stages(self.stages)
        self._planner = self._new_planner()
        return commands

    def _new_planner(self) -> Planner:
        config, table, feedback = self.config, self.sequence_table, self._feedback
        if self.stages > 1:
            if feedback is not None:
                return SloPipelinePlanner(config, table, self.stages, feedback=feedback)
            return PipelinePlanner(config, table, self.stages)
        if config.execution is Execution.STATIC:
            return StaticPlanner(config, table)
        if feedback is not None:
            bros = config.scheduling is Scheduling.BROS
            return (BrosPlanner if bros else SloPlanner)(config, table, feedback)
        return _PLANNERS.get(config.scheduling, SinglePlanner)(config, table)

    # --- measurements

    def _learn(self, event: CostModelLearned) -> list[Command]:
        self.config = replace(self.config, cost_model=event.model)
        self._planner.config = self._changes.config = self.config
        if self.host is not None:
            self.host.config = self.config
        if isinstance(self._planner, SloPlanner | BrosPlanner | SloPipelinePlanner):
            self._planner.harvester.config = self.config
        if self._feedback is not None:
            self._feedback.reset_scales()
        return []

    def _lend(self, event: BlocksBorrowed) -> list[Command]:
        assert not self.sequences, "a measurement would delay sequences"
        return [LendBlocks(self.pool.borrow(event.counts))]

    # --- requests

    @property
    def requeue_due_s(self) -> float | None:
        """`requeue_due` of a worker that leads its group."""
        return self.requeue_due()

    def requeue_due(self, *, may_start: bool = True) -> float | None:
        """Time from which `RequeueChecked` returns requests to the scheduler; None if never.

        `may_start` is False while this worker does not plan because it leads no group.
        """
        if not self._requeue.any_waiting(self.sequences):
            return None
        return self._requeue.due_s(self.sequences, self._requeue_delays(may_start))

    def _requeue_delays(self, may_start: bool) -> RequeueDelays:
        """How long requests may wait here unstarted before they return to the scheduler."""
        table, config = self.sequence_table, self.config
        running_max = config.max_running * self.stages
        # No request can start: another group may have capacity sooner.
        if not may_start or table.next_to_admit(running_max, config.overtaken_max) is None:
            return REQUEUE_SOON
        if not table.precedence.batch_yields:
            return KEEP_QUEUED
        # Under online load, batch requests may find no time although blocks are free.
        return RequeueDelays(batch_s=max(REQUEUE_AFTER_S, config.shelf_max_s))

    def _requeue_waiting(self, event: RequeueChecked) -> list[Command]:
        """Return requests to the scheduler that have waited here too long without a start."""
        delays = self._requeue_delays(event.may_start)
        due = self._requeue.take(self.sequences, event.now_s, delays)
        for sequence in due:
            self.sequence_table.end(sequence)
        return [returned(sequence.seq_id) for sequence in due]

    def _continue_drain(self, event: DrainContinued) -> list[Command]:
        """Return requests to the scheduler because this worker shuts down."""
        table = self.sequence_table
        if self.stages > 1:
            return []  # the group splits first; until then its other members need this worker
        candidates = [
            Candidate.of(sequence)
            for sequence in self.sequences.values()
            if sequence.phase is not Phase.HELD and sequence.seq_id not in event.shipped
        ]
        chosen = self._drain.choose(candidates, event.room, event.now_s)
        leaving = [self.sequences[candidate.seq_id] for candidate in chosen]
        suspended = table.suspended
        if suspended is not None and any(suspended.includes(sequence) for sequence in leaving):
            table.discard_suspended()
        for sequence in leaving:
            table.end(sequence)
        return [returned_by_drain(sequence.seq_id) for sequence in leaving]

    def _arrive(self, event: RequestArrived) -> list[Command]:
        request = event.request
        # Arrival times may be out of order here: raise them, so that ages follow the order here.
        arrival_s = max(request.arrival_s, self._newest_s)
        sequence = Sequence(request, self._arrivals + 1, arrival_s)
        if request.request_id in self.sequences:
            return [duplicate_id(sequence.seq_id)]
        if refusal := too_large(sequence, self.config):
            return [refusal]
        if len(self.waiting) >= self.config.max_waiting:
            return [queue_full(sequence.seq_id)]
        self._arrivals += 1
        self._newest_s = arrival_s
        if self._feedback is not None:
            self._feedback.note_arrival(sequence, event.now_s)
        self.sequence_table.add(sequence)
        if self.sequence_table.pins:
            self.sequence_table.await_kv(sequence)
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

    def _take_result(self, number: int | None, now_s: float) -> Plan | None:
        """Remove the plan whose result arrived, and count it; None if it was discarded."""
        plan = self._flight.take_result(number)
        if plan is None:
            return None
        if self.config.prefix_caching:
            self.sequence_table.prefixes.publish(plan.sequences())
        if self._feedback is not None:
            self._feedback.note_result(plan, now_s)
        if plan.prefills:
            self.sequence_table.tokens.note_prefills(plan.prefills)
        return plan

    def _finish_iteration(self, event: IterationFinished) -> list[Command]:
        plan = self._take_result(event.number, event.now_s)
        if plan is None:
            return []
        samplers = plan.decodes
        if plan.prefills:
            samplers = samplers + [chunk.sequence for chunk in plan.prefills if chunk.samples]
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
        """Finish a microbatch whose results include log probabilities or failures."""
        commands: list[Command] = []
        for prefill in plan.prefills:
            prompt_rows = notes.prompt_logprobs.get(prefill.sequence.seq_id)
            if prompt_rows is not None:
                prefill.sequence.take_prompt_logprobs(prompt_rows)
        for sequence in samplers:
            seq_id = sequence.seq_id
            if sequence.phase is Phase.ENDED:
                continue
            if (reason := notes.failed.get(seq_id)) is not None:
                self.sequence_table.end(sequence)
                commands.append(RefuseRequest(seq_id, reason))
            else:
                rows = notes.logprobs.get(seq_id)
                commands.append(self._append(sequence, sampled[seq_id], rows))
        return commands

    def _append(
        self, sequence: Sequence, token_id: int, logprobs: LogprobRows | None = None
    ) -> EmitToken:
        """Append a sampled token, and end the sequence if it is its last token."""
        index = len(sequence.token_ids) - sequence.prompt_tokens
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
        reason = sequence.append(token_id)
        if reason is not None:
            self.sequence_table.end(sequence)
        seq_id = sequence.request.request_id
        if index:
            return new_tuple(EmitToken, (seq_id, index, token_id, reason, logprobs, None, 0))
        # The first output token carries prompt logprobs and cache hits of the prompt.
        self.sequence_table.prompt_tokens_total += sequence.prompt_tokens
        self.sequence_table.tokens.note_first_output(sequence)
        first, cached = sequence.prompt_logprobs, sequence.cached_tokens
        return EmitToken(seq_id, index, token_id, reason, logprobs, first, cached)

    def _decide(self, now_s: float) -> Plan:
        """Choose what the next microbatch runs, and allocate its blocks."""
        flight = self._flight
        assert not flight.plans or self.has_slot, "no microbatch has finished"
        while True:
            plan = Plan(flight.number + 1, planned_s=now_s)
            self._planner.schedule(plan, flight.plans)
            table = self.sequence_table
            # Plan again if the plan is empty because batch sequences lost their tails.
            if not (table.tails.turned and table.settle_tails(plan)) or plan:
                return plan


# Events that do not free blocks of a suspended microbatch.
_HARMLESS_EVENTS = (
    RequestArrived,
    IterationFinished,
    IterationDropped,
    IterationSuspended,
    RequeueChecked,
    DrainContinued,  # its handler discards the microbatch if needed
    CostModelLearned,
    *get_args(pin_events.PinEvent),
    *get_args(HostEvent),
)
_HANDLERS: dict[type[Any], Callable[[PlannerState, Any], list[Command]]] = {
    RequestArrived: PlannerState._arrive,
    RequestAborted: PlannerState._abort,
    IterationFinished: PlannerState._finish_iteration,
    IterationDropped: PlannerState._drop_iteration,
    IterationSuspended: PlannerState._suspend_iteration,
    RequeueChecked: PlannerState._requeue_waiting,
    DrainContinued: PlannerState._continue_drain,
    CostModelLearned: PlannerState._learn,
    BlocksBorrowed: PlannerState._lend,
    changes.StagesConfigured: PlannerState._configure,
    changes.ConfigurationEnded: PlannerState._end_configuration,
}
_HANDLERS |= {
    change: PlannerState._change
    for change in get_args(changes.ConfigurationEvent)
    if change not in (changes.StagesConfigured, changes.ConfigurationEnded)
}
_HANDLERS |= dict.fromkeys(get_args(pin_events.PinEvent), PlannerState._ship)
_HANDLERS |= dict.fromkeys(get_args(HostEvent), PlannerState._copy)
