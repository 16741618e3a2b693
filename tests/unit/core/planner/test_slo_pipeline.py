"""`scheduling: slo` in a pipeline: deadlines bound microbatches, and batch work is filler."""

import random
from itertools import pairwise
from typing import Any

import pytest

from services.core.cost.model import CostModel
from services.core.planner.batch import Microbatch
from services.core.planner.block_ledger import Follower
from services.core.planner.config import BatchFormation, IterationConfig
from services.core.planner.configuration_events import FlightDiscarded, StagesConfigured
from services.core.planner.events import IterationFinished, RequestAborted, RequestArrived
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass
from tests.support.modelled_pipeline import A100, ModelledPipeline, arrive, finish

BATCH = Service(ServiceClass.BATCH)
MODEL = CostModel(alpha=1e-7, beta=1e-4, gamma=0.011, lam=0.01)
"""10 ms a microbatch, 1 ms a sequence, 0.1 ms a token."""


def online(tpot_s: float | None = None, ttft_s: float | None = None) -> Service:
    return Service(ServiceClass.INTERACTIVE, ttft_s, tpot_s)


def make(stages: int = 2, **changes: Any) -> PlannerState:
    bounds: dict[str, Any] = {
        "block_size": 16,
        "num_blocks": 4000,
        "max_batch_tokens": 512,
        "max_running": 64,
        "max_waiting": 1000,
        "cost_model": MODEL,
        "scheduling": Scheduling.SLO,
    }
    state = PlannerState(IterationConfig(**(bounds | changes)))
    followers = tuple(Follower(state.config.num_blocks) for _ in range(stages - 1))
    state.handle(StagesConfigured(followers))
    return state


def pipeline(stages: int = 2, **changes: Any) -> ModelledPipeline:
    shares = (1 / stages,) * stages
    return ModelledPipeline(make(stages, **changes), shares, changes.get("cost_model", MODEL))


def gaps_s(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


class Twins:
    """The same events for a planner by arrival and for one by deadline."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        stages = rng.choice((2, 2, 3))
        changes: dict[str, Any] = {
            "block_size": 4,
            "num_blocks": rng.choice((30, 60, 200)),
            "max_batch_tokens": rng.choice((16, 64)),
            "max_running": rng.choice((4, 16)),
            "min_microbatch_tokens": rng.choice((4, 16)),
            "prefix_caching": rng.random() < 0.5,
            "cost_model": rng.choice((None, MODEL, A100)),
            "batch_formation": rng.choice(list(BatchFormation)),
        }
        kinds = (Scheduling.FCFS, Scheduling.SLO)
        self.states = [make(stages, **changes, scheduling=kind) for kind in kinds]
        self.flying: list[Microbatch] = []
        self.now_s = 0.0
        self.microbatches = 0

    def handle(self, event: Any) -> None:
        answers = [state.handle(event) for state in self.states]
        assert answers[0] == answers[1]
        for state in self.states:
            state.check_invariants()

    def arrive(self, number: int) -> None:
        rng = self.rng
        ids = tuple(rng.randrange(3) for _ in range(rng.randint(1, 60)))
        limits = Limits(rng.randint(1, 12))
        self.handle(
            RequestArrived(self.now_s, Request(f"r{number}", ids, Sampling(), limits, self.now_s))
        )

    def plan(self) -> None:
        if not self.states[0].has_slot:
            return
        mine, other = (state.plan(self.now_s) for state in self.states)
        assert mine == other
        if mine is not None:
            self.flying.append(mine)
            self.microbatches += 1

    def finish(self) -> None:
        if self.flying:
            microbatch = self.flying.pop(0)
            chunks = [chunk for chunk in microbatch.batch.chunks if chunk.sample]
            sampled = {chunk.seq_id: self.rng.randrange(5) for chunk in chunks}
            self.handle(IterationFinished(self.now_s, sampled, microbatch.number))

    def step(self) -> None:
        chance, names = self.rng.random(), list(self.states[0].sequences)
        self.now_s += 0.02 * chance
        if chance < 0.02 and names:
            self.handle(RequestAborted(self.now_s, self.rng.choice(names)))
        elif chance < 0.03:
            self.flying.clear()
            self.handle(FlightDiscarded())
        elif chance < 0.5:
            self.finish()
        else:
            self.plan()


@pytest.mark.parametrize("seed", range(60))
def test_slo_equals_fcfs_without_targets_and_batch_work(seed: int) -> None:
    twins = Twins(random.Random(seed))
    for step in range(600):
        if twins.rng.random() < 0.1:
            twins.arrive(step)
        twins.step()
    assert twins.microbatches > 50


def test_a_deadline_bounds_what_batch_work_adds_to_a_microbatch() -> None:
    """By arrival, prompts of batch work make tokens late; by deadline they do not."""
    worst: dict[Scheduling, float] = {}
    prompts: dict[Scheduling, int] = {}
    for scheduling in (Scheduling.FCFS, Scheduling.SLO):
        lane = pipeline(scheduling=scheduling, harvest=1.0)
        lane.services = {f"b{number}": BATCH for number in range(300)}
        lane.services |= {f"o{number}": online(tpot_s=0.03) for number in range(8)}
        arrivals = [(0.0, f"o{number}", 20, 150) for number in range(8)]
        lane.run([*arrivals, *((0.5, f"b{number}", 400, 4) for number in range(300))], until_s=3.0)
        times = [lane.token_times_s[f"o{number}"] for number in range(8)]
        lane.state.check_invariants()
        worst[scheduling] = max(max(gaps_s([t for t in time if t > 0.5])) for time in times)
        prompts[scheduling] = sum(name in lane.token_times_s for name in lane.services) - 8
    assert worst[Scheduling.FCFS] > 0.05
    assert worst[Scheduling.SLO] <= 0.03 + 1e-9
    assert prompts[Scheduling.SLO] >= 30, "it fills the time that is left"


@pytest.mark.parametrize("harvest", [0.0, 0.5])
def test_the_fill_level_applies_to_microbatches(harvest: float) -> None:
    state = make(harvest=harvest)
    arrive(state, "o", 20, 50, service=online(tpot_s=0.04))
    first = state.plan(0.0)
    assert first is not None
    arrive(state, "b", 400, 4, service=BATCH)
    second = state.plan(0.0)
    if not harvest:
        assert second is None, "all that is online is in flight"
    else:
        assert second is not None and 16 <= second.batch.tokens < 60, (
            "15 ms, 11 of them for a chunk"
        )


def test_batch_work_alone_is_bounded_and_keeps_all_stages_busy() -> None:
    lane = pipeline(max_batch_tokens=4096, num_blocks=8000)
    lane.services = {f"b{number}": BATCH for number in range(20)}
    lane.services["o"] = online(ttft_s=0.2)
    arrivals = [(0.0, "o", 20, 1), *((0.1, f"b{number}", 3000, 30) for number in range(20))]
    lane.run(arrivals, until_s=20.0)
    assert all(len(lane.token_times_s[f"b{number}"]) == 30 for number in range(20))
    longest_s = max(end - start for start, end in lane.times[0])
    assert 0.03 < longest_s <= 0.05 + 1e-9, "half of the target for both stages"
    busy_s = sum(end - start for start, end in lane.times[1] if start > 0.2)
    assert busy_s / (lane.times[1][-1][1] - 0.2) > 0.9


def test_an_online_request_does_not_wait_for_batch_work_that_has_not_begun() -> None:
    lane = pipeline()
    lane.services = {f"b{number}": BATCH for number in range(40)}
    lane.services["o"] = online(ttft_s=1.0)
    arrivals = [(0.0, f"b{number}", 3000, 30) for number in range(40)]
    lane.run([*arrivals, (1.0, "o", 400, 1)], until_s=4.0)
    waited_s = lane.token_times_s["o"][0] - 1.0
    assert waited_s <= 2.5 * MODEL.chunk_s(0, 512), "two are in flight"


def test_decodes_that_do_not_fit_are_ordered_by_deadline() -> None:
    """Forty decodes cost 50 ms; those with a target of 30 ms are not delayed by the others."""
    lane = pipeline()
    lane.services = {f"slow{number}": online(tpot_s=2.0) for number in range(40)}
    lane.services |= {f"fast{number}": online(tpot_s=0.03) for number in range(4)}
    lane.run([(0.0, name, 8, 40) for name in lane.services], until_s=20.0)
    assert all(len(lane.token_times_s[name]) == 40 for name in lane.services)
    fast = [gaps_s(lane.token_times_s[f"fast{number}"])[5:] for number in range(4)]
    assert max(map(max, fast)) <= 0.03 + 1e-9
    slow = [gaps_s(lane.token_times_s[f"slow{number}"]) for number in range(40)]
    assert max(map(max, slow)) <= 2.0


def test_online_prompts_are_cut_to_the_bound() -> None:
    state = make(online_chunk_tokens=64)
    arrive(state, "o", 20, 50, service=online(tpot_s=0.03))
    first = state.plan(0.0)
    assert first is not None
    state.handle(IterationFinished(0.02, {"o": 1}, first.number))
    arrive(state, "long", 2000, 4, at_s=0.02, service=online(ttft_s=2.0))
    second = state.plan(0.02)
    assert second is not None and 60 <= second.batch.tokens - 1 <= 200
    whole = make()
    arrive(whole, "long", 2000, 4, service=online(ttft_s=2.0))
    microbatch = whole.plan(0.0)
    assert microbatch is not None and microbatch.batch.tokens > 400


@pytest.mark.parametrize("tpot_s", [0.03, 0.2])
def test_online_prompts_get_their_promised_tokens_beside_many_decodes(tpot_s: float) -> None:
    """Forty decodes cost more than a chunk: the promised tokens are added."""
    state = make(online_chunk_tokens=64)
    for number in range(40):
        arrive(state, f"o{number}", 20, 200, service=online(tpot_s=tpot_s))
    now_s, flying = 0.0, list[Microbatch]()
    for turn in range(40):
        if turn == 20:
            arrive(state, "long", 2000, 4, at_s=now_s, service=online(ttft_s=2.0))
        while state.has_slot and (microbatch := state.plan(now_s)) is not None:
            flying.append(microbatch)
            prompt = [chunk for chunk in microbatch.batch.chunks if chunk.seq_id == "long"]
            decodes = microbatch.batch.tokens - sum(len(chunk.token_ids) for chunk in prompt)
            if prompt:
                assert decodes >= 15 and 60 <= len(prompt[0].token_ids) < 512
                return
        now_s += 0.02
        finish(state, flying.pop(0), now_s)
    pytest.fail("the prompt never ran")


def test_predictions_follow_measured_microbatch_times() -> None:
    lane = pipeline()
    lane.model = MODEL.slowed(1.5)
    lane.services = {f"o{number}": online(tpot_s=0.05) for number in range(6)}
    lane.run([(0.0, name, 20, 300) for name in lane.services], until_s=6.0)
    feedback = lane.state._feedback
    assert feedback is not None
    assert feedback.budget.decode_scale == pytest.approx(1.5, abs=0.15)


@pytest.mark.parametrize("bounds", [{"num_blocks": 80}, {"max_running": 2}])
def test_batch_work_yields_to_an_online_request(bounds: dict[str, int]) -> None:
    """Batch work holds all blocks, or all places; some of it is in flight."""
    lane = pipeline(**bounds)
    lane.services = {f"b{number}": BATCH for number in range(4)}
    lane.services["o"] = online(ttft_s=1.0)
    arrivals = [(0.0, f"b{number}", 290, 25) for number in range(4)]
    lane.run([*arrivals, (0.2, "o", 400, 1)], until_s=30.0)
    assert lane.token_times_s["o"][0] - 0.2 <= 0.2
    assert all(len(lane.token_times_s[f"b{number}"]) == 25 for number in range(4))
    assert lane.state.preemptions_total > 0
    assert lane.state.load().kv_blocks_free == lane.state.config.num_blocks


@pytest.mark.parametrize("scale", [1, 4])
def test_batch_work_uses_the_memory_that_a_merge_adds(scale: int) -> None:
    """Online requests that would fill one worker leave most of the group's memory."""
    lane = pipeline(num_blocks=100)
    lane.state.table.pool.grow(100 * scale)
    lane.state.handle(StagesConfigured((Follower(100 * scale),)))
    lane.services = {f"o{number}": online(tpot_s=0.1) for number in range(8)}
    lane.services |= {f"b{number}": BATCH for number in range(8)}
    arrivals = [(0.0, f"o{number}", 150, 300) for number in range(8)]
    lane.run([*arrivals, *((1.0, f"b{number}", 200, 20) for number in range(8))], until_s=4.0)
    assert all(len(lane.token_times_s[f"o{number}"]) < 300 for number in range(8))
    done = [name for name in lane.token_times_s if name.startswith("b")]
    assert len(done) == (8 if scale == 4 else 0)
    feedback = lane.state._feedback
    assert feedback is not None
    assert (feedback.harvest.share > 0.3) == (scale == 4)


def test_slots_adapt_in_a_pipeline() -> None:
    """They double while no deadline binds; while one does, only their base runs."""
    state = make(adaptive_slots=True, max_running=8)
    names = [f"r{number}" for number in range(16)]
    for name in names:
        arrive(state, name, 8, 90, service=online())

    def decodes(now_s: float) -> int:
        """The number of decodes in the larger of two microbatches."""
        most = 0
        for microbatch in [state.plan(now_s) for _ in range(2)]:
            if microbatch is None:
                continue
            chunks = microbatch.batch.chunks
            most = max(most, sum(len(chunk.token_ids) == 1 for chunk in chunks))
            finish(state, microbatch, now_s)
        state.check_invariants()
        return most

    for step in range(6):
        grown = decodes(0.02 * step)
    assert grown == 8, "all of them, an even half in each microbatch"
    state.handle(RequestAborted(0.2, names.pop()))
    arrive(state, "tight", 8, 90, at_s=0.2, service=online(tpot_s=0.016))
    assert [decodes(0.2) for _ in range(4)][-2:] == [4, 4]
