"""Processed and recomputed tokens, compared with a count of every executed position."""

import random
from dataclasses import replace

import pytest

from services.core.planner.configuration_events import (
    SequenceAdopted,
    SequenceForgotten,
    SequencePreempted,
)
from services.core.planner.events import IterationDropped, IterationFinished, RequestArrived
from services.core.planner.fast_forward import (
    advance_decodes,
    decodes_ahead,
    finish_filled,
    plan_shape,
)
from services.core.planner.state import PlannerState
from services.core.report import ClassTokens
from services.core.request import Request
from services.core.service import DEFAULT_SERVICE, Service, ServiceClass
from tests.unit.core.planner.test_state import FakeModel, make_request, make_state

BATCH = Service(ServiceClass.BATCH)


class Ledger:
    """Positions of each request that ran or were cached, and those that were recomputed."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = {request.request_id: request for request in requests}
        self.seen: dict[str, set[int]] = {name: set() for name in self.requests}
        self.processed = {True: 0, False: 0}
        self.recomputed = {True: 0, False: 0}

    def step(self, state: PlannerState, model: FakeModel, *, drop: bool) -> bool:
        """Run an iteration; False if there was none to run."""
        microbatch = state.plan(0.0)
        if microbatch is None:
            return False
        if drop:
            state.handle(IterationDropped(0.0))
            return True
        for chunk in microbatch.batch.chunks:
            request, seen = self.requests[chunk.seq_id], self.seen[chunk.seq_id]
            seen |= set(range(chunk.start)) - seen
            ran = set(range(chunk.start, chunk.start + len(chunk.token_ids)))
            online = request.service.online
            self.recomputed[online] += len(ran & seen)
            fresh = {place for place in ran - seen if place < len(request.prompt_ids)}
            self.processed[online] += len(fresh)
            seen |= ran
        for token in state.handle(IterationFinished(0.0, model.run(microbatch.batch))):
            self.processed[self.requests[token.request_id].service.online] += 1
        state.check_invariants()
        return True

    def counts(self) -> ClassTokens:
        processed, recomputed = self.processed, self.recomputed
        return ClassTokens(processed[True], recomputed[True], processed[False], recomputed[False])


def mixed_requests(rng: random.Random, count: int, longest: int) -> list[Request]:
    """Requests of both classes; half of them start like an earlier one."""
    requests: list[Request] = []
    for number in range(count):
        made = make_request(f"r{number}", rng.randint(1, longest), rng.randint(1, longest), rng)
        begin = rng.choice(requests).prompt_ids[: longest // 2] if requests else ()
        prompt = (*begin, *made.prompt_ids) if rng.random() < 0.5 else made.prompt_ids
        service = rng.choice([DEFAULT_SERVICE, BATCH])
        requests.append(replace(made, prompt_ids=prompt[:longest], service=service))
    return requests


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_every_token_that_ran_is_counted_once(seed: int, caching: bool) -> None:
    """With preemptions, dropped iterations and reuse of prefixes."""
    rng = random.Random(seed)
    state = make_state(
        num_blocks=rng.choice([10, 16, 40]),
        max_batch_tokens=rng.choice([8, 16, 64]),
        prefix_caching=caching,
    )
    requests = mixed_requests(rng, 30, state.config.num_blocks * state.config.block_size // 2)
    model, ledger, arriving = FakeModel(state.config), Ledger(requests), list(requests)
    running = True
    while arriving or running:
        if arriving and (not running or rng.random() < 0.3):
            state.handle(RequestArrived(0.0, arriving.pop(0)))
        if state.running and rng.random() < 0.1:
            state.handle(SequencePreempted(rng.choice(state.running).seq_id))
        running = ledger.step(state, model, drop=rng.random() < 0.1)
        assert state.load().tokens == ledger.counts()
    outputs = sum(request.limits.max_tokens for request in requests)
    prompts = sum(len(request.prompt_ids) for request in requests)
    assert sum(ledger.processed.values()) <= prompts + outputs
    assert caching or sum(ledger.processed.values()) == prompts + outputs
    assert ledger.recomputed[True] and ledger.recomputed[False]


def test_tokens_computed_by_another_leader_are_not_counted_again() -> None:
    first, second = make_state(max_batch_tokens=8), make_state(max_batch_tokens=8)
    request = replace(make_request("r", 20, 4, random.Random(1)), service=BATCH)
    ledger, model = Ledger([request]), FakeModel(first.config)
    first.handle(RequestArrived(0.0, request))
    ledger.step(first, model, drop=False)
    first.handle(SequencePreempted("r"))
    second.handle(SequenceAdopted(first.export("r")))
    first.handle(SequenceForgotten("r"))
    model = FakeModel(second.config)
    while second.sequences["r"].output_count < 2:
        assert ledger.step(second, model, drop=False)
    assert first.load().tokens == ClassTokens(batch_processed_tokens_total=8)
    assert second.load().tokens == ClassTokens(0, 0, 12 + 2, 8)


def test_a_fast_forward_counts_as_the_steps_that_it_replaces() -> None:
    state = make_state()
    state.handle(RequestArrived(0.0, make_request("r", 20, 12, random.Random(1))))
    while plan_shape(state, 0.0) is not None:
        finish_filled(state, 1, 0.0)
        if ahead := decodes_ahead(state):
            advance_decodes(state, ahead, 1, 0.0)
    assert state.load().tokens == ClassTokens(online_processed_tokens_total=32)
