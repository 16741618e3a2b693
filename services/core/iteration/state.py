"""What a worker runs in each iteration: continuous batching with chunked prefill.

Decodes go first, then prefills that have begun, then waiting requests in order of arrival while
blocks and token budget last. When a decode finds no free block, the newest running request is
preempted and recomputed later (policy `recompute`), so the oldest always advances.
"""

from collections import deque
from dataclasses import dataclass, field

from services.core.blocks.pool import BlockPool
from services.core.iteration.batch import Batch, Chunk
from services.core.iteration.events import (
    Command,
    EmitToken,
    Event,
    IterationFinished,
    Load,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
)
from services.core.iteration.sequence import Phase, Sequence
from services.core.request import FinishReason, blocks_for


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
    running: list[Sequence] = field(default_factory=list)
    in_flight: Batch | None = None
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

    def plan(self) -> Batch | None:
        """Start the next iteration; None when there is nothing to run."""
        assert self.in_flight is None, "the previous iteration has not finished"
        chunks: list[Chunk] = []
        preempted = self._plan_decodes(chunks)
        budget = self.config.max_batch_tokens - len(chunks)
        budget = self._plan_prefills(chunks, budget)
        if not preempted:
            self._admit(chunks, budget)
        if not chunks:
            return None
        self.in_flight = Batch(tuple(chunks))
        return self.in_flight

    def load(self) -> Load:
        """How busy the worker is now."""
        block_size = self.config.block_size
        return Load(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_blocks_free=self.pool.free_count,
            kv_blocks_wanted=sum(seq.blocks_to_admit(block_size) for seq in self.waiting),
            preemptions_total=self.preemptions_total,
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
        ordinals = [seq.ordinal for seq in self.waiting]
        assert ordinals == sorted(ordinals), "the queue is in order of arrival"
        for seq in self.running:
            assert blocks_for(seq.computed, self.config.block_size) <= len(seq.block_ids)

    def _arrive(self, event: RequestArrived) -> list[Command]:
        request = event.request
        tokens_max = len(request.prompt_ids) + request.limits.max_tokens
        capacity = self.config.num_blocks * self.config.block_size
        if request.request_id in self.sequences:
            return [RefuseRequest(request.request_id, "a request with this id is running already")]
        if tokens_max > capacity:
            message = (
                f"prompt and max_tokens make {tokens_max} tokens, but this worker holds "
                f"{capacity}; shorten them or give the worker more memory"
            )
            return [RefuseRequest(request.request_id, message)]
        if len(self.waiting) >= self.config.max_waiting:
            return [RefuseRequest(request.request_id, "the worker's queue is full; retry later")]
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals, list(request.prompt_ids))
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
        assert self.in_flight is not None, "no iteration is running"
        batch, self.in_flight = self.in_flight, None
        commands: list[Command] = []
        for chunk in batch.chunks:
            sequence = self.sequences[chunk.request_id]
            sequence.computed += len(chunk.token_ids)
            if chunk.sample is not None and chunk.request_id not in self._abort_after:
                commands.append(self._append(sequence, event.sampled[chunk.request_id]))
        for request_id in self._abort_after:
            if request_id in self.sequences:
                self._end(self.sequences[request_id])
        self._abort_after.clear()
        return commands

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

    def _plan_decodes(self, chunks: list[Chunk]) -> bool:
        """Add every decode, oldest first; returns whether somebody had to be preempted."""
        preempted = False
        for sequence in sorted(self.running, key=lambda seq: seq.ordinal):
            if sequence.phase is not Phase.RUNNING or sequence.remaining != 1:
                continue
            wanted = blocks_for(len(sequence.token_ids), self.config.block_size)
            while sequence.phase is Phase.RUNNING and wanted > len(sequence.block_ids):
                if self.pool.free_count:
                    sequence.block_ids += self.pool.allocate(1)
                else:
                    self._preempt(max(self.running, key=lambda seq: seq.ordinal))
                    preempted = True
            if sequence.phase is Phase.RUNNING:
                chunks.append(sequence.next_chunk(1))
        return preempted

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; its tokens run again when there is room."""
        self.running.remove(sequence)
        sequence.move(Phase.WAITING)
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions_total += 1

    def _plan_prefills(self, chunks: list[Chunk], budget: int) -> int:
        """Go on with prefills that have begun; returns the tokens left."""
        for sequence in self.running:
            tokens = min(sequence.remaining, budget)
            if sequence.remaining > 1 and tokens:
                chunks.append(sequence.next_chunk(tokens))
                budget -= tokens
        return budget

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Start waiting sequences in order of arrival, with blocks for all they have."""
        while self.waiting and budget and len(self.running) < self.config.max_running:
            sequence = self.waiting[0]
            if sequence.blocks_to_admit(self.config.block_size) > self.pool.free_count:
                return
            self.waiting.popleft()
            sequence.move(Phase.RUNNING)
            self.running.append(sequence)
            wanted = blocks_for(len(sequence.token_ids), self.config.block_size)
            sequence.block_ids = self.pool.allocate(wanted)
            tokens = min(sequence.remaining, budget)
            chunks.append(sequence.next_chunk(tokens))
            budget -= tokens
