"""The sequence table of a planner: its sequences by phase, and the allocation of their KV blocks.

The planner of a single worker, or of the *leader* (first stage) of a pipeline, uses it to admit,
preempt and end sequences. While KV moves between workers during a change of the pipeline, a
sequence may be *absent* from stages: they do not have its blocks yet, only reservations.

Later plans can reuse the blocks of a finished or preempted sequence at once, even while a
microbatch in flight still writes to them, because every stage runs microbatches in order.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from services.core.overtaking import count_overtaken, next_to_start
from services.core.planner.block_ledger import BlockLedger, Follower
from services.core.planner.block_table import StageTable
from services.core.planner.host_use import HostUse
from services.core.planner.pins import Pins
from services.core.planner.plan import Plan
from services.core.planner.prefix_cache import PrefixCache
from services.core.planner.sequence import Age, Phase, Sequence
from services.core.planner.sequence_ids import request_id_of
from services.core.planner.shared_tails import SharedTails, lacks_tail
from services.core.planner.token_meter import TokenMeter
from services.core.planner.victims import PRECEDENCES, Precedence, newest_batch
from services.core.queue_order import QueueKey, Scheduling
from services.core.request import blocks_for


@dataclass(slots=True)
class SequenceTable:
    """All sequences of a planner, with admission, preemption, suspension and hand-over.

    Online sequences are those of all classes except `batch`. The sequences of a suspended
    microbatch are in the phase `RUNNING`, but not in `running`, so that they are not planned.
    """

    block_size: int
    table: StageTable  # block tables of the leader's own stage
    prefix_caching: bool = False
    precedence: Precedence = PRECEDENCES[Scheduling.FCFS]  # queue order and choice of victims
    block_sharing: bool = False
    ledger: BlockLedger = field(init=False)  # counts of blocks at all stages
    prefixes: PrefixCache = field(init=False)  # cached prefixes at all stages
    pins: Pins = field(init=False)  # blocks of shipments and recalls
    host_use: HostUse | None = None  # None without host memory
    tails: SharedTails = field(init=False)  # blocks shared by an online and a batch sequence
    sequences: dict[str, Sequence] = field(default_factory=dict)  # all, by sequence id
    batch: dict[str, Sequence] = field(default_factory=dict)  # those of the class `batch`
    waiting: deque[Sequence] = field(default_factory=deque)  # for admission, in queue order
    running: list[Sequence] = field(default_factory=list)  # oldest first
    held: list[Sequence] = field(default_factory=list)  # not planned, oldest first
    suspended: Plan | None = None  # at most one interrupted batch-only microbatch
    released: list[str] = field(default_factory=list)  # freed since the last microbatch
    queued_total: int = 0  # number of times that a sequence entered the waiting queue
    blocks_taken_total: int = 0  # blocks that sequences took at their start or by growing
    online_blocks_taken_total: int = 0  # of these, by online sequences
    preemptions_total: int = 0  # by recomputation
    prompt_tokens_total: int = 0  # of sequences whose first output token was sampled here
    discarded_tokens_total: int = 0  # of interrupted iterations that run again
    tokens: TokenMeter = field(default_factory=TokenMeter)  # processed and recomputed tokens

    def __post_init__(self) -> None:
        self.ledger = BlockLedger(self.table.pool)
        self.prefixes = PrefixCache(self.block_size, self.table, self.ledger, self.prefix_caching)
        self.pins = Pins(self.table)
        self.tails = SharedTails(self.block_size, self.table, self.block_sharing)

    @property
    def prefill_tokens(self) -> int:
        """Tokens that prefills still have to compute."""
        sequences = chain(self.waiting, self.running, self._suspended)
        left = [len(sequence.token_ids) - sequence.computed for sequence in sequences]
        # A sequence with a single token to compute decodes.
        return sum([tokens for tokens in left if tokens > 1])

    @property
    def running_count(self) -> int:
        """Number of sequences in the phase `RUNNING`, including suspended ones."""
        return len(self.running) + len(self._suspended)

    @property
    def _suspended(self) -> list[Sequence]:
        return [] if self.suspended is None else self.suspended.sequences()

    # --- start and end

    def add(self, sequence: Sequence) -> None:
        """Add a sequence without blocks to the waiting queue."""
        self._enter(sequence)
        self._queue(sequence)

    def adopt(self, sequence: Sequence, absent: frozenset[int], held: bool) -> None:
        """Add a sequence of another leader with blocks; reserve them at the stages in `absent`.

        Raises:
            ValueError: if the blocks at this stage contradict `absent`, or if a sequence that is
                not held has absent stages.
        """
        if 0 not in absent:
            have = len(self.table.block_ids(sequence.seq_id))
            if have < sequence.blocks:
                raise ValueError(f"{sequence.seq_id} has {have} blocks here, not {sequence.blocks}")
        elif sequence.seq_id in self.table:
            raise ValueError(f"{sequence.seq_id} has blocks here already")
        if absent and not held:
            raise ValueError(f"{sequence.seq_id} cannot run without blocks at {sorted(absent)}")
        if absent:
            self._clear_pipeline_prefixes()
        sequence.absent = absent
        self.ledger.reserve(sequence.blocks, absent)
        self._enter(sequence)
        sequence.phase = Phase.HELD if held else Phase.RUNNING
        _insert(self.held if held else self.running, sequence)

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence that another leader adopted; its blocks stay until the KV has moved."""
        self._clear_pipeline_prefixes()
        self.ledger.reserve(-sequence.blocks, sequence.absent)
        self._leave(sequence)
        self._remove(sequence)

    def end(self, sequence: Sequence) -> None:
        """End a sequence and free its blocks."""
        self._leave(sequence)
        sequence.move(Phase.ENDED)
        self._drop_pin(sequence)
        self._free(sequence)
        self._remove(sequence)

    # --- blocks

    def next_to_admit(
        self, running_max: int, overtaken_max: int, online: bool | None = None
    ) -> Sequence | None:
        """The waiting sequence that may start now by the rule of `overtaking.py`; None if none may.

        If batch work yields under the policy, blocks and slots of batch sequences count as free for
        online sequences. `online` restricts the choice to online (True) or batch sequences (False).
        """
        if not self.waiting:
            return None
        full = self.running_count >= running_max
        if full and not (self._may_preempt_batch and self.online_running < running_max):
            return None
        free = self.ledger.free
        first = self.waiting[0].request.service
        # Batch work that yields does not start while an online sequence waits.
        online_waits = self.precedence.batch_yields and first.online
        yielding: int | None = None  # blocks that batch work can yield, computed on demand

        def fits(sequence: Sequence) -> bool:
            nonlocal yielding
            if sequence.sample_due or sequence.awaits_kv:
                return False  # it may start once its token in flight or its KV has arrived
            if (full or online_waits) and not sequence.online:
                return False
            missing = sequence.blocks_to_admit(self.block_size) - free
            # Without a free slot, do not count on a tail: its batch sequence may yield the slot.
            needs_fewer = self.prefixes.shares_blocks if full else self._needs_fewer_blocks
            if missing <= 0 or needs_fewer(sequence, missing):
                return True
            if not (self._may_preempt_batch and sequence.online):
                return False
            if yielding is None:
                yielding = self._blocks_to_yield
            return missing <= yielding

        queue: Iterable[Sequence] = self.waiting
        if online is not None:
            queue = [sequence for sequence in queue if sequence.online is online]
        return next_to_start(queue, fits, overtaken_max, _competes)

    @property
    def first_in_need(self) -> Sequence | None:
        """The first sequence that waits for blocks or a slot: not one whose KV is under way."""
        return next(filter(_competes, self.waiting), None)

    def admit(self, sequence: Sequence, running_max: int) -> Sequence:
        """Admit a sequence returned by `next_to_admit`, and allocate blocks for all its tokens.

        Blocks of a cached prefix are shared, and its tokens do not run again.
        """
        if self._may_preempt_batch:
            self._preempt_batch_for(sequence, running_max)
        count_overtaken(self.waiting, sequence, _competes)
        self.waiting.remove(sequence)
        sequence.move(Phase.RUNNING)
        self.prefixes.begin(sequence)
        self._drop_pin(sequence)  # only now that the sequence shares the blocks of the pin
        if self.host_use is not None:
            self.host_use.note_started(sequence)
        sequence.begun = True
        _insert(self.running, sequence)
        sequence.blocks = blocks_for(len(sequence.token_ids), self.block_size)
        self.prefixes.make_room(sequence.blocks, have=sequence.registered)
        missing = sequence.blocks - len(self.table.block_ids(sequence.seq_id))
        if self.tails.enabled and missing > self.ledger.free:
            sequence.blocks -= 1
            self.table.adopt(sequence.seq_id, sequence.blocks)
            self._count_taken(sequence, sequence.blocks - sequence.registered)
            shared = self.tails.share(sequence, self.running)
            assert shared, f"{sequence.seq_id} does not fit"
            return sequence
        self.table.adopt(sequence.seq_id, sequence.blocks)
        self.ledger.take(sequence.blocks)
        self._count_taken(sequence, sequence.blocks - sequence.registered)
        return sequence

    def grow(self, sequence: Sequence) -> bool:
        """Allocate a block for a running `sequence`; returns whether any sequence was preempted."""
        preempted = False
        # Suspended sequences can be victims only after their microbatch is discarded.
        if self.ledger.least_room <= 0:
            self.discard_suspended()
        # The victim may be the sequence itself: then it stops running and the loop ends.
        while sequence.phase is Phase.RUNNING and self.ledger.least_room <= 0:
            self._note_lost_copies()
            victims = self.precedence.victims
            victim = victims(self.running, self.held, self.ledger.full_stages)
            # Release a pin first: like a preemption it costs a recomputation at most, but delays a
            # request that does not run yet.
            if self.pins and (pin := self.pins.least(victim.online)):
                self.release_pin(pin)
                continue
            alone = self.ledger.stages == 1
            if alone and sequence.online and self.tails.share(sequence, self.running):
                return preempted
            self.preempt(victim)
            preempted = True
        if sequence.phase is Phase.RUNNING:
            self.add_block(sequence)
        return preempted

    def add_block(self, sequence: Sequence) -> None:
        """Allocate a block for a running sequence; the caller has checked that a block is free."""
        self.prefixes.make_room(1)
        self.table.append(sequence.request.request_id)
        sequence.blocks += 1
        self.ledger.take(1)
        self._count_taken(sequence, 1)

    def release_pin(self, name: str) -> None:
        """Release a pin, if it exists; a sequence that waits for its KV may start without it."""
        waiting = self.sequences.get(self.pins.release(name))
        if waiting is not None:
            waiting.pin, waiting.awaits_kv = "", False

    def fill_pin(self, name: str, hashes: tuple[bytes, ...]) -> None:
        """Note that the KV of the first blocks of a pin is complete, so its sequence may start."""
        if not hashes:
            self.release_pin(name)
            return
        waiting = self.sequences.get(self.pins.fill(name, hashes))
        if waiting is not None:
            waiting.awaits_kv = False

    def recall(self, sequence: Sequence, name: str, hashes: tuple[bytes, ...]) -> int:
        """Let a waiting sequence await the KV of its first blocks, in the pin `name`.

        The caller has checked that enough blocks are free. Returns the number of blocks that are
        cached already.
        """
        have = self.pins.allocate(name, "", sequence.online, hashes, len(hashes))
        pin = self.pins.get(name)
        assert pin is not None
        pin.seq_id, sequence.pin, sequence.awaits_kv = sequence.seq_id, name, True
        return have

    def blocks_wanted(self, sequence: Sequence) -> int:
        """Blocks that a waiting sequence needs besides those that are pinned for it."""
        pinned = len(self.table.block_ids(sequence.pin)) if sequence.pin else 0
        return max(0, sequence.blocks_to_admit(self.block_size) - pinned)

    def may_start(self, sequence: Sequence, running_max: int) -> bool:
        """Whether a waiting sequence could start now, including blocks that batch work yields.

        A suspended microbatch does not yield its blocks.
        """
        missing = sequence.blocks_to_admit(self.block_size) - self.ledger.free
        fits = missing <= 0 or self.prefixes.shares_blocks(sequence, missing)
        if fits and self.running_count < running_max:
            return True
        if not (self._may_preempt_batch and sequence.online) or self.suspended is not None:
            return False
        return self.online_running < running_max and (fits or missing <= self._blocks_to_yield)

    def make_way(self, sequence: Sequence) -> None:
        """Free blocks for a sequence that `may_start`, as its start would."""
        if self._may_preempt_batch and sequence.online:
            self._preempt_batch_for(sequence, inf)

    def await_kv(self, sequence: Sequence) -> None:
        """Let a sequence that has just arrived wait for the KV that is shipped for it, if any."""
        pin = self.pins.fill_for(request_id_of(sequence.seq_id))
        if pin is not None and not pin.seq_id:
            pin.seq_id, sequence.pin, sequence.awaits_kv = sequence.seq_id, pin.name, not pin.filled

    def settle_tails(self, plan: Plan) -> bool:
        """Take shared tails from batch sequences where the fills would meet in `plan`.

        Returns whether `plan` lost a sequence.
        """
        plan_shrank = False
        while colliding := self.tails.colliding(plan):
            if self.suspended is not None and any(map(self.suspended.includes, colliding)):
                self.discard_suspended()  # its tokens are undone, so the tails have fewer entries
                continue
            for batch in colliding:
                if batch.blocks == 1:
                    self.tails.lost_tokens_total += batch.computed
                    self.preempt(batch)  # its only block
                else:
                    self.tails.lose(batch)
                if batch in plan.decodes:
                    plan.decodes.remove(batch)
                    plan_shrank = True
        return plan_shrank

    def yield_tails(self) -> None:
        """Preempt the batch sequences with a turned tail, and those that lost a tail."""
        if not self.tails.enabled or self.ledger.stages > 1:
            return
        self.discard_suspended()
        for sequence in list(self.running):
            turned = sequence.seq_id in self.tails.turned
            if turned or lacks_tail(sequence, self.block_size):
                self.preempt(sequence)

    @property
    def blocks_for_online(self) -> int:
        """Free blocks, and blocks of batch sequences that yield; without suspended sequences."""
        yields = self._may_preempt_batch
        return self.ledger.free + (self._blocks_of_batch(self.running) if yields else 0)

    def make_room(self, blocks: int) -> None:
        """Preempt batch sequences, newest first, until `blocks` blocks are free for online KV."""
        while self.ledger.free < blocks and self._may_preempt_batch:
            if (victim := self._newest_batch()) is None:
                return
            self.preempt(victim)

    def yield_batch(self, stage: int, blocks: int) -> None:
        """Preempt batch sequences, if the policy allows, until `stage` uses at most `blocks`."""
        if self.precedence.batch_yields:
            while self.ledger.used_at(stage) > blocks and self._release_batch_pin():
                pass
            while self.ledger.used_at(stage) > blocks and (victim := self._newest_batch()):
                self.preempt(victim)

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a sequence by recomputation: free its blocks and queue it again."""
        self._leave(sequence)
        sequence.move(Phase.WAITING)
        # A microbatch in flight samples its next token: the sequence may run again after that.
        sequence.sample_due = sequence.remaining == 0
        registered = sequence.registered
        self._free(sequence)
        sequence.computed = 0
        if self.host_use is not None:
            self.host_use.note_preempted(sequence, registered)
        self._queue(sequence)
        self.preemptions_total += 1

    # --- a suspended microbatch

    def suspend(self, plan: Plan) -> None:
        """Keep an interrupted microbatch, with the blocks of its sequences, for resumption."""
        assert self.suspended is None, "one microbatch is suspended at a time"
        sequences = plan.sequences()
        if any(sequence.phase is not Phase.RUNNING for sequence in sequences):
            self._discard(plan)  # a sequence was preempted: the partial results are incomplete
            return
        for sequence in sequences:
            self.running.remove(sequence)
        self.suspended = plan

    def take_suspended(self) -> Plan | None:
        """Remove the suspended microbatch; its sequences can be planned again."""
        plan, self.suspended = self.suspended, None
        if plan is not None:
            for sequence in plan.sequences():
                _insert(self.running, sequence)
        return plan

    def discard_suspended(self) -> None:
        """Discard the suspended microbatch, if any: its tokens run again."""
        plan = self.take_suspended()
        if plan is not None:
            self._discard(plan)

    def _discard(self, plan: Plan) -> None:
        plan.discard()
        self.discarded_tokens_total += plan.tokens

    # --- hand-over to another leader, and changes of stages

    def hold(self, sequence: Sequence) -> None:
        """Hold a sequence: it keeps its blocks and is not planned."""
        self._leave(sequence)
        sequence.move(Phase.HELD)
        _insert(self.held, sequence)

    def resume(self, sequence: Sequence) -> None:
        """Resume a held sequence. Raises ValueError if a stage lacks its blocks."""
        if sequence.absent:
            raise ValueError(f"{sequence.seq_id} has no blocks at {sorted(sequence.absent)}")
        self._leave(sequence)
        if sequence.blocks:
            sequence.move(Phase.RUNNING)
            _insert(self.running, sequence)
        else:
            sequence.move(Phase.WAITING)
            self._queue(sequence)

    def place(self, sequence: Sequence, stage: int) -> bool:
        """Turn the blocks reserved for a sequence at `stage` into used ones; False without room."""
        if stage not in sequence.absent:
            return True
        if self.ledger.room(stage) < sequence.blocks:
            return False
        if stage == 0:
            self.table.adopt(sequence.seq_id, sequence.blocks)
        self.ledger.use_reserved(sequence.blocks, stage)
        sequence.absent -= {stage}
        return True

    def configure(self, followers: tuple[Follower, ...]) -> None:
        """Reset the block counts for the stages of a new configuration.

        Stages without the blocks of a sequence become its absent stages: they reserve blocks, and
        the sequence is held.
        """
        self.ledger.configure(followers)
        self.prefixes.configure()
        previous = (0, *(follower.previous_stage for follower in followers))
        for sequence in self.sequences.values():
            # The last stage, which samples, may be a different worker now.
            sequence.reset_sampler()
            if not sequence.blocks:
                continue
            sequence.absent = frozenset(
                stage
                for stage, before in enumerate(previous)
                if before is None or before in sequence.absent
            )
            self.ledger.reserve(sequence.blocks, sequence.absent)
            if sequence.absent and sequence.phase is Phase.RUNNING:
                self.hold(sequence)

    def set_capacity(self, stage: int, blocks: int) -> None:
        """Set the capacity of stage ≥ 1; clears the prefix cache everywhere if it shrinks."""
        had = self.ledger.capacity_of(stage)
        self.ledger.set_capacity(stage, blocks)
        if blocks < had:
            self.clear_prefixes()
            self.prefixes.shrinking.add(stage)
        elif blocks > had:
            self.prefixes.shrinking.discard(stage)

    def clear_prefixes(self) -> None:
        """Clear the prefix cache at all stages."""
        # The other stages cannot share the prefix of these sequences any more: start them again.
        for sequence in [seq for seq in self.sequences.values() if seq.has_unsent_hits]:
            self.preempt(sequence)
        self.prefixes.clear(self.sequences.values())

    def take_released(self) -> tuple[str, ...]:
        """Remove and return the ids of sequences freed so far; every stage must receive them."""
        if not self.released:
            return ()
        ids = tuple(self.released)
        self.released.clear()
        return ids

    def release_again(self, ids: Iterable[str]) -> None:
        """Put released ids back: some stages may not have received them."""
        self.released[:0] = ids

    def check_invariants(self) -> None:
        """Blocks, phases, queues and counts agree."""
        self.table.check_invariants()
        self.ledger.check_invariants()
        self.pins.check_invariants()
        if self.host_use is not None:
            self.host_use.check_invariants((*self.waiting, *self.held))
        self.tails.check_invariants()
        # Queues hold the right phases in the right order.
        for phase, members in (
            (Phase.WAITING, self.waiting),
            (Phase.RUNNING, self.running),
            (Phase.HELD, self.held),
        ):
            assert all(seq.phase is phase for seq in members)
            places = [self._key(s) if phase is Phase.WAITING else s.age for s in members]
            assert places == sorted(places), "not in order of age or of the queue"
        assert all(seq.phase is Phase.RUNNING for seq in self._suspended)
        known = (*self.waiting, *self.running, *self.held, *self._suspended)
        assert len(known) == len(self.sequences)
        assert all(self.sequences[seq.seq_id] is seq for seq in known)
        batch = {seq.seq_id for seq in known if not seq.request.service.online}
        assert self.batch.keys() == batch
        # Blocks and reservations of the sequences add up to those of table and ledger.
        reserved = [0] * self.ledger.stages
        for seq in known:
            own = len(self.table.block_ids(seq.seq_id))
            # After `SequenceReset`, a held sequence without blocks may still be in the table.
            if seq.blocks or seq.phase is not Phase.HELD:
                assert own == (0 if 0 in seq.absent else seq.blocks)
            assert blocks_for(seq.computed, self.block_size) <= seq.blocks
            for stage in seq.absent:
                reserved[stage] += seq.blocks
        assert reserved == self.ledger.reserved
        assert not any(seq.blocks or seq.computed for seq in self.waiting)
        running = (*self.running, *self._suspended)
        assert all(seq.blocks and not seq.absent for seq in running)

    @property
    def _may_preempt_batch(self) -> bool:
        """Whether the start of an online sequence may preempt batch sequences."""
        precedence = self.precedence
        alone = self.ledger.stages == 1
        return precedence.batch_yields and (alone or precedence.yields_in_pipelines)

    @property
    def online_running(self) -> int:
        """Number of running online sequences, including suspended ones."""
        return sum(seq.online for seq in (*self.running, *self._suspended))

    @property
    def _blocks_to_yield(self) -> int:
        """Lower bound of the blocks that batch work could free.

        These are the blocks of running batch sequences and of pins for waiting batch sequences.
        """
        users, tables = self.table.pool.users, self.table.tables
        pinned = sum(
            users[block] == 1 and block < self.table.pool.usable
            for name in self.pins.batch_names
            for block in tables[name]
        )
        return self._blocks_of_batch((*self.running, *self._suspended)) + pinned

    def _blocks_of_batch(self, sequences: Iterable[Sequence]) -> int:
        """Lower bound of the blocks that only the batch sequences among `sequences` use."""
        pool, tables = self.table.pool, self.table.tables
        users, usable = pool.users, pool.usable
        # Shared blocks may stay in use, and ids above the limit of a shrinking pool are withheld.
        return sum(
            sum([users[block] == 1 and block < usable for block in tables[seq.seq_id]])
            for seq in sequences
            if not seq.online
        )

    def _preempt_batch_for(self, sequence: Sequence, running_max: float) -> None:
        """Preempt batch sequences, newest first, until `sequence` has a slot and blocks."""

        def lacks_blocks() -> bool:
            missing = sequence.blocks_to_admit(self.block_size) - self.ledger.free
            return missing > 0 and not self._needs_fewer_blocks(sequence, missing)

        # Pins of waiting batch sequences go first, before any running sequence is preempted.
        while lacks_blocks() and self._release_batch_pin():
            pass
        if self.running_count >= running_max or lacks_blocks():
            self.discard_suspended()
        while len(self.running) >= running_max or lacks_blocks():
            victim = self._newest_batch()
            assert victim is not None, f"{sequence.seq_id} does not fit"
            self.preempt(victim)

    def _newest_batch(self) -> Sequence | None:
        self._note_lost_copies()
        return newest_batch(self.running)

    def _note_lost_copies(self) -> None:
        """Update which sequences have copies, on which the choice of a victim depends."""
        if self.host_use is not None:
            self.host_use.note_lost(self.running)

    def _needs_fewer_blocks(self, sequence: Sequence, missing: int) -> bool:
        """Whether a waiting sequence can start although `missing` blocks are not free."""
        if self.prefixes.shares_blocks(sequence, missing):
            return True
        return self.tails.enabled and missing <= self._blocks_in_tails(sequence)

    def _blocks_in_tails(self, sequence: Sequence) -> int:
        """Number of last blocks that a waiting sequence can replace by a batch sequence's tail."""
        if not sequence.online or self.ledger.stages > 1:
            return 0
        size, tokens = self.block_size, len(sequence.token_ids)
        blocks = blocks_for(tokens, size)
        spare = sequence.blocks_to_admit(size) - blocks
        # A tail can replace the spare block, and its last block, too, if that fits into the tail.
        room = self.tails.most_room(self.running)
        if tokens % size and room >= tokens % size:
            return spare + 1
        return spare if room else 0

    def _free(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence at all stages, and queue its id for them."""
        sequence.reset_sampler()
        if self.tails.turned:
            self.tails.leave(sequence)
        if sequence.blocks:
            if self.host_use is not None:
                self.host_use.note_freed(sequence)
            self.table.release(sequence.seq_id)
            self.ledger.release(sequence.blocks, sequence.absent)
            self.released.append(sequence.seq_id)
            sequence.blocks = sequence.registered = sequence.hit_blocks = 0
            sequence.absent = frozenset()

    def _count_taken(self, sequence: Sequence, blocks: int) -> None:
        self.blocks_taken_total += blocks
        if sequence.online:
            self.online_blocks_taken_total += blocks

    def _release_batch_pin(self) -> bool:
        """Release a pin of a batch sequence; False if none would free a block."""
        name = self.pins.least(online=False) if self.pins else ""
        if name:
            self.release_pin(name)
        return bool(name)

    def _drop_pin(self, sequence: Sequence) -> None:
        if sequence.pin:
            self.release_pin(sequence.pin)

    def _clear_pipeline_prefixes(self) -> None:
        """Clear the prefix cache of a pipeline, because blocks change outside of microbatches.

        Cache updates travel with microbatches only, so the caches of the stages would diverge.
        """
        if self.ledger.stages > 1:
            self.clear_prefixes()

    def _enter(self, sequence: Sequence) -> None:
        self.sequences[sequence.seq_id] = sequence
        self.tokens.note_entered(sequence)
        if not sequence.request.service.online:
            self.batch[sequence.seq_id] = sequence

    def _remove(self, sequence: Sequence) -> None:
        self.tokens.note_left(sequence)
        if self.host_use is not None:
            self.host_use.note_left(sequence)
        del self.sequences[sequence.seq_id]
        self.batch.pop(sequence.seq_id, None)

    def _leave(self, sequence: Sequence) -> None:
        match sequence.phase:
            case Phase.RUNNING:
                self.running.remove(sequence)
            case Phase.HELD:
                self.held.remove(sequence)
            case _:
                self.waiting.remove(sequence)

    def _queue(self, sequence: Sequence) -> None:
        """Insert into the waiting queue in order."""
        # No bisection: nearly all sequences belong at the end (arrivals) or near the front
        # (preempted sequences).
        self.queued_total += 1
        waiting = self.waiting
        if not waiting:
            waiting.append(sequence)
            return
        key = self._key(sequence)
        if self._key(waiting[-1]) < key:
            waiting.append(sequence)
            return
        place = 0
        while self._key(waiting[place]) < key:
            place += 1
        waiting.insert(place, sequence)

    def _key(self, sequence: Sequence) -> tuple[QueueKey, Age]:
        """Key in the waiting queue; ties are broken by age."""
        request, arrival_s = sequence.request, sequence.arrival_s
        if self.precedence.by_gateway_arrival:
            arrival_s -= request.waited_s
        return self.precedence.queue_order(request.service, arrival_s), sequence.age


def _insert(row: list[Sequence], sequence: Sequence) -> None:
    """Insert by age."""
    if not row or row[-1].age < sequence.age:
        row.append(sequence)
    else:
        insort(row, sequence, key=_age)


def _competes(sequence: Sequence) -> bool:
    """Whether a waiting sequence holds back those behind it; not while its KV is on its way."""
    return not sequence.awaits_kv


def _age(sequence: Sequence) -> Age:
    return sequence.age
