"""What a worker runs in each iteration: continuous batching with chunked prefill.

Decodes go first, then prefills that have begun, then waiting requests in order of arrival while
blocks and token budget last. When a decode finds no free block, the newest running request is
preempted and recomputed later (policy `recompute`), so the oldest always advances.
"""

from collections import deque
from dataclasses import dataclass, field

from services.core.blocks.pool import BlockPool
from services.core.iteration.batch import Batch, IterationShape
from services.core.iteration.events import (
    Command,
    EmitToken,
    Event,
    IterationDropped,
    IterationFinished,
    Load,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
)
from services.core.iteration.plan import Plan
from services.core.iteration.runway import block_growth, certain_decodes
from services.core.iteration.sequence import Phase, Sequence
from services.core.request import FinishReason, blocks_for

QUEUE_FULL = "the worker's queue is full; retry later"


@dataclass(frozen=True, slots=True)
class IterationConfig:
    """Bounds of an iteration; `max_running` ≤ `max_batch_tokens`, so that every decode fits."""

    block_size: int
    num_blocks: int
    max_batch_tokens: int
    max_running: int
    max_waiting: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.max_batch_tokens:
            raise ValueError(
                f"max_running is {self.max_running}, but must be 1 to max_batch_tokens "
                f"({self.max_batch_tokens})"
            )


@dataclass(slots=True)
class IterationState:
    """Sequences, their blocks and the batch that runs now."""

    config: IterationConfig
    pool: BlockPool = field(init=False)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)  # oldest first, older than any waiting
    in_flight: Plan | None = None
    preemptions_total: int = 0
    _arrivals: int = 0
    _abort_after: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.config.num_blocks)

    def handle(self, event: Event) -> list[Command]:
        """Apply one event; return what the driver must tell the clients."""
        match event:
            case RequestArrived():
                return self._arrive(event)
            case RequestAborted(request_id=request_id):
                self._abort(request_id)
                return []
            case IterationFinished():
                return self._finish_iteration(event)
            case IterationDropped():
                self._drop_iteration()
                return []

    def plan(self) -> Batch | None:
        """Start the next iteration; None when there is nothing to run."""
        plan = self._decide()
        return plan.batch() if plan is not None else None

    def plan_shape(self) -> IterationShape | None:
        """As `plan`, for who needs only the sizes: a simulator; end it with `finish_filled`."""
        plan = self._decide()
        return plan.shape() if plan is not None else None

    def finish_filled(self, token_id: int) -> list[EmitToken]:
        """End the iteration as if `token_id`, which stops no request, had been sampled each time.

        Returns only the first and the last token of each request.
        """
        plan, self.in_flight = self.in_flight, None
        assert plan is not None, "no iteration is running"
        commands: list[EmitToken] = []
        aborted = self._abort_after
        for sequence in plan.decodes:
            sequence.computed = count = len(sequence.token_ids)
            if aborted and sequence.request_id in aborted:
                continue
            if sequence.prompt_tokens < count < sequence.tokens_max - 1:
                sequence.token_ids.append(token_id)
            else:
                commands.append(self._append(sequence, token_id))
        for sequence, tokens in plan.prefills:
            sequence.computed += tokens
            if sequence.remaining or (aborted and sequence.request_id in aborted):
                continue
            token = self._append(sequence, token_id)
            if token.index == 0 or token.finish_reason is not None:
                commands.append(token)
        self._end_aborted()
        return commands

    def decode_runway(self) -> int:
        """How many iterations are certain to be the same decodes if nothing arrives.

        In them nobody starts, ends, is preempted or has its first token. 0 in an iteration.
        """
        if self.in_flight is not None or self._may_admit(self.config.max_batch_tokens):
            return 0
        return certain_decodes(self.running, self.pool.free_count, self.config.block_size)

    def advance_decodes(self, count: int, token_id: int) -> None:
        """Run `count` ≤ `decode_runway()` iterations at once; each sample is `token_id`.

        The state is then as after so many of `plan` and `IterationFinished`; the commands, one
        token of each running request in each iteration, are left out. Stop tokens are not looked
        for.
        """
        for sequence in block_growth(self.running, count, self.config.block_size):
            sequence.block_ids += self.pool.allocate(1)
        filling = [token_id] * count
        for sequence in self.running:
            sequence.computed += count
            sequence.token_ids += filling

    def load(self) -> Load:
        """How busy the worker is now."""
        block_size = self.config.block_size
        return Load(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_blocks_free=self.pool.free_count,
            kv_blocks_wanted=sum(seq.blocks_to_admit(block_size) for seq in self.waiting),
            preemptions_total=self.preemptions_total,
            kv_blocks_total=self.pool.num_blocks,
        )

    def check_invariants(self) -> None:
        """Blocks, phases and queues agree; call it after every event in tests."""
        self.pool.check_invariants()
        owned = [block for seq in self.sequences.values() for block in seq.block_ids]
        assert len(owned) == len(set(owned)) == self.pool.num_blocks - self.pool.free_count
        assert all(seq.phase is Phase.WAITING and not seq.block_ids for seq in self.waiting)
        assert all(seq.phase is Phase.RUNNING for seq in self.running)
        assert len(self.sequences) == len(self.waiting) + len(self.running)
        assert len(self.running) <= self.config.max_running
        ordinals = [seq.ordinal for seq in (*self.running, *self.waiting)]
        assert ordinals == sorted(ordinals), "oldest first, and who runs is older than who waits"
        for seq in self.running:
            assert blocks_for(seq.computed, self.config.block_size) <= len(seq.block_ids)

    def _arrive(self, event: RequestArrived) -> list[Command]:
        request = event.request
        sequence = Sequence(request, self._arrivals + 1)
        capacity = self.config.num_blocks * self.config.block_size
        if request.request_id in self.sequences:
            return [RefuseRequest(request.request_id, "a request with this id is running already")]
        if sequence.tokens_max > capacity:
            message = (
                f"prompt and max_tokens make {sequence.tokens_max} tokens, but this worker holds "
                f"{capacity}; shorten them or give the worker more memory"
            )
            return [RefuseRequest(request.request_id, message)]
        if len(self.waiting) >= self.config.max_waiting:
            return [RefuseRequest(request.request_id, QUEUE_FULL, retryable=True)]
        self._arrivals += 1
        self.sequences[request.request_id] = sequence
        self.waiting.append(sequence)
        return []

    def _abort(self, request_id: str) -> None:
        """Free at once, or after the running iteration, which may still write to its blocks."""
        if request_id not in self.sequences:
            return
        if self.in_flight is not None:
            self._abort_after.add(request_id)
        else:
            self._end(self.sequences[request_id])

    def _end(self, sequence: Sequence) -> None:
        (self.running if sequence.phase is Phase.RUNNING else self.waiting).remove(sequence)
        sequence.move(Phase.ENDED)
        self.pool.release(sequence.block_ids)
        del self.sequences[sequence.request_id]

    def _finish_iteration(self, event: IterationFinished) -> list[Command]:
        plan, self.in_flight = self.in_flight, None
        assert plan is not None, "no iteration is running"
        commands: list[Command] = []
        sampled, aborted = event.sampled, self._abort_after
        for sequence, tokens in plan.work():
            sequence.computed += tokens
            if sequence.computed < len(sequence.token_ids):
                continue
            request_id = sequence.request.request_id
            if not aborted or request_id not in aborted:
                commands.append(self._append(sequence, sampled[request_id]))
        self._end_aborted()
        return commands

    def _end_aborted(self) -> None:
        for request_id in self._abort_after:
            if request_id in self.sequences:
                self._end(self.sequences[request_id])
        self._abort_after.clear()

    def _drop_iteration(self) -> None:
        """End the iteration as if it had not been planned: its K/V counts as not written."""
        assert self.in_flight is not None, "no iteration is running"
        self.in_flight = None
        self._end_aborted()

    def _append(self, sequence: Sequence, token_id: int) -> EmitToken:
        index = sequence.output_count
        sequence.token_ids.append(token_id)
        limits = sequence.request.limits
        reason = None
        if token_id in limits.stop_token_ids:
            reason = FinishReason.STOP
        elif index + 1 >= limits.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(sequence)
        return EmitToken(sequence.request_id, index, token_id, reason)

    def _decide(self) -> Plan | None:
        """Choose what runs next and take the blocks for it."""
        assert self.in_flight is None, "the previous iteration has not finished"
        plan = Plan()
        preempted = self._plan_decodes(plan.decodes)
        budget = self.config.max_batch_tokens - len(plan.decodes)
        budget = self._plan_prefills(plan.prefills, budget)
        if not preempted:
            self._admit(plan.prefills, budget)
        if not plan:
            return None
        self.in_flight = plan
        return plan

    def _plan_decodes(self, decodes: list[Sequence]) -> bool:
        """Add every decode, oldest first; returns whether somebody had to be preempted."""
        preempted = False
        block_size = self.config.block_size
        for sequence in tuple(self.running):
            tokens = len(sequence.token_ids)
            if tokens - sequence.computed != 1:
                continue
            if tokens > len(sequence.block_ids) * block_size:
                preempted = self._grow(sequence) or preempted
                if sequence.phase is not Phase.RUNNING:
                    continue
            decodes.append(sequence)
        return preempted

    def _grow(self, sequence: Sequence) -> bool:
        """Take a block for `sequence` while it runs; returns whether one had to be preempted."""
        preempted = False
        while sequence.phase is Phase.RUNNING and not self.pool.free_count:
            self._preempt(self.running[-1])
            preempted = True
        if sequence.phase is Phase.RUNNING:
            sequence.block_ids += self.pool.allocate(1)
        return preempted

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; its tokens run again when there is room."""
        self.running.remove(sequence)
        sequence.move(Phase.WAITING)
        self.pool.release(sequence.block_ids)
        sequence.block_ids = ()
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions_total += 1

    def _plan_prefills(self, prefills: list[tuple[Sequence, int]], budget: int) -> int:
        """Go on with prefills that have begun; returns the tokens left."""
        for sequence in self.running:
            remaining = len(sequence.token_ids) - sequence.computed
            if remaining > 1 and budget:
                tokens = min(remaining, budget)
                prefills.append((sequence, tokens))
                budget -= tokens
        return budget

    def _may_admit(self, budget: int) -> bool:
        """Whether the first that waits can start."""
        if not (self.waiting and budget and len(self.running) < self.config.max_running):
            return False
        return self.waiting[0].blocks_to_admit(self.config.block_size) <= self.pool.free_count

    def _admit(self, prefills: list[tuple[Sequence, int]], budget: int) -> None:
        """Start waiting sequences in order of arrival, with blocks for all they have."""
        while self._may_admit(budget):
            sequence = self.waiting.popleft()
            sequence.move(Phase.RUNNING)
            self.running.append(sequence)
            wanted = blocks_for(len(sequence.token_ids), self.config.block_size)
            sequence.block_ids = self.pool.allocate(wanted)
            tokens = min(sequence.remaining, budget)
            prefills.append((sequence, tokens))
            budget -= tokens
