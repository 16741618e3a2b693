"""The planner against a model that checks the KV cache token by token."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from services.core.planner.batch import Batch, Chunk, SampleNotes, SampleTerms, TailTurn
from services.core.planner.config import IterationConfig
from services.core.planner.configuration_events import SequencePreempted
from services.core.planner.events import (
    EmitToken,
    IterationDropped,
    IterationFinished,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.sequence import Sequence
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling
from services.core.request import FinishReason, Limits, Request, Sampling
from services.core.service import Service, ServiceClass

VOCABULARY = 97
STOP = 13


class FakeModel:
    """Keeps token ids in place of K/V, and refuses to attend to wrong entries."""

    def __init__(self, config: IterationConfig) -> None:
        self.block_size = config.block_size
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}  # position and token
        self.terms: dict[str, SampleTerms] = {}

    def turn(self, turns: Iterable[TailTurn]) -> None:
        """Reverse the entries of tail blocks, from first to last slot."""
        for block, filled in turns:
            entries = [self.slots[block, slot] for slot in range(filled)]
            for slot, entry in enumerate(entries):
                self.slots[block, self.block_size - 1 - slot] = entry

    def run(self, batch: Batch) -> dict[str, int]:
        sampled = {}
        for chunk in batch.chunks:
            for position, token in enumerate(chunk.token_ids, chunk.start):
                self.slots[self._place(batch, chunk, position)] = position, token
        for chunk in batch.chunks:
            end = chunk.start + len(chunk.token_ids)
            seen = self._read(batch, chunk, end)
            assert tuple(seen[chunk.start :]) == chunk.token_ids, "two sequences share a block"
            if chunk.sample is not None:
                terms = chunk.sample.terms or self.terms[chunk.seq_id]
                self.terms[chunk.seq_id] = terms
                banned = terms.stop_ids if chunk.sample.index < terms.min_tokens else frozenset()
                sampled[chunk.seq_id] = next_token(seen, banned)
        return sampled

    def _place(self, batch: Batch, chunk: Chunk, position: int) -> tuple[int, int]:
        block, slot = divmod(position, self.block_size)
        if chunk.seq_id in batch.turned:
            slot = self.block_size - 1 - slot
        return chunk.block_ids[block], slot

    def _read(self, batch: Batch, chunk: Chunk, end: int) -> list[int]:
        """The tokens before `end`; in full blocks any order is allowed, as for attention."""
        size, entries = self.block_size, []
        for block in chunk.block_ids[: end // size]:
            entries += sorted(self.slots[block, slot] for slot in range(size))
        places = [self._place(batch, chunk, p) for p in range(end // size * size, end)]
        entries += [self.slots[place] for place in places]
        assert [position for position, _ in entries] == list(range(end)), "another's entry"
        return [token for _, token in entries]


def next_token(tokens: list[int], banned: frozenset[int] = frozenset()) -> int:
    token = (sum((i + 1) * t for i, t in enumerate(tokens)) + 7) % VOCABULARY
    while token in banned:
        token = (token + 1) % VOCABULARY
    return token


def expected(request: Request) -> tuple[list[int], FinishReason]:
    tokens = list(request.prompt_ids)
    limits = request.limits
    for index in range(limits.max_tokens):
        banned = limits.stop_token_ids if index < limits.min_tokens else frozenset()
        tokens.append(next_token(tokens, banned))
        if tokens[-1] in limits.stop_token_ids:
            return tokens[len(request.prompt_ids) :], FinishReason.STOP
    return tokens[len(request.prompt_ids) :], FinishReason.LENGTH


def make_request(name: str, prompt: int, max_tokens: int, rng: random.Random, **limits) -> Request:
    ids = tuple(rng.randrange(VOCABULARY) for _ in range(prompt))
    return Request(name, ids, Sampling(temperature=0), Limits(max_tokens, **limits), 0.0)


def make_state(**changes) -> PlannerState:
    bounds = {"block_size": 4, "num_blocks": 16, "max_batch_tokens": 16, "max_running": 8}
    changes = {"max_waiting": 1000, "scheduling": Scheduling.FCFS, **changes}
    return PlannerState(IterationConfig(**{**bounds, **changes}))


def drive(state: PlannerState, model: FakeModel, outputs: dict, between=lambda _: None) -> None:
    """Run to the end, collect the output of every request and check indices. `between` is called
    while a batch runs; it may return another batch that runs instead.
    """
    while (microbatch := state.plan(0.0)) is not None:
        state.check_invariants()
        batch = between(microbatch.batch) or microbatch.batch
        assert batch.tokens <= state.config.max_batch_tokens
        for command in state.handle(IterationFinished(0.0, model.run(batch))):
            assert isinstance(command, EmitToken)
            tokens, reason = outputs.setdefault(command.request_id, ([], []))
            assert command.index == len(tokens) and not reason
            tokens.append(command.token_id)
            if command.finish_reason is not None:
                reason.append(command.finish_reason)
        state.check_invariants()


@pytest.mark.parametrize("scheduling", Scheduling)
@pytest.mark.parametrize("seed", range(40))
def test_output_does_not_depend_on_the_schedule(seed: int, scheduling: Scheduling) -> None:
    rng = random.Random(seed)
    state = make_state(
        scheduling=scheduling,
        prefix_caching=rng.random() < 0.5,
        num_blocks=rng.choice([10, 16, 40]),
        max_batch_tokens=rng.choice([8, 16, 64]),
    )
    model, outputs = FakeModel(state.config), {}
    capacity = state.config.num_blocks * state.config.block_size
    requests = []
    for number in range(30):
        prompt = rng.randint(1, capacity // 2)
        most = rng.randint(1, capacity - prompt)
        least = rng.randint(0, most)
        stop = frozenset({STOP}) if rng.random() < 0.5 else frozenset()
        limits = {"min_tokens": least, "stop_token_ids": stop}
        service = Service(rng.choice(list(ServiceClass)))
        request = make_request(f"r{number}", prompt, most, rng, **limits)
        requests.append(replace(request, service=service))
    arriving = list(requests)

    def between(_: Batch) -> None:
        if arriving and rng.random() < 0.3:
            state.handle(RequestArrived(0.0, arriving.pop()))

    while arriving:
        state.handle(RequestArrived(0.0, arriving.pop()))
        drive(state, model, outputs, between)
    for request in requests:
        tokens, reason = outputs[request.request_id]
        assert (tokens, reason[0]) == expected(request)
    assert state.pool.free_count == state.config.num_blocks
    assert state.load().running == state.load().waiting == 0


@pytest.mark.parametrize("seed", range(20))
def test_output_of_a_resumed_request_equals_an_undisturbed_one(seed: int) -> None:
    """Requests are cut at any token and resume at a second planner, which runs others, too."""
    rng = random.Random(seed)
    state = make_state(num_blocks=rng.choice([10, 16, 40]))
    model, outputs, requests = FakeModel(state.config), {}, []
    for number in range(12):
        stop = frozenset({STOP}) if rng.random() < 0.5 else frozenset()
        limits = {"min_tokens": rng.randint(0, 12), "stop_token_ids": stop}
        request = make_request(f"r{number}", rng.randint(1, 20), 16, rng, **limits)
        whole, _ = expected(request)
        cut = tuple(whole[: rng.randrange(len(whole))])
        outputs[request.request_id] = list(cut), []
        requests.append(request)
        state.handle(RequestArrived(0.0, replace(request, output_ids=cut)))
    drive(state, model, outputs)
    for request in requests:
        tokens, reason = outputs[request.request_id]
        assert (tokens, reason[0]) == expected(request)
    assert state.pool.free_count == state.config.num_blocks


def test_the_sampler_gets_earlier_output_as_output() -> None:
    state = make_state()
    sampling = Sampling(temperature=1, presence_penalty=1, repetition_penalty=2)
    request = Request("r", (1, 2), sampling, Limits(8, 4), 0.0, output_ids=(5, 6, 7))
    state.handle(RequestArrived(0.0, request))
    microbatch = state.plan(0.0)
    assert microbatch is not None
    (chunk,) = microbatch.batch.chunks
    assert chunk.token_ids == (1, 2, 5, 6, 7)
    assert chunk.sample is not None and chunk.sample.terms is not None
    assert chunk.sample.index == 3
    assert (chunk.sample.terms.prompt_ids, chunk.sample.terms.output_ids) == ((1, 2), (5, 6, 7))
    (token,) = state.handle(IterationFinished(0.0, {"r": 9}))
    assert token == EmitToken("r", 3, 9, None)
    # The state for another leader holds every token once.
    assert Sequence.restore(state.export("r")).token_ids == [1, 2, 5, 6, 7, 9]


def test_overflow_preempts_the_newest_and_the_oldest_advances() -> None:
    state, rng = make_state(num_blocks=8), random.Random(1)
    for name in "abcd":
        state.handle(RequestArrived(0.0, make_request(name, 4, 24, rng)))
    model, outputs, order = FakeModel(state.config), {}, []
    while (microbatch := state.plan(0.0)) is not None:
        for command in state.handle(IterationFinished(0.0, model.run(microbatch.batch))):
            outputs.setdefault(command.request_id, []).append(command.token_id)
            if command.finish_reason is not None:
                order.append(command.request_id)
    assert state.preemptions_total > 0
    assert order == list("abcd")
    assert all(len(tokens) == 24 for tokens in outputs.values())


@pytest.mark.parametrize("overtaken_max", [0, 3])
def test_short_requests_overtake_a_large_request_a_bounded_number_of_times(
    overtaken_max: int,
) -> None:
    state, rng = make_state(max_batch_tokens=64, overtaken_max=overtaken_max), random.Random(1)
    state.handle(RequestArrived(0.0, make_request("runs", 40, 16, rng)))
    model, outputs, started = FakeModel(state.config), {}, []
    shorts = [f"short{number}" for number in range(10)]

    def between(batch: Batch) -> None:
        if not started:
            state.handle(RequestArrived(1.0, make_request("large", 30, 2, rng)))
            for name in shorts:
                state.handle(RequestArrived(2.0, make_request(name, 2, 1, rng)))
        started.extend(chunk.seq_id for chunk in batch.chunks if chunk.start == 0)

    drive(state, model, outputs, between)
    assert started.index("large") == 1 + overtaken_max, "so many short ones before it, no more"
    assert [name for name in started if name in shorts] == shorts
    assert len(outputs) == 12 and state.pool.free_count == state.config.num_blocks


@pytest.mark.parametrize("seed", range(20))
def test_abort_frees_blocks_in_every_phase(seed: int) -> None:
    rng = random.Random(seed)
    state = make_state()
    model, outputs = FakeModel(state.config), {}
    names = [f"r{number}" for number in range(20)]
    for name in names:
        state.handle(RequestArrived(0.0, make_request(name, rng.randint(1, 20), 20, rng)))

    def between(_: Batch) -> None:
        victim = rng.choice(names)
        if rng.random() < 0.3:
            state.handle(RequestAborted(0.0, victim))

    state.handle(RequestAborted(0.0, names[0]))
    state.check_invariants()
    drive(state, model, outputs, between)
    assert names[0] not in outputs
    assert state.pool.free_count == state.config.num_blocks


@pytest.mark.parametrize("seed", range(20))
def test_a_dropped_iteration_runs_again(seed: int) -> None:
    rng = random.Random(seed)
    state, model, outputs = make_state(num_blocks=20), FakeModel(make_state().config), {}
    requests = [
        make_request(f"r{n}", rng.randint(1, 20), rng.randint(1, 20), rng) for n in range(9)
    ]
    for request in requests:
        state.handle(RequestArrived(0.0, request))
    victim = requests[3].request_id

    def between(batch: Batch) -> Batch:
        while rng.random() < 0.3:
            model.run(Batch(batch.chunks[:1]))  # some of its K/V was written
            if rng.random() < 0.2:
                state.handle(RequestAborted(0.0, victim))
            state.handle(IterationDropped(0.0))
            state.check_invariants()
            batch = state.plan(0.0).batch
        return batch

    drive(state, model, outputs, between)
    for request in requests:
        if request.request_id != victim:
            tokens, reason = outputs[request.request_id]
            assert (tokens, reason[0]) == expected(request)
    assert state.pool.free_count == state.config.num_blocks


def test_a_request_that_can_never_run_is_refused() -> None:
    state, rng = make_state(max_waiting=2), random.Random(0)
    (refusal,) = state.handle(RequestArrived(0.0, make_request("big", 40, 25, rng)))
    assert isinstance(refusal, RefuseRequest) and "65 tokens" in refusal.message
    assert state.handle(RequestArrived(0.0, make_request("fits", 63, 1, rng))) == []
    (refusal,) = state.handle(RequestArrived(0.0, make_request("fits", 1, 1, rng)))
    assert "id" in refusal.message
    state.handle(RequestArrived(0.0, make_request("second", 1, 1, rng)))
    (refusal,) = state.handle(RequestArrived(0.0, make_request("third", 1, 1, rng)))
    assert "full" in refusal.message and refusal.retryable
    outputs: dict = {}
    drive(state, FakeModel(state.config), outputs)
    assert set(outputs) == {"fits", "second"}


def test_decodes_are_never_held_up_by_a_long_prompt() -> None:
    state, rng = make_state(num_blocks=100), random.Random(0)
    model = FakeModel(state.config)
    state.handle(RequestArrived(0.0, make_request("decode", 4, 30, rng)))
    state.handle(IterationFinished(0.0, model.run(state.plan(0.0).batch)))
    state.handle(RequestArrived(0.0, make_request("long", 150, 2, rng)))
    for _ in range(8):
        batch = state.plan(0.0).batch
        assert batch.chunks[0].seq_id == "decode"
        assert batch.tokens == state.config.max_batch_tokens
        state.handle(IterationFinished(0.0, model.run(batch)))


def test_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="max_running"):
        make_state(max_running=17)


def test_a_sequence_that_cannot_continue_is_refused_and_freed() -> None:
    """A request gets no token at its first position, another one in the middle."""
    state, rng = make_state(), random.Random(0)
    for name in ("first", "later", "fine"):
        state.handle(RequestArrived(0.0, make_request(name, 5, 6, rng)))
    outputs = {"first": [], "later": [], "fine": []}
    for _ in range(8):
        microbatch = state.plan(0.0)
        if microbatch is None:
            break
        sampled = {chunk.seq_id: 1 for chunk in microbatch.batch.chunks if chunk.sample}
        failing = {"first": 0, "later": 3}
        failed = {
            name: "nothing is left" for name in sampled if failing.get(name) == len(outputs[name])
        }
        sampled = {name: token for name, token in sampled.items() if name not in failed}
        notes = SampleNotes(failed=failed) or None
        commands = state.handle(IterationFinished(0.0, sampled, microbatch.number, notes))
        state.check_invariants()
        for command in commands:
            if isinstance(command, RefuseRequest):
                assert command == RefuseRequest(command.request_id, "nothing is left")
                del failing[command.request_id]
                assert command.request_id not in state.sequences
            else:
                outputs[command.request_id].append(command.token_id)
    assert {name: len(tokens) for name, tokens in outputs.items()} == {
        "first": 0,
        "later": 3,
        "fine": 6,
    }
    assert not state.sequences and state.pool.free_count == state.config.num_blocks


def test_sampling_terms_are_sent_once_and_again_after_a_preemption() -> None:
    state, rng = make_state(), random.Random(0)
    sampling = Sampling(repetition_penalty=1.2)
    request = replace(make_request("a", 5, 6, rng), sampling=sampling)
    state.handle(RequestArrived(0.0, request))
    specs = []
    for iteration in range(6):
        if iteration == 3:
            state.handle(SequencePreempted("a"))
        microbatch = state.plan(0.0)
        (chunk,) = microbatch.batch.chunks
        specs.append((chunk.sample.terms, chunk.sample.output_ids))
        state.handle(IterationFinished(0.0, {"a": 10 + iteration}, microbatch.number))

    def terms(*output_ids: int) -> SampleTerms:
        return SampleTerms(sampling, request.prompt_ids, output_ids)

    assert specs == [
        (terms(), ()),
        (None, (10,)),
        (None, (11,)),
        (terms(10, 11, 12), ()),
        (None, (13,)),
        (None, (14,)),
    ]
