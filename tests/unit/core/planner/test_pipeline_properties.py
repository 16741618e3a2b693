"""Leaders and the block tables of their stages, in any order of events.

Every stage keeps token ids where a real one keeps K/V, and refuses to attend to anything wrong.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.cost.model import Coefficients, CostModel
from services.core.planner.batch import Microbatch, SampleNotes
from services.core.planner.block_ledger import Follower
from services.core.planner.block_pool import BlockPool
from services.core.planner.block_table import StageTable
from services.core.planner.config import BatchFormation, IterationConfig
from services.core.planner.configuration_events import (
    BlocksCredited,
    CapacityReported,
    ConfigurationEnded,
    FlightDiscarded,
    ReleasedTaken,
    SequenceAdopted,
    SequenceForgotten,
    SequenceHeld,
    SequencePlaced,
    SequencePreempted,
    SequenceResumed,
    StagesConfigured,
)
from services.core.planner.events import (
    CostModelLearned,
    EmitToken,
    IterationDropped,
    IterationFinished,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.state import PlannerState
from services.core.prefix.cache_update import NO_PREFIX_UPDATE
from services.core.queue_order import Scheduling
from services.core.request import NO_LOGPROBS, Limits, LogprobOptions, Request, Sampling
from services.core.service import DEFAULT_SERVICE, Service, ServiceClass
from tests.support.microbatches import block_counts
from tests.support.spec_sampler import SpecSampler, row_of, rows_of

BLOCK_SIZE = 2
BLOCKS = 14
FOREIGN_BLOCKS = 5
STOP = 0
SAMPLINGS = (Sampling(), Sampling(repetition_penalty=1.1), Sampling(presence_penalty=1.0))
LOGPROBS = (NO_LOGPROBS, LogprobOptions(1, 2), LogprobOptions(None, 0), NO_LOGPROBS)
SERVICES = (
    *(DEFAULT_SERVICE, Service(ServiceClass.BATCH), Service(ServiceClass.INTERACTIVE, 20.0, 8.0)),
    *(Service(ServiceClass.BATCH), Service(ServiceClass.STANDARD, None, 4.0, 3)),
)
MODEL = CostModel(0.01, 1.0, 1.5, 1.0, Coefficients(0.02, 0.5, 1.0), 0.01)


def sampled_token(request: Request, index: int) -> int:
    return (len(request.prompt_ids) * 7 + index * 5 + request.sampling.seed) % 11


def expected_output(request: Request) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < request.limits.max_tokens:
        tokens.append(sampled_token(request, len(tokens)))
        if tokens[-1] in request.limits.stop_token_ids:
            break
    return tokens


@dataclass
class Stage:
    """A stage's table and the content of its blocks."""

    table: StageTable
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    sampler: SpecSampler = field(default_factory=SpecSampler)

    def write(self, blocks: tuple[int, ...], start: int, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, start):
            block, slot = divmod(position, BLOCK_SIZE)
            self.slots[blocks[block], slot] = token

    def read(self, blocks: tuple[int, ...], end: int) -> list[int]:
        places = [divmod(position, BLOCK_SIZE) for position in range(end)]
        return [self.slots[blocks[block], slot] for block, slot in places]


def new_stage(blocks: int) -> Stage:
    return Stage(StageTable(BlockPool(blocks)))


class Group:
    """A leader, its followers and the lane along them, in which nothing overtakes."""

    def __init__(self, world: "World", config: IterationConfig) -> None:
        self.world = world
        self.state = PlannerState(config)
        self.own = Stage(self.state.table)
        self.followers: list[Stage] = []
        self.lanes: list[deque] = []
        self.results: deque[tuple[int, dict[str, int], SampleNotes | None]] = deque()
        self.foreign: list[tuple[int, str, int]] = []  # stage, name, blocks

    # --- what the engine does

    def plan(self) -> bool:
        if not self.state.has_slot:
            return False
        microbatch = self.state.plan(self.world.now_s)
        if microbatch is None:
            return False
        assert self.state.stages > 1 or microbatch.batch.chunks
        assert microbatch.batch.tokens <= self.state.config.max_batch_tokens
        tables = {chunk.seq_id: chunk.block_ids for chunk in microbatch.batch.chunks}
        self.run(self.own, microbatch, tables)
        self.send(microbatch)
        return True

    def send(self, message: object) -> None:
        if self.lanes:
            self.lanes[0].append(message)
        elif isinstance(message, Microbatch):
            self.results.append(self.sample(self.own, message))

    def sample(
        self, stage: Stage, microbatch: Microbatch
    ) -> tuple[int, dict[str, int], SampleNotes | None]:
        stage.sampler.keep_only(stage.table.seq_ids)
        sampled = {}
        for chunk in microbatch.batch.chunks:
            if chunk.sample is None:
                continue
            request = self.world.requests[chunk.seq_id]
            stage.sampler.take(request, chunk.sample)
            if request.sampling.reads_output:
                output = expected_output(request)[: chunk.sample.index]
                assert stage.sampler.outputs[chunk.seq_id] == output
            sampled[chunk.seq_id] = sampled_token(request, chunk.sample.index)
        notes = stage.sampler.notes(microbatch.batch, self.world.requests, sampled)
        return microbatch.number, sampled, notes

    def run(self, stage: Stage, microbatch: Microbatch, tables: dict) -> None:
        for chunk in microbatch.batch.chunks:
            stage.write(tables[chunk.seq_id], chunk.start, list(chunk.token_ids))
        for chunk in microbatch.batch.chunks:
            end = chunk.start + len(chunk.token_ids)
            request = self.world.requests[chunk.seq_id]
            tokens = [*request.prompt_ids, *expected_output(request)][:end]
            assert stage.read(tables[chunk.seq_id], end) == tokens, "K/V of another sequence"

    def step(self, index: int) -> bool:
        """A follower takes the next message of its lane."""
        if index >= len(self.lanes) or not self.lanes[index]:
            return False
        message, stage = self.lanes[index].popleft(), self.followers[index]
        match message:
            case Microbatch():
                news = message.prefixes or NO_PREFIX_UPDATE
                stage.table.apply(message.released, block_counts(message), news)
                tables = {name: stage.table.block_ids(name) for name, _ in block_counts(message)}
                for chunk in message.batch.chunks:
                    assert len(tables[chunk.seq_id]) == len(chunk.block_ids)
                self.run(stage, message, tables)
            case ("release", names):
                stage.table.apply(names, ())
            case ("release at", at, names) if at == index + 1:
                stage.table.apply(names, ())
            case ("adopt", at, name, count, tokens) if at == index + 1:
                stage.write(stage.table.adopt(name, count), 0, tokens)
        stage.table.check_invariants()
        if index + 1 < len(self.lanes):
            self.lanes[index + 1].append(message)
        elif isinstance(message, Microbatch):
            self.results.append(self.sample(stage, message))
        return True

    def finish(self) -> bool:
        if not self.results:
            return False
        number, sampled, notes = self.results.popleft()
        now_s = self.world.now_s
        for command in self.state.handle(IterationFinished(now_s, sampled, number, notes)):
            assert isinstance(command, EmitToken)
            self.world.note(command)
        return True

    def drain(self) -> None:
        moved = True
        while moved:
            moved = any([self.step(index) for index in range(len(self.lanes))])
        while self.finish():
            pass
        assert not self.state.in_flight

    # --- hand-over and configurations

    def flush(self) -> None:
        """Deliver the freed blocks to the stages, in order."""
        self.send(("release", self.state.handle(ReleasedTaken())[0].seq_ids))

    def discard(self) -> None:
        """Lose everything in flight."""
        if self.state.stages == 1:
            self.state.handle(IterationDropped(0.0))
        else:
            self.state.handle(FlightDiscarded())
        late, self.results = list(self.results), deque()
        for number, sampled, notes in late:
            assert self.state.handle(IterationFinished(0.0, sampled, number, notes)) == []
        for lane in self.lanes:
            lane.clear()

    def configure(self, stages: int, blocks: list[int], kept: bool) -> None:
        self.drain()
        self.send(("release", self.state.handle(ConfigurationEnded())[0].seq_ids))
        self.drain()
        followers = []
        old, self.followers = self.followers, []
        for index in range(stages - 1):
            if kept and index < len(old):
                stage, was = old[index], index + 1
                stage.table.pool.clear_cache()  # as its own planner does
            else:
                stage, was = new_stage(blocks[index]), None
                name = f"foreign-{self.world.next_number()}"
                stage.table.adopt(name, FOREIGN_BLOCKS)
                self.foreign.append((index + 1, name, FOREIGN_BLOCKS))
            self.followers.append(stage)
            pool = stage.table.pool
            followers.append(Follower(pool.usable, stage.table.block_count, was))
        self.foreign = [
            transfer
            for transfer in self.foreign
            if transfer[0] < stages and transfer[1] in self.followers[transfer[0] - 1].table
        ]
        self.lanes = [deque() for _ in self.followers]
        self.state.handle(StagesConfigured(tuple(followers)))

    def forget_foreign(self) -> None:
        if self.foreign:
            at, name, blocks = self.foreign.pop()
            self.state.handle(BlocksCredited(at, blocks))
            self.send(("release at", at, (name,)))

    def place(self, sequence: Sequence, stage: int) -> bool:
        absent = stage in sequence.absent
        if absent and self.state.sequence_table.ledger.room(stage) < sequence.blocks:
            with pytest.raises(ValueError, match="no room"):
                self.state.handle(SequencePlaced(sequence.seq_id, stage))
            return False
        self.state.handle(SequencePlaced(sequence.seq_id, stage))
        if absent:
            tokens = sequence.token_ids[: sequence.computed]
            if stage == 0:
                blocks = self.state.table.block_ids(sequence.seq_id)
                self.own.write(blocks, 0, tokens)
            else:
                self.flush()
                self.send(("adopt", stage, sequence.seq_id, sequence.blocks, tokens))
        return True

    def settle(self, sequence: Sequence) -> None:
        """Place a held sequence everywhere and resume it, or recompute it."""
        if all([self.place(sequence, stage) for stage in range(self.state.stages)]):
            self.state.handle(SequenceResumed(sequence.seq_id))
        else:
            self.state.handle(SequencePreempted(sequence.seq_id))

    def hand_over(self, request_id: str, other: "Group", held: bool) -> None:
        self.drain()
        if request_id not in self.state.sequences:
            return
        self.state.handle(SequenceHeld(request_id))
        exported = self.state.export(request_id)
        absent = frozenset(range(other.state.stages)) if exported.blocks else frozenset()
        sequence = self.state.sequences[request_id]
        missing = sequence.absent
        assert other.state.handle(SequenceAdopted(exported, absent)) == []
        assert other.state.handle(SequenceAdopted(exported, absent)) == [], (
            "a repetition changes nothing"
        )
        self.state.handle(SequenceForgotten(request_id))
        self.state.table.release(request_id)
        for stage in range(1, self.state.stages):
            if exported.blocks and stage not in missing:
                self.state.handle(BlocksCredited(stage, exported.blocks))
        self.send(("release", (request_id,)))
        adopted = other.state.sequences[request_id]
        if adopted.phase is Phase.HELD and not held:
            other.settle(adopted)

    def orders_under_way(self) -> bool:
        """Whether a lane contains anything other than microbatches."""
        return any(isinstance(message, tuple) for lane in self.lanes for message in lane)

    def enlarge(self, stage: int) -> None:
        pool = self.followers[stage - 1].table.pool
        pool.grow(pool.num_blocks + 1)
        self.state.handle(CapacityReported(stage, pool.num_blocks))

    def come_to_rest(self) -> None:
        """Run to the end: no sequence is stuck, all blocks are free."""
        while self.foreign:
            self.forget_foreign()
        for _ in range(4000):
            self.world.now_s += 0.5
            for sequence in list(self.state.held):
                self.settle(sequence)
            if not self.plan() and not self.state.in_flight and not self.state.sequences:
                break
            self.check()
            for index in range(len(self.lanes)):
                self.step(index)
            self.finish()
        self.drain()
        assert not self.state.sequences, "a sequence is stuck"
        if self.lanes:
            self.plan()  # an empty microbatch, which reports freed blocks to the stages
            self.drain()
        self.check()
        for stage in (self.own, *self.followers):
            assert not stage.table.seq_ids
            assert stage.table.pool.free_count == stage.table.pool.num_blocks

    def check(self) -> None:
        state = self.state
        state.check_invariants()
        self.own.table.check_invariants()
        for follower, used in zip(self.followers, state.sequence_table.ledger.used, strict=True):
            follower.table.check_invariants()
            assert used >= 0
        if not state.in_flight and not any(self.lanes):
            pending = set(state.sequence_table.released)
            for index, follower in enumerate(self.followers):
                names = [name for name in follower.table.seq_ids if name not in pending]
                blocks = sum(len(follower.table.block_ids(name)) for name in names)
                admitted = sum(
                    seq.blocks - len(follower.table.block_ids(seq.seq_id))
                    for seq in state.sequences.values()
                    if seq.blocks and index + 1 not in seq.absent and seq.seq_id not in pending
                )
                again = sum(
                    seq.blocks
                    for seq in state.sequences.values()
                    if index + 1 not in seq.absent and seq.seq_id in pending
                )
                assert blocks + admitted + again == state.sequence_table.ledger.used[index]


class World:
    """Two groups and the events that the clients have received."""

    def __init__(
        self,
        formation: BatchFormation,
        model: CostModel | None,
        min_tokens: int,
        prefix_caching: bool = False,
        **changes: Any,
    ) -> None:
        config = IterationConfig(
            block_size=BLOCK_SIZE,
            num_blocks=BLOCKS,
            max_batch_tokens=6,
            max_running=4,
            max_waiting=100,
            batch_formation=formation,
            min_microbatch_tokens=min_tokens,
            cost_model=model,
            prefix_caching=prefix_caching,
            **({"scheduling": Scheduling.FCFS} | changes),
        )
        self.now_s = 0.0
        self.services = SERVICES if config.scheduling is Scheduling.SLO else (DEFAULT_SERVICE,)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.ended: set[str] = set()
        self._number = 0
        self.groups = [Group(self, config), Group(self, config)]

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def note(self, token: EmitToken) -> None:
        request_id = token.request_id
        assert request_id not in self.aborted, "a late sample of an aborted request"
        assert request_id not in self.ended
        output = self.outputs[request_id]
        assert token.index == len(output)
        self.note_logprobs(token)
        output.append(token.token_id)
        if token.finish_reason is not None:
            self.ended.add(request_id)

    def note_logprobs(self, token: EmitToken) -> None:
        request = self.requests[token.request_id]
        asked, prompt = request.logprobs, request.prompt_ids
        if asked.output is None:
            assert token.logprobs is None
        else:
            position = len(prompt) + token.index
            assert token.logprobs == row_of(token.token_id, position, asked.output)
        if asked.prompt is None or token.index:
            assert token.prompt_logprobs is None
        else:
            assert token.prompt_logprobs == rows_of(prompt[1:], 1, asked.prompt)

    def arrive(self, group: Group, size: int) -> None:
        number = self.next_number()
        name = f"r{number}"
        stop = frozenset({STOP}) if size % 3 == 0 else frozenset()
        prompt = tuple((number + position) % 9 for position in range(1 + size % 13))
        limits = Limits(1 + (size // 13) % 12, stop_token_ids=stop)
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        request = Request(
            *(name, prompt, replace(sampling, seed=number), limits, float(number // 3)),
            LOGPROBS[number % len(LOGPROBS)],
            service=self.services[number % len(self.services)],
        )
        self.requests[name], self.outputs[name] = request, []
        assert group.state.handle(RequestArrived(self.now_s, request)) == []

    def abort(self, group: Group, choice: int) -> None:
        if group.state.sequences:
            names = list(group.state.sequences)
            name = names[choice % len(names)]
            group.state.handle(RequestAborted(0.0, name))
            self.aborted.add(name)

    def apply(self, operation: str, which: int, value: int) -> None:
        self.now_s += 0.5
        group = self.groups[which]
        self.serve(group, operation, value)
        self.reorganise(group, self.groups[1 - which], operation, value)
        for each_group in self.groups:
            each_group.check()

    def serve(self, group: Group, operation: str, value: int) -> None:
        match operation:
            case "arrive":
                self.arrive(group, value)
            case "abort":
                self.abort(group, value)
            case "plan":
                group.plan()
            case "step":
                group.step(value % 2)
            case "finish":
                group.finish()
            case "discard" if group.state.in_flight and not group.orders_under_way():
                group.discard()
            case "foreign":
                group.forget_foreign()
            case "learn":
                group.state.handle(CostModelLearned(MODEL.slowed(1 + value % 3)))
            case "capacity" if group.state.stages > 1:
                group.enlarge(1 + value % (group.state.stages - 1))

    def reorganise(self, group: Group, other: Group, operation: str, value: int) -> None:
        state = group.state
        names = sorted(state.sequences)
        match operation:
            case "configure":
                sizes = [BLOCKS + value % 5, BLOCKS + value % 7]
                group.configure(1 + value % 3, sizes, kept=value % 2 == 0)
            case "hold" if names:
                state.handle(SequenceHeld(names[value % len(names)]))
            case "settle" if state.held:
                group.settle(state.held[value % len(state.held)])
            case "place" if state.held:
                group.place(state.held[value % len(state.held)], value % state.stages)
            case "preempt" if names:
                state.handle(SequencePreempted(names[value % len(names)]))
            case "hand over" if names:
                group.hand_over(names[value % len(names)], other, held=value % 2 == 0)

    def come_to_rest(self) -> None:
        for group in self.groups:
            group.come_to_rest()
        for name, request in self.requests.items():
            output = expected_output(request)
            if name in self.aborted:
                output = output[: len(self.outputs[name])]
            assert self.outputs[name] == output


USUAL = ("arrive", "plan", "plan", "plan", "step", "step", "step", "finish", "finish")
RARE = (
    *("abort", "configure", "discard", "hold", "settle", "settle", "place", "preempt"),
    *("hand over", "foreign", "capacity", "learn"),
)
OPERATION = st.tuples(st.sampled_from(USUAL * 3 + RARE), st.integers(0, 1), st.integers(0, 200))


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(
    ("formation", "model", "min_tokens"),
    [
        (BatchFormation.LOOKAHEAD, None, 1),
        (BatchFormation.LOOKAHEAD, MODEL, 3),
        (BatchFormation.TOKEN_COUNT, None, 1),
    ],
)
@settings(max_examples=120, derandomize=True, deadline=None)
@given(operations=st.lists(OPERATION, min_size=20, max_size=120))
def test_random_events_keep_tokens_blocks_and_counts(
    formation: BatchFormation,
    model: CostModel | None,
    min_tokens: int,
    prefix_caching: bool,
    operations: list[tuple[str, int, int]],
) -> None:
    world = World(formation, model, min_tokens, prefix_caching)
    for operation, which, value in operations:
        world.apply(operation, which, value)
    world.come_to_rest()


@pytest.mark.parametrize(
    ("formation", "model", "changes"),
    [
        (BatchFormation.LOOKAHEAD, MODEL, {}),
        (BatchFormation.LOOKAHEAD, MODEL, {"online_chunk_tokens": 2, "prefix_caching": True}),
        (BatchFormation.TOKEN_COUNT, None, {"harvest": 1.0}),
    ],
)
@settings(max_examples=120, derandomize=True, deadline=None)
@given(operations=st.lists(OPERATION, min_size=20, max_size=120))
def test_random_events_with_deadlines_keep_tokens_blocks_and_counts(
    formation: BatchFormation,
    model: CostModel | None,
    changes: dict[str, Any],
    operations: list[tuple[str, int, int]],
) -> None:
    """As above; two of five requests are batch work, two have targets."""
    world = World(formation, model, 3, **changes, scheduling=Scheduling.SLO)
    for operation, which, value in operations:
        world.apply(operation, which, value)
    world.come_to_rest()


def test_a_block_that_stages_may_lack_is_not_counted_after_a_configuration() -> None:
    """A sequence grew for a lost microbatch; its leader continues with the same stage."""
    world = World(BatchFormation.TOKEN_COUNT, None, 1)
    arrivals = [("arrive", 0, 0)] * 4 + [("arrive", 0, 40), ("configure", 0, 1)]
    flight = [("plan", 0, 0), ("step", 0, 0), ("finish", 0, 0), ("plan", 0, 0), ("discard", 0, 0)]
    for operation, which, value in [*arrivals, *[("arrive", 0, 0)] * 9, *flight]:
        world.apply(operation, which, value)
    preemptions = world.groups[0].state.preemptions_total
    world.apply("configure", 0, 2)
    assert world.groups[0].state.preemptions_total > preemptions
    world.come_to_rest()
