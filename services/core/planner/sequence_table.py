"""The sequence table of a leader: its sequences by phase, and the blocks that they own.

Blocks of a finished or preempted sequence can be used at once by later plans, even while a
microbatch in flight still writes to them: every stage runs microbatches in order.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from services.core.line_order import LineKey, Scheduling
from services.core.overtaking import next_to_start, start
from services.core.planner.block_ledger import BlockLedger, Follower
from services.core.planner.block_table import StageTable
from services.core.planner.plan import Plan
from services.core.planner.prefix_cache import PrefixCache
from services.core.planner.sequence import Age, Phase, Sequence
from services.core.planner.token_meter import TokenMeter
from services.core.planner.victims import PRECEDENCES, Precedence, newest_batch
from services.core.request import blocks_for


@dataclass(slots=True)
class SequenceTable:
    """Sequences that run or are held, oldest first, and those that wait, in the order of `line`.

    `table` has the own stage's blocks, and `prefixes` finds those that can be shared if
    `prefix_caching`. `precedence` is the order of the line and of those that give blocks up.
    The sequences of a `suspended` microbatch are in the phase `RUNNING`, but not in `running`:
    nobody plans them.
    """

    block_size: int
    table: StageTable
    prefix_caching: bool = False
    precedence: Precedence = PRECEDENCES[Scheduling.FCFS]
    ledger: BlockLedger = field(init=False)
    prefixes: PrefixCache = field(init=False)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    batch: dict[str, Sequence] = field(default_factory=dict)  # those of the class `batch`
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)
    suspended: Plan | None = None
    released: list[str] = field(default_factory=list)  # since the last microbatch
    preemptions_total: int = 0
    prompt_tokens_total: int = 0
    discarded_tokens_total: int = 0  # of iterations that were interrupted
    tokens: TokenMeter = field(default_factory=TokenMeter)

    def __post_init__(self) -> None:
        self.ledger = BlockLedger(self.table.pool)
        self.prefixes = PrefixCache(self.block_size, self.table, self.ledger, self.prefix_caching)

    @property
    def prefill_tokens(self) -> int:
        """Tokens to run of sequences that do not decode; those that decode have one at most."""
        everybody = chain(self.waiting, self.running, self._suspended)
        left = [len(sequence.token_ids) - sequence.computed for sequence in everybody]
        return sum([tokens for tokens in left if tokens > 1])

    @property
    def running_count(self) -> int:
        """Sequences in the phase `RUNNING`."""
        return len(self.running) + len(self._suspended)

    @property
    def _suspended(self) -> list[Sequence]:
        return [] if self.suspended is None else self.suspended.sequences()

    # --- beginning and end

    def add(self, sequence: Sequence) -> None:
        """Take a sequence without blocks in: it waits at its place in the line."""
        self._enter(sequence)
        self._queue(sequence)

    def adopt(self, sequence: Sequence, absent: frozenset[int], held: bool) -> None:
        """Take a sequence with blocks in; those at the stages in `absent` are promised."""
        if 0 not in absent:
            have = len(self.table.block_ids(sequence.request_id))
            if have < sequence.blocks:
                raise ValueError(
                    f"{sequence.request_id} has {have} blocks here, not {sequence.blocks}"
                )
        elif sequence.request_id in self.table:
            raise ValueError(f"{sequence.request_id} has blocks here already")
        if absent and not held:
            raise ValueError(f"{sequence.request_id} cannot run without blocks at {sorted(absent)}")
        if absent:
            self._forget_prefixes_of_stages()
        sequence.absent = absent
        self.ledger.reserve(sequence.blocks, absent)
        self._enter(sequence)
        sequence.phase = Phase.HELD if held else Phase.RUNNING
        _insert(self.held if held else self.running, sequence)

    def forget(self, sequence: Sequence) -> None:
        """Leave a sequence to another leader: its blocks stay where they are, and in use."""
        self._forget_prefixes_of_stages()
        self.ledger.reserve(-sequence.blocks, sequence.absent)
        self._leave(sequence)
        self._remove(sequence)

    def end(self, sequence: Sequence) -> None:
        """Let a sequence go, with its blocks."""
        self._leave(sequence)
        sequence.move(Phase.ENDED)
        self._free(sequence)
        self._remove(sequence)

    # --- blocks

    def next_to_admit(
        self, running_max: int, overtaken_max: int, online: bool | None = None
    ) -> Sequence | None:
        """The waiting sequence that can start now by the rule of `overtaking`, or None.

        Batch sequences make way for an online one, see `precedence`. While one waits, no batch
        sequence starts. With `online`, only such ones or only the others are looked at.
        """
        if not self.waiting:
            return None
        full = self.running_count >= running_max
        if full and not (self._makes_way and self._online_running < running_max):
            return None
        free = self.ledger.free
        first = self.waiting[0].request.service
        holds_back = self.precedence.batch_yields and first.online
        yielding: int | None = None  # counted once, if it matters

        def fits(sequence: Sequence) -> bool:
            nonlocal yielding
            if sequence.sample_due:
                return False
            if (full or holds_back) and not sequence.online:
                return False
            missing = sequence.blocks_to_admit(self.block_size) - free
            if missing <= 0 or self.prefixes.shares_blocks(sequence, missing):
                return True
            if not (self._makes_way and sequence.online):
                return False
            if yielding is None:
                yielding = self._blocks_to_yield
            return missing <= yielding

        line: Iterable[Sequence] = self.waiting
        if online is not None:
            line = [one for one in line if one.online is online]
        return next_to_start(line, fits, overtaken_max)

    def admit(self, sequence: Sequence, running_max: int) -> Sequence:
        """Start a sequence that `next_to_admit` has found, with blocks for all its tokens.

        Those of a known prefix are shared, and its tokens do not run again.
        """
        if self._makes_way:
            self._make_way(sequence, running_max)
        start(self.waiting, sequence)
        self.waiting.remove(sequence)
        sequence.move(Phase.RUNNING)
        self.prefixes.begin(sequence)
        sequence.begun = True
        _insert(self.running, sequence)
        sequence.blocks = blocks_for(len(sequence.token_ids), self.block_size)
        self.prefixes.make_room(sequence.blocks, have=sequence.registered)
        self.table.adopt(sequence.request_id, sequence.blocks)
        self.ledger.take(sequence.blocks)
        return sequence

    def grow(self, sequence: Sequence) -> bool:
        """Take a block for a running `sequence`; returns whether another one was preempted."""
        preempted = False
        if self.ledger.least_room <= 0:
            self.discard_suspended()
        while sequence.phase is Phase.RUNNING and self.ledger.least_room <= 0:
            victims = self.precedence.victims
            self.preempt(victims(self.running, self.held, self.ledger.full_stages))
            preempted = True
        if sequence.phase is Phase.RUNNING:
            self.add_block(sequence)
        return preempted

    def add_block(self, sequence: Sequence) -> None:
        """Give a running sequence one more block; there is room."""
        self.prefixes.make_room(1)
        self.table.append(sequence.request.request_id)
        sequence.blocks += 1
        self.ledger.take(1)

    def yield_batch(self, stage: int, blocks: int) -> None:
        """Have batch sequences give blocks back until `stage` uses no more than `blocks`."""
        if self.precedence.batch_yields:
            while self.ledger.used_at(stage) > blocks and (one := newest_batch(self.running)):
                self.preempt(one)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; its tokens run again when there is room."""
        self._leave(sequence)
        sequence.move(Phase.WAITING)
        sequence.sample_due = sequence.remaining == 0
        self._free(sequence)
        sequence.computed = 0
        self._queue(sequence)
        self.preemptions_total += 1

    # --- a suspended microbatch

    def suspend(self, plan: Plan) -> None:
        """Set an interrupted microbatch aside, with the blocks of its sequences."""
        assert self.suspended is None, "one microbatch is suspended at a time"
        sequences = plan.sequences()
        if any(sequence.phase is not Phase.RUNNING for sequence in sequences):
            self._discard(plan)  # its blocks are not all its own any more
            return
        for sequence in sequences:
            self.running.remove(sequence)
        self.suspended = plan

    def take_suspended(self) -> Plan | None:
        """Its sequences run again, from where they were."""
        plan, self.suspended = self.suspended, None
        if plan is not None:
            for sequence in plan.sequences():
                _insert(self.running, sequence)
        return plan

    def discard_suspended(self) -> None:
        """Give the suspended microbatch up, if there is one: its tokens run again."""
        plan = self.take_suspended()
        if plan is not None:
            self._discard(plan)

    def _discard(self, plan: Plan) -> None:
        plan.discard()
        self.discarded_tokens_total += plan.tokens

    # --- hand-over

    def hold(self, sequence: Sequence) -> None:
        """Hold a sequence: it keeps its blocks and is not planned."""
        self._leave(sequence)
        sequence.move(Phase.HELD)
        _insert(self.held, sequence)

    def resume(self, sequence: Sequence) -> None:
        """Go on with a held sequence, which has its blocks at every stage."""
        if sequence.absent:
            raise ValueError(f"{sequence.request_id} has no blocks at {sorted(sequence.absent)}")
        self._leave(sequence)
        if sequence.blocks:
            sequence.move(Phase.RUNNING)
            _insert(self.running, sequence)
        else:
            sequence.move(Phase.WAITING)
            self._queue(sequence)

    def place(self, sequence: Sequence, stage: int) -> bool:
        """Turn the promise of its blocks at `stage` into use; False if there is no room yet."""
        if stage not in sequence.absent:
            return True
        if self.ledger.room(stage) < sequence.blocks:
            return False
        if stage == 0:
            self.table.adopt(sequence.request_id, sequence.blocks)
        self.ledger.use_reserved(sequence.blocks, stage)
        sequence.absent -= {stage}
        return True

    def configure(self, followers: tuple[Follower, ...]) -> None:
        """Count anew for these stages. A sequence without blocks at one is held and promised them.

        The last stage may be another one now; its sampler knows no sequence yet.
        """
        self.ledger.configure(followers)
        self.prefixes.configure()
        was = (0, *(follower.previous_stage for follower in followers))
        for sequence in self.sequences.values():
            sequence.reset_sampler()
            if not sequence.blocks:
                continue
            sequence.absent = frozenset(
                stage
                for stage, before in enumerate(was)
                if before is None or before in sequence.absent
            )
            self.ledger.reserve(sequence.blocks, sequence.absent)
            if sequence.absent and sequence.phase is Phase.RUNNING:
                self.hold(sequence)

    def set_capacity(self, stage: int, blocks: int) -> None:
        """Stage `stage` ≥ 1 has `blocks` blocks; one that has fewer forgets prefixes by itself."""
        had = self.ledger.capacity_of(stage)
        self.ledger.set_capacity(stage, blocks)
        if blocks < had:
            self.drop_prefixes()
            self.prefixes.shrinking.add(stage)
        elif blocks > had:
            self.prefixes.shrinking.discard(stage)

    def drop_prefixes(self) -> None:
        """Forget all prefixes. A sequence that no stage knows with its prefix starts again."""
        for sequence in [one for one in self.sequences.values() if one.has_unsent_hits]:
            self.preempt(sequence)
        self.prefixes.drop(self.sequences.values())

    def take_released(self) -> tuple[str, ...]:
        """Requests whose blocks were freed since the last call; every stage has to learn them."""
        if not self.released:
            return ()
        names = tuple(self.released)
        self.released.clear()
        return names

    def release_again(self, names: Iterable[str]) -> None:
        """Some stages may not have heard of these."""
        self.released[:0] = names

    def check_invariants(self) -> None:
        """Blocks, phases, queues and counts agree."""
        self.table.check_invariants()
        self.ledger.check_invariants()
        for phase, members in (
            (Phase.WAITING, self.waiting),
            (Phase.RUNNING, self.running),
            (Phase.HELD, self.held),
        ):
            assert all(seq.phase is phase for seq in members)
            places = [self._key(s) if phase is Phase.WAITING else s.age for s in members]
            assert places == sorted(places), "oldest first, or in the order of the line"
        assert all(seq.phase is Phase.RUNNING for seq in self._suspended)
        everybody = (*self.waiting, *self.running, *self.held, *self._suspended)
        assert len(everybody) == len(self.sequences)
        assert all(self.sequences[seq.request_id] is seq for seq in everybody)
        batch = {seq.request_id for seq in everybody if not seq.request.service.online}
        assert self.batch.keys() == batch
        promised = [0] * self.ledger.stages
        for seq in everybody:
            own = len(self.table.block_ids(seq.request_id))
            if seq.blocks or seq.phase is not Phase.HELD:  # else it was reset: some may be left
                assert own == (0 if 0 in seq.absent else seq.blocks)
            assert blocks_for(seq.computed, self.block_size) <= seq.blocks
            for stage in seq.absent:
                promised[stage] += seq.blocks
        assert promised == self.ledger.reserved
        assert not any(seq.blocks or seq.computed for seq in self.waiting)
        running = (*self.running, *self._suspended)
        assert all(seq.blocks and not seq.absent for seq in running)

    @property
    def _makes_way(self) -> bool:
        """Whether batch sequences are preempted for a start."""
        precedence = self.precedence
        alone = self.ledger.stages == 1
        return precedence.batch_yields and (alone or precedence.yields_in_pipelines)

    @property
    def _online_running(self) -> int:
        """Running sequences that give no place up."""
        return sum(one.online for one in (*self.running, *self._suspended))

    @property
    def _blocks_to_yield(self) -> int:
        """Blocks that are free at least if all running batch sequences lose theirs.

        Those beyond the pool's limit do not come back.
        """
        pool, tables = self.table.pool, self.table.tables
        users, usable = pool.users, pool.usable
        return sum(
            sum([users[block] == 1 and block < usable for block in tables[one.request_id]])
            for one in (*self.running, *self._suspended)
            if not one.online
        )

    def _make_way(self, sequence: Sequence, running_max: int) -> None:
        """Preempt batch sequences, newest first, until there are a place and blocks."""

        def lacks_blocks() -> bool:
            missing = sequence.blocks_to_admit(self.block_size) - self.ledger.free
            return missing > 0 and not self.prefixes.shares_blocks(sequence, missing)

        if self.running_count >= running_max or lacks_blocks():
            self.discard_suspended()
        while len(self.running) >= running_max or lacks_blocks():
            victim = newest_batch(self.running)
            assert victim is not None, f"{sequence.request_id} does not fit"
            self.preempt(victim)

    def _free(self, sequence: Sequence) -> None:
        """Free its blocks, wherever it has some, and tell the stages."""
        sequence.reset_sampler()
        if sequence.blocks:
            self.table.release(sequence.request_id)
            self.ledger.release(sequence.blocks, sequence.absent)
            self.released.append(sequence.request_id)
            sequence.blocks = sequence.registered = sequence.hit_blocks = 0
            sequence.absent = frozenset()

    def _forget_prefixes_of_stages(self) -> None:
        """Blocks change beside microbatches, which alone tell stages what to share."""
        if self.ledger.stages > 1:
            self.drop_prefixes()

    def _enter(self, sequence: Sequence) -> None:
        self.sequences[sequence.request_id] = sequence
        self.tokens.note_entered(sequence)
        if not sequence.request.service.online:
            self.batch[sequence.request_id] = sequence

    def _remove(self, sequence: Sequence) -> None:
        self.tokens.note_left(sequence)
        del self.sequences[sequence.request_id]
        self.batch.pop(sequence.request_id, None)

    def _leave(self, sequence: Sequence) -> None:
        match sequence.phase:
            case Phase.RUNNING:
                self.running.remove(sequence)
            case Phase.HELD:
                self.held.remove(sequence)
            case _:
                self.waiting.remove(sequence)

    def _queue(self, sequence: Sequence) -> None:
        """Enter the line at its place: nearly always as the first or the last."""
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

    def _key(self, sequence: Sequence) -> tuple[LineKey, Age]:
        """Its place in the line; among equals the older one is first."""
        request, came_s = sequence.request, sequence.arrival_s
        if self.precedence.by_gateway_arrival:
            came_s -= request.waited_s
        return self.precedence.queue_order(request.service, came_s), sequence.age


def _insert(line: list[Sequence], sequence: Sequence) -> None:
    """Put it at the place of its age: nearly always at the end."""
    if not line or line[-1].age < sequence.age:
        line.append(sequence)
    else:
        insort(line, sequence, key=_age)


def _age(sequence: Sequence) -> Age:
    return sequence.age
