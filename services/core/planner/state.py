"""The planner of a worker: continuous batching with chunked prefill.

Orca forms a new batch in each iteration; Sarathi runs prompts in chunks beside decode steps.

`alone.py` plans the iterations of a group of one. The leader of a group of S > 1 keeps S
microbatches in flight, one per stage; `round.py` plans them. The stages run microbatches in order,
so the next chunk of a prompt may follow the one in flight. A sequence whose next token is being
sampled waits for that token.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from services.core.logprobs import LogprobRows
from services.core.planner.batch import Batch, IterationShape, Microbatch, SampleNotes
from services.core.planner.block_ledger import Follower
from services.core.planner.block_pool import BlockPool
from services.core.planner.block_table import StageTable
from services.core.planner.config import IterationConfig
from services.core.planner.events import (
    Command,
    EmitToken,
    Event,
    IterationDropped,
    IterationFinished,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
    WaitLooked,
)
from services.core.planner.fast_forward import block_growth, certain_decodes
from services.core.planner.pipeline import PipelinePlanner
from services.core.planner.plan import Plan
from services.core.planner.refusal import known_already, queue_full, returned, too_large
from services.core.planner.returns import Returns
from services.core.planner.sequence import Phase, Sequence, SequenceState
from services.core.planner.sequence_table import SequenceTable
from services.core.planner.single import SinglePlanner
from services.core.report import Load
from services.core.request import Request

_EVERYWHERE: frozenset[int] = frozenset()


@dataclass(slots=True)
class IterationState:
    """Sequences, their blocks and the microbatches that run now.

    `table` is the worker's own, which outlives this state's configurations.
    """

    config: IterationConfig
    table: StageTable = field(init=False)
    roster: SequenceTable = field(init=False)
    in_flight: deque[Plan] = field(default_factory=deque)  # oldest first
    _planner: SinglePlanner | PipelinePlanner = field(init=False)
    _number: int = 0
    _arrivals: int = 0
    _newest_s: float = float("-inf")
    _unheard: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _returns: Returns = field(default_factory=Returns)

    def __post_init__(self) -> None:
        self.table = self._new_table()
        self.roster = SequenceTable(self.config.block_size, self.table)
        self._planner = SinglePlanner(self.config, self.roster)

    def _new_table(self) -> StageTable:
        """Of this worker's blocks."""
        return StageTable(BlockPool(self.config.num_blocks))

    @property
    def pool(self) -> BlockPool:
        """The worker's blocks."""
        return self.table.pool

    @property
    def sequences(self) -> dict[str, Sequence]:
        """All sequences by request id."""
        return self.roster.sequences

    @property
    def running(self) -> list[Sequence]:
        """Running sequences, oldest first."""
        return self.roster.running

    @property
    def waiting(self) -> deque[Sequence]:
        """Sequences that wait for blocks, oldest first."""
        return self.roster.waiting

    @property
    def held(self) -> list[Sequence]:
        """Sequences that have blocks and are not planned, oldest first."""
        return self.roster.held

    @property
    def preemptions_total(self) -> int:
        """How often a sequence lost its blocks."""
        return self.roster.preemptions_total

    @property
    def stages(self) -> int:
        """Stages of the group, which is also how many microbatches may be in flight."""
        return self.roster.ledger.stages

    @property
    def has_slot(self) -> bool:
        """Whether another microbatch may be planned now."""
        return len(self.in_flight) < self.stages

    # --- events

    def handle(self, event: Event) -> list[Command]:
        """Apply one event; return what the driver must tell the clients."""
        match event:
            case RequestArrived(request=request):
                return self._arrive(request, event.now_s)
            case RequestAborted(request_id=request_id):
                if request_id in self.sequences:
                    self.roster.end(self.sequences[request_id])
                return []
            case IterationFinished():
                return self._finish_iteration(event)
            case WaitLooked():
                return self._return_waiting(event.now_s)
            case IterationDropped():
                assert self.stages == 1, "a pipeline's microbatches are discarded together"
                assert self.in_flight, "no iteration is running"
                self.discard_in_flight()
                return []

    def load(self) -> Load:
        """How busy the worker is now."""
        block_size = self.config.block_size
        return Load(
            running=len(self.running) + len(self.held),
            waiting=len(self.waiting),
            kv_blocks_free=max(0, self.roster.ledger.free),
            kv_blocks_wanted=sum(seq.blocks_to_admit(block_size) for seq in self.waiting),
            preemptions_total=self.preemptions_total,
            kv_blocks_total=self.roster.ledger.least_capacity,
            prompt_tokens_total=self.roster.prompt_tokens_total,
        )

    def check_invariants(self) -> None:
        """Blocks, phases and queues agree; call it after every event in tests."""
        self.roster.check_invariants()
        assert len(self.in_flight) <= self.stages
        numbers = [plan.number for plan in self.in_flight]
        assert numbers == list(range(self._number - len(numbers) + 1, self._number + 1))
        assert set(self._unheard) <= set(numbers)
        for plan in self.in_flight:
            names = [seq.request_id for seq in plan.decodes]
            names += [prefill.sequence.request_id for prefill in plan.prefills]
            assert len(names) == len(set(names)), "a request runs twice in a microbatch"
        for seq in self.running:
            assert seq.remaining >= 0 and (seq.remaining or self.in_flight)
        decoding = [seq for plan in self.in_flight for seq in plan.decodes]
        assert len(decoding) == len({id(seq) for seq in decoding}), "it decodes twice in flight"

    # --- planning

    def plan(self) -> Microbatch | None:
        """Start the next microbatch; None when there is nothing to run.

        In a pipeline, an empty one is planned when there is nothing to run, but blocks to release
        at the stages.
        """
        plan = self._decide()
        if plan:
            batch = plan.batch(self.table)
        elif self.stages > 1 and self.roster.released and not self.in_flight:
            batch = Batch(())
        else:
            return None
        self._launch(plan)
        released = self.roster.take_released()
        if released:
            self._unheard[plan.number] = released
        return Microbatch(plan.number, batch, released)

    def plan_shape(self) -> IterationShape | None:
        """As `plan` of a group of one, for a simulator, which needs only the sizes.

        End it with `finish_filled`.
        """
        assert self.stages == 1, "a pipeline is planned with plan()"
        plan = self._decide()
        if not plan:
            return None
        shape = plan.shape()
        self._launch(plan)
        self.roster.take_released()
        return shape

    def finish_filled(self, token_id: int, number: int | None = None) -> list[EmitToken]:
        """End an iteration as if `token_id`, which stops no request, had been sampled each time.

        `number` as in `IterationFinished`. Returns only the first and the last token of each
        request.
        """
        plan = self._next_result(number)
        if plan is None:
            return []
        commands: list[EmitToken] = []
        for sequence in plan.decodes:
            if sequence.phase is Phase.ENDED:
                continue
            if sequence.prompt_tokens < len(sequence.token_ids) < sequence.tokens_max - 1:
                sequence.token_ids.append(token_id)
                sequence.sample_due = False
            else:
                commands.append(self._append(sequence, token_id))
        for sequence, _, _, samples in plan.prefills:
            if not samples or sequence.phase is Phase.ENDED:
                continue
            token = self._append(sequence, token_id)
            if token.index == 0 or token.finish_reason is not None:
                commands.append(token)
        return commands

    def decode_runway(self) -> int:
        """How many iterations are certain to be the same decodes if nothing arrives.

        In them no sequence starts, ends, is preempted or has its first token. 0 in an iteration.
        """
        roster = self.roster
        if self.in_flight or self.stages > 1:
            return 0
        config = self.config
        if roster.next_to_admit(config.max_running, config.overtaken_max) is not None:
            return 0
        return certain_decodes(self.running, self.pool.free_count, self.config.block_size)

    def advance_decodes(self, count: int, token_id: int) -> None:
        """Run `count` ≤ `decode_runway()` iterations at once; each sample is `token_id`.

        The state is then as after so many of `plan` and `IterationFinished`; the commands, one
        token of each running request in each iteration, are left out. Stop tokens are not looked
        for.
        """
        for sequence in block_growth(self.running, count, self.config.block_size):
            self.roster.add_block(sequence)
        filling = [token_id] * count
        for sequence in self.running:
            sequence.computed += count
            sequence.token_ids += filling

    # --- configurations and hand-over

    def end_configuration(self) -> tuple[str, ...]:
        """End a configuration, before `configure`; nothing is in flight.

        Blocks of sequences of which nothing has run are free: only this leader knows of them.
        Returns the requests whose blocks the stages of this configuration have to free. From here
        on `table` says how many own blocks are in use, and another leader may be told.
        """
        assert not self.in_flight, "drain or discard the microbatches in flight first"
        for sequence in tuple(self.sequences.values()):
            if sequence.blocks and not sequence.computed:
                self.preempt(sequence.request_id)
        return self.take_released()

    def configure(self, followers: tuple[Follower, ...] = ()) -> None:
        """Lead a group of these stages after its own from now on; nothing is in flight.

        Hand what `end_configuration` returns to the stages of the old configuration first. A
        sequence without blocks at one of the new stages is held until it was `place`d there and is
        resumed.
        """
        assert not self.in_flight, "drain or discard the microbatches in flight first"
        assert not self.roster.released, "the stages that are left have not heard of these"
        self.roster.configure(followers)
        if self.stages > 1:
            self._planner = PipelinePlanner(self.config, self.roster, self.stages)
        else:
            self._planner = SinglePlanner(self.config, self.roster)

    def set_capacity(self, stage: int, blocks: int) -> None:
        """Stage `stage` ≥ 1 has `blocks` blocks for what is planned from now on."""
        self.roster.ledger.set_capacity(stage, blocks)

    def credit(self, stage: int, blocks: int) -> None:
        """Stage `stage` ≥ 1 has freed so many blocks of sequences that are not in this state."""
        self.roster.ledger.credit(stage, blocks)

    def take_released(self) -> tuple[str, ...]:
        """Requests whose blocks were freed since the last microbatch; the next omits them."""
        return self.roster.take_released()

    def discard_in_flight(self) -> None:
        """Give up all microbatches in flight: their positions run again, results are ignored."""
        while self.in_flight:
            plan = self.in_flight.pop()
            plan.discard()
            self.roster.release_again(self._unheard.pop(plan.number, ()))

    def export(self, request_id: str) -> SequenceState:
        """What another leader needs to go on with a sequence, none of which is in flight.

        Does not modify the state: hold the sequence before, `forget` it when it was adopted.
        """
        sequence = self.sequences[request_id]
        if any(plan.includes(sequence) for plan in self.in_flight):
            raise ValueError(f"{request_id} is in a microbatch in flight")
        return sequence.state()

    def forget(self, request_id: str) -> None:
        """Drop a sequence that another leader has adopted.

        Its blocks stay in `table` and in use at other stages until its K/V is moved and freed.
        """
        self.roster.forget(self.sequences[request_id])

    def adopt(
        self,
        state: SequenceState,
        absent: frozenset[int] = _EVERYWHERE,
        held: bool = True,
    ) -> list[Command]:
        """Go on with another leader's sequence, in its place by age; a repetition changes nothing.

        At the stages in `absent` it has no blocks yet: they are promised to it, see `place`; at
        the others it has them, and `table` or the stage's count of used blocks includes them.
        A sequence without blocks waits like any other. Raises ValueError if the own blocks are
        missing, or if a sequence with an absent stage is to run at once.
        """
        sequence = Sequence.restore(state)
        if state.request.request_id in self.sequences:
            return []
        if refusal := too_large(sequence, self.config):
            return [refusal]
        if sequence.blocks:
            self.roster.adopt(sequence, absent, held)
        else:
            self.roster.add(sequence)
        return []

    def hold(self, request_id: str) -> None:
        """Keep the blocks of a sequence, plan it no more; no effect if it is held."""
        sequence = self.sequences[request_id]
        if sequence.phase is not Phase.HELD:
            self.roster.hold(sequence)

    def resume(self, request_id: str) -> None:
        """Go on with a held sequence; no effect on others, which a preemption has resumed.

        Raises ValueError if it lacks blocks at a stage.
        """
        sequence = self.sequences[request_id]
        if sequence.phase is Phase.HELD:
            self.roster.resume(sequence)

    def preempt(self, request_id: str) -> None:
        """Give up the K/V of a sequence, held or running: it is computed again."""
        sequence = self.sequences[request_id]
        if sequence.blocks:
            self.roster.preempt(sequence)

    def start_over(self, request_id: str) -> None:
        """Hold a sequence without its K/V, which is to be freed where it is.

        Its blocks stay in `table` and in use at other stages until those stages report them free.
        Unlike `preempt`, this is for a sequence whose stages may not be those of this state.
        """
        state = self.export(request_id)
        self.forget(request_id)
        self.adopt(replace(state, computed=0, blocks=0))
        self.hold(request_id)

    def place(self, request_id: str, stage: int) -> bool:
        """Take the blocks promised to a sequence at `stage`; False if there is no room yet.

        At the own stage they are in `table` then, and free to be written when what was planned
        before has run. Another stage's table has to adopt as many, in sequence: after all that
        was planned and the names of `take_released` have passed it.
        """
        return self.roster.place(self.sequences[request_id], stage)

    # --- how it is done

    @property
    def return_due_s(self) -> float | None:
        """From when `WaitLooked` gives requests back; None if there is none, or one can start."""
        due_s, config = self._returns.due_s(self.sequences), self.config
        if due_s is None:
            return None
        running_max = config.max_running * self.stages
        can_start = self.roster.next_to_admit(running_max, config.overtaken_max) is not None
        return None if can_start else due_s

    def _return_waiting(self, now_s: float) -> list[Command]:
        """Give back the requests that have waited here for long without having begun."""
        found = self._returns.take(self.sequences, now_s)
        for sequence in found:
            self.roster.end(sequence)
        return [returned(sequence) for sequence in found]

    def _arrive(self, request: Request, now_s: float) -> list[Command]:
        # Not older than the request before it, so that times of several gateways keep the order.
        arrival_s = max(request.arrival_s, self._newest_s)
        sequence = Sequence(request, self._arrivals + 1, arrival_s)
        if request.request_id in self.sequences:
            return [known_already(sequence.request_id)]
        if refusal := too_large(sequence, self.config):
            return [refusal]
        if len(self.waiting) >= self.config.max_waiting:
            return [queue_full(sequence)]
        self._arrivals += 1
        self._newest_s = arrival_s
        self.roster.add(sequence)
        self._returns.note(sequence, now_s)
        return []

    def _next_result(self, number: int | None) -> Plan | None:
        """The oldest plan in flight, whose result is here; None if that plan was discarded."""
        if number is not None and (not self.in_flight or number < self.in_flight[0].number):
            assert number <= self._number, f"microbatch {number} was never planned"
            return None
        assert self.in_flight, "no iteration is running"
        plan = self.in_flight.popleft()
        assert number in (None, plan.number), f"result {number} before that of {plan.number}"
        self._unheard.pop(plan.number, None)
        return plan

    def _finish_iteration(self, event: IterationFinished) -> list[Command]:
        plan = self._next_result(event.number)
        if plan is None:
            return []
        samplers = plan.decodes + [one.sequence for one in plan.prefills if one.samples]
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
                self.roster.end(sequence)
                commands.append(RefuseRequest(request_id, reason))
            else:
                rows = notes.logprobs.get(request_id)
                commands.append(self._append(sequence, sampled[request_id], rows))
        return commands

    def _append(
        self, sequence: Sequence, token_id: int, logprobs: LogprobRows | None = None
    ) -> EmitToken:
        index = sequence.output_count
        prompt_logprobs = None
        if index == 0:
            self.roster.prompt_tokens_total += sequence.prompt_tokens
            prompt_logprobs = sequence.prompt_logprobs
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
        reason = sequence.append(token_id)
        if reason is not None:
            self.roster.end(sequence)
        return EmitToken(sequence.request_id, index, token_id, reason, logprobs, prompt_logprobs)

    def _decide(self) -> Plan:
        """Choose what runs next and take the blocks for it."""
        assert self.has_slot, "no microbatch has finished"
        plan = Plan(self._number + 1)
        self._planner.fill(plan, self.in_flight)
        return plan

    def _launch(self, plan: Plan) -> None:
        plan.launch()
        self._number = plan.number
        self.in_flight.append(plan)
