"""`scheduling: slo`: deadlines bound iterations, and batch work fills the remaining time."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from services.core.cost.model import CostModel
from services.core.planner import deadline
from services.core.planner.batch import Microbatch
from services.core.planner.config import IterationConfig
from services.core.planner.events import EmitToken, IterationFinished, RequestArrived
from services.core.planner.plan import Plan
from services.core.planner.preemption import Preempt
from services.core.planner.sequence import Phase
from services.core.planner.state import PlannerState
from services.core.planner.victims import VictimRule
from services.core.queue_order import Scheduling
from services.core.report import DeadlineUse
from services.core.request import Limits, Request, Sampling
from services.core.service import DEFAULT_SERVICE, Service, ServiceClass

BATCH = Service(ServiceClass.BATCH)
MODEL = CostModel(alpha=1e-7, beta=1e-4, gamma=0.011, lam=0.01)
"""10 ms an iteration, 1 ms a sequence, 0.1 ms a token."""


def planner(**changes: Any) -> PlannerState:
    bounds: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 400,
        "max_batch_tokens": 256,
        "max_running": 32,
        "max_waiting": 1000,
        "cost_model": MODEL,
        "scheduling": Scheduling.SLO,
    }
    return PlannerState(IterationConfig(**(bounds | changes)))


def promised(ttft_s: float | None = None, tpot_s: float | None = None, group: int = 1) -> Service:
    return Service(ServiceClass.INTERACTIVE, ttft_s, tpot_s, group)


class Clock:
    """Runs iterations that take `slow` times the predicted time, and counts tokens by request."""

    def __init__(self, state: PlannerState, slow: float = 1.0) -> None:
        self.state = state
        self.slow = slow
        self.now_s = 0.0
        self.tokens: dict[str, list[float]] = {}
        self.chunks: dict[str, int] = {}
        self.plan: Plan | None = None

    def arrive(self, name: str, service: Service, prompt: int = 8, output: int = 8) -> None:
        ids = tuple(sum(map(ord, name)) + place for place in range(prompt))
        request = Request(name, ids, Sampling(), Limits(output), self.now_s, service=service)
        self.state.handle(RequestArrived(self.now_s, request))
        self.state.check_invariants()

    def begin(self, name: str, service: Service, prompt: int = 8, output: int = 8) -> None:
        self.arrive(name, service, prompt, output)
        self.run()

    def run(self) -> dict[str, int]:
        """Run an iteration; returns the tokens that ran of each request."""
        before = {sequence.seq_id: sequence.computed for sequence in self.state.running}
        microbatch = self.state.plan(self.now_s)
        if microbatch is None:
            return {}
        self.state.check_invariants()
        (self.plan,) = self.state.in_flight
        self._check_bound(self.plan)
        chunks = microbatch.batch.chunks
        for chunk in chunks:
            if not self.state.config.prefix_caching:  # else it may start again from the cache
                assert chunk.start in (before.get(chunk.seq_id, 0), 0), "a gap between chunks"
        self.finish(microbatch)
        return {chunk.seq_id: len(chunk.token_ids) for chunk in chunks}

    def finish(self, microbatch: Microbatch) -> None:
        """Advance by the iteration's time and deliver its tokens."""
        chunks = microbatch.batch.chunks
        self.now_s += self.slow * MODEL.batch_s((c.start, len(c.token_ids)) for c in chunks)
        sampled = {chunk.seq_id: 6 for chunk in chunks if chunk.sample is not None}
        for command in self.state.handle(IterationFinished(self.now_s, sampled)):
            assert isinstance(command, EmitToken)
            times = self.tokens.setdefault(command.request_id, [])
            known = self.state.sequences.get(command.request_id)
            begun = 0 if known is None else len(known.request.output_ids)
            assert begun or command.index == len(times)
            times.append(self.now_s)
        self.state.check_invariants()

    def _check_bound(self, plan: Plan) -> None:
        """Batch work beside online work keeps every feasible residual time."""
        feedback, model = self.state._feedback, self.state.config.cost_model
        joined = any(not sequence.online for sequence in plan.sequences())
        if feedback is None or model is None or not plan.harvested or not joined:
            return
        budget = feedback.budget
        scale = min(budget.decode_scale, budget.mixed_scale)
        for sequence in plan.decodes:
            remaining_s = deadline.residual_s(sequence, self.now_s, budget.iteration_s)
            late = remaining_s < budget.decode_scale * model.chunk_s(sequence.computed, 1)
            if sequence.request.service.online and not late:
                assert plan.predicted_s <= budget.margin * remaining_s / scale * (1 + 1e-9)


def test_a_deadline_bounds_what_batch_work_adds() -> None:
    clock = Clock(planner(harvest=1.0))
    clock.begin("online", promised(tpot_s=0.03), output=40)
    clock.arrive("filler", BATCH, prompt=600)
    ran = clock.run()
    assert ran["online"] == 1 and 100 <= ran["filler"] <= 180, "as many as fit into 30 ms"
    assert clock.plan is not None and clock.plan.predicted_s <= 0.03
    for _ in range(10):
        clock.run()
    gaps = [b - a for a, b in zip(clock.tokens["online"], clock.tokens["online"][1:], strict=False)]
    assert max(gaps) <= 0.03


def test_a_target_that_iterations_exceed_still_bounds_them() -> None:
    clock = Clock(planner(harvest=1.0, num_blocks=4000))
    clock.arrive("online", promised(tpot_s=0.02, group=4), output=200)
    clock.arrive("prompt", DEFAULT_SERVICE, prompt=1400, output=1)
    while "prompt" not in clock.tokens:
        clock.run()
    mean_s = clock.state._feedback.budget.iteration_s  # type: ignore[union-attr]
    assert 3 * mean_s > 4 * 0.02, "three such iterations leave the first of a group no time"
    clock.arrive("filler", BATCH, prompt=9000)
    for _ in range(20):
        clock.run()
    gaps = [b - a for a, b in pairwise(clock.tokens["online"][-17:])]
    assert sum(gaps) <= len(gaps) * 0.02


@pytest.mark.parametrize(("harvest", "tokens"), [(0.0, 0), (0.5, 60), (1.0, 140)])
def test_the_fill_level_is_the_part_of_the_spare_time_that_batch_work_gets(
    harvest: float, tokens: int
) -> None:
    clock = Clock(planner(harvest=harvest))
    clock.begin("online", promised(tpot_s=0.03), output=40)
    clock.arrive("filler", BATCH, prompt=600)
    assert clock.run().get("filler", 0) == pytest.approx(tokens, abs=45)
    assert (clock.run().get("filler", 0) > 0) is (harvest > 0)


def test_online_prompts_do_not_lose_by_the_bound() -> None:
    clock = Clock(planner())
    clock.begin("old", promised(tpot_s=0.02), output=40)
    clock.arrive("new", promised(ttft_s=1.0), prompt=600)
    assert clock.run() == {"old": 1, "new": 255}, "as without a deadline"
    small = Clock(planner(online_chunk_tokens=32))
    small.begin("old", promised(tpot_s=0.02), output=40)
    small.arrive("new", promised(ttft_s=1.0), prompt=600)
    assert 31 <= small.run()["new"] < 100, "at least what it is promised"


def test_the_prompt_that_is_due_first_starts_first() -> None:
    clock = Clock(planner(max_running=1))
    clock.begin("runs", DEFAULT_SERVICE, output=3)
    for name, service in (
        ("batch", BATCH),
        ("untargeted", DEFAULT_SERVICE),
        ("later", promised(ttft_s=5.0)),
        ("sooner", promised(ttft_s=1.0)),
    ):
        clock.arrive(name, service)
    assert [sequence.seq_id for sequence in clock.state.waiting] == [
        "sooner",
        "later",
        "untargeted",
        "batch",
    ]


def test_a_started_prompt_precedes_an_overtaking_prompt_due_later() -> None:
    clock = Clock(planner(num_blocks=100, max_batch_tokens=64))
    clock.begin("begun", promised(ttft_s=5.0), prompt=300)
    # Due before the begun prompt, but longer than the free blocks hold.
    clock.arrive("long", promised(ttft_s=1.0), prompt=200)
    clock.arrive("later", promised(ttft_s=60.0), prompt=80)
    assert clock.run() == {"begun": 64}
    clock.arrive("sooner", promised(ttft_s=2.0), prompt=40)
    assert clock.run() == {"sooner": 40, "begun": 24}


def test_decodes_that_do_not_fit_wait_for_a_bounded_time() -> None:
    clock = Clock(planner())
    for number in range(20):
        clock.arrive(f"r{number}", promised(tpot_s=0.5, group=1), output=12)
    clock.run()
    clock.begin("tight", promised(tpot_s=0.02), output=12)
    ran = clock.run()
    assert "tight" in ran and len(ran) < 21
    while clock.state.sequences:
        clock.run()
    assert all(len(tokens) == 12 for tokens in clock.tokens.values())


def test_overdue_decodes_run_together_beyond_the_bound() -> None:
    clock = Clock(planner())
    for name in ("a", "b", "c"):
        clock.arrive(name, promised(tpot_s=0.0125), output=12)
    clock.run()
    assert MODEL.batch_s([(8, 1)] * 3) > 0.0125 > MODEL.batch_s([(8, 1)] * 2)
    assert clock.run().keys() == {"a", "b", "c"}


def test_tokens_of_a_group_share_a_deadline() -> None:
    clock = Clock(planner(harvest=1.0))
    clock.begin("online", promised(tpot_s=0.02, group=4), output=40)
    sequence = clock.state.sequences["online"]
    assert sequence.due_s == pytest.approx(clock.now_s + 0.08) and sequence.group_left == 4
    due_s = sequence.due_s
    for left in (3, 2, 1):
        clock.run()
        assert (sequence.due_s, sequence.group_left) == (due_s, left)
    clock.run()
    assert sequence.due_s == pytest.approx(clock.now_s + 0.08)


def test_without_online_work_half_of_the_least_first_token_target_bounds_batch_work() -> None:
    clock = Clock(planner(num_blocks=4000, max_batch_tokens=4096))
    clock.arrive("batch", BATCH, prompt=6000)
    assert clock.run()["batch"] == 4096
    clock = Clock(planner(num_blocks=4000, max_batch_tokens=4096, preempt=Preempt.OFF))
    clock.begin("online", promised(ttft_s=0.2), output=1)
    clock.arrive("batch", BATCH, prompt=6000)
    before_s = clock.now_s
    assert clock.run()["batch"] > 500
    assert 0.08 < clock.now_s - before_s <= 0.1


def test_a_slow_device_corrects_the_model_deterministically() -> None:
    clocks = [Clock(planner(harvest=1.0), slow=1.6) for _ in range(2)]
    late = 0
    for clock in clocks:
        clock.arrive("online", promised(tpot_s=0.05), output=400)
        clock.arrive("batch", BATCH, prompt=500, output=900)
        for _ in range(60):
            clock.run()
        times = clock.tokens["online"]
        late = sum(b - a > 0.0501 for a, b in zip(times[-20:], times[-19:], strict=False))
        assert late == 0, "after some iterations no deadline is missed"
        assert clock.state._feedback is not None
        assert clock.state._feedback.budget.decode_scale == pytest.approx(1.6, abs=0.1)
    assert clocks[0].tokens == clocks[1].tokens
    assert clocks[0].state._feedback == clocks[1].state._feedback


def test_missed_deadlines_lower_the_fill_level_at_once() -> None:
    clock = Clock(planner(harvest=1.0), slow=3.0)
    clock.arrive("online", promised(tpot_s=0.05), output=400)
    clock.arrive("batch", BATCH, prompt=500, output=900)
    levels = []
    for _ in range(6):
        clock.run()
        assert clock.state._feedback is not None
        levels.append(clock.state._feedback.harvest.share)
    assert min(levels) < 0.95


def test_missed_deadlines_and_the_use_of_budgets_are_counted() -> None:
    clock = Clock(planner())
    assert clock.state.deadline_use == DeadlineUse(harvest_share=0.4)
    clock.begin("kept", promised(ttft_s=1.0, tpot_s=0.1))
    clock.run()
    assert clock.plan is not None
    kept = clock.state.deadline_use
    assert kept.budget_s == pytest.approx(0.1), "the time until the next token is due"
    assert kept.budget_used_s == pytest.approx(clock.now_s - clock.plan.planned_s)
    assert not kept.missed_ttft and not kept.missed_tpot
    clock.slow = 20.0
    clock.arrive("late", replace(promised(ttft_s=0.01), service_class=ServiceClass.STANDARD))
    clock.run()
    use = clock.state.deadline_use
    assert use.missed_ttft == {"standard": 1}
    assert use.missed_tpot == {"interactive": 1}
    assert use.budget_used_s > use.budget_s, "the iteration took longer than predicted"


def test_without_a_cost_model_batch_work_fills_the_token_budget() -> None:
    clock = Clock(planner(cost_model=None))
    clock.arrive("batch", BATCH, prompt=600)
    clock.arrive("online", promised(tpot_s=0.03), prompt=56)
    assert clock.run() == {"online": 56, "batch": 200}
    clock.arrive("another", promised(tpot_s=0.03), prompt=56)
    assert clock.run() == {"online": 1, "another": 56, "batch": 199}
    assert clock.run().keys() == {"online", "another", "batch"}, "nothing says which decodes fit"


@pytest.mark.parametrize("seed", range(48))
def test_random_loads_complete_and_online_work_is_first(seed: int) -> None:
    rng = random.Random(seed)
    state = planner(
        num_blocks=rng.choice((24, 60, 200)),
        max_running=rng.choice((2, 6, 32)),
        max_batch_tokens=rng.choice((32, 64, 256)),
        harvest=rng.choice((0.0, 0.5, 1.0)),
        prefix_caching=rng.random() < 0.5,
        cost_model=None if rng.random() < 0.2 else MODEL,
        packing=seed % 2 > 0,
        adaptive_slots=seed % 4 > 1,
        victims=rng.choice((VictimRule.NEWEST, VictimRule.SLACK)),
    )
    run_to_the_end(Clock(state, slow=rng.choice((0.7, 1.0, 2.0))), rng)


def run_to_the_end(clock: Clock, rng: random.Random) -> None:
    """A random load of both kinds: every token of every request arrives."""
    state = clock.state
    wanted: dict[str, int] = {}
    quiet = 0
    for step in range(4000):
        if step < 150 and rng.random() < 0.3:
            name, output = f"r{step}", rng.randint(1, 20)
            target = rng.choice((None, 0.02, 0.05, 1.0))
            online = promised(rng.choice((None, 0.1, 1.0)), target, rng.randint(1, 4))
            service = BATCH if rng.random() < 0.5 else online
            clock.arrive(name, service, rng.randint(1, 60), output)
            wanted[name] = output
        ran = clock.run()
        quiet = 0 if ran else quiet + 1
        plan = clock.plan
        if ran and plan is not None:
            _check(state, plan, ran)
        if not state.sequences and step >= 150:
            break
        assert quiet < 2 or not state.sequences, "work is left, and nothing runs"
    assert {name: len(tokens) for name, tokens in clock.tokens.items()} == wanted


def _check(state: PlannerState, plan: Plan, ran: dict[str, int]) -> None:
    """With `slo` no batch work runs beside an online request that lacks blocks or a place."""
    if state.config.scheduling is not Scheduling.SLO:
        return
    everybody = plan.sequences()
    harvester = [sequence for sequence in everybody if not sequence.request.service.online]
    if len(harvester) in (0, len(everybody)):
        return
    left = state.config.max_batch_tokens - sum(ran.values())
    waiting = [sequence for sequence in state.waiting if sequence.request.service.online]
    assert not (waiting and left), (
        f"{[sequence.seq_id for sequence in waiting]} wait beside batch work"
    )


def test_an_online_request_runs_while_batch_work_holds_every_block() -> None:
    clock = Clock(planner(num_blocks=20, max_running=2))
    for name in ("b1", "b2"):
        clock.begin(name, BATCH, prompt=30, output=8)
    clock.arrive("online", promised(ttft_s=0.1), prompt=40)
    assert clock.run()["online"] == 40
    assert clock.state.sequences["b2"].phase is Phase.WAITING


def test_priority_and_fcfs_keep_no_deadlines() -> None:
    for scheduling in (Scheduling.FCFS, Scheduling.PRIORITY):
        config = replace(planner().config, scheduling=scheduling)
        clock = Clock(PlannerState(config))
        clock.begin("online", promised(tpot_s=0.02), output=40)
        clock.arrive("batch", BATCH, prompt=600)
        assert clock.run()["batch"] == 255


def test_conserve_trusts_the_model_and_fills_all_time() -> None:
    clock = Clock(planner(scheduling=Scheduling.CONSERVE, harvest=0.1), slow=2.0)
    clock.begin("online", promised(tpot_s=0.03), output=40)
    clock.arrive("filler", BATCH, prompt=1500)
    for _ in range(8):
        assert clock.run()["filler"] > 0 and clock.plan is not None
        assert clock.plan.predicted_s == pytest.approx(0.03, abs=1e-3), "whatever they take"
    feedback = clock.state._feedback
    assert feedback is not None and feedback.harvest.share == feedback.budget.margin == 1.0


def test_conserve_leaves_no_decode_out() -> None:
    clock = Clock(planner(scheduling=Scheduling.CONSERVE))
    for number in range(20):
        clock.arrive(f"r{number}", promised(tpot_s=0.5), output=12)
    clock.run()
    clock.begin("tight", promised(tpot_s=0.02), output=12)
    assert len(clock.run()) == 21


def test_a_waiting_backlog_leaves_no_online_decode_out() -> None:
    """Times of mixed iterations do not predict an iteration without prompts."""
    clock = Clock(planner(harvest=0.0))
    for number in range(8):
        clock.arrive(f"o{number}", promised(tpot_s=0.03), output=200)
    clock.run()
    assert clock.state._feedback is not None
    clock.state._feedback.budget.mixed_scale = 3.0
    clock.arrive("filler", BATCH, prompt=64)
    for _ in range(5):
        assert len(clock.run()) == 8


def test_the_fill_level_rises_again_when_nothing_fits() -> None:
    clock = Clock(planner())
    clock.begin("online", promised(tpot_s=0.03), output=400)
    assert clock.state._feedback is not None
    clock.state._feedback.harvest.share = 0.02
    clock.arrive("filler", BATCH, prompt=200)
    assert "filler" not in clock.run()
    ran = [clock.run() for _ in range(60)]
    assert any("filler" in sequence for sequence in ran)


def test_a_nearly_finished_batch_prompt_does_not_delay_others() -> None:
    clock = Clock(planner(harvest=1.0, num_blocks=9000))
    clock.arrive("long", BATCH, prompt=30_000)
    while clock.state.sequences["long"].computed < 15_000:
        clock.run()
    clock.begin("online", promised(tpot_s=0.03), output=400)
    stands = clock.state.sequences["long"].computed
    clock.arrive("short", BATCH, prompt=40, output=2)
    ran = [clock.run() for _ in range(20)]
    assert clock.state.sequences["long"].computed == stands, "its next chunk never fits"
    assert any("short" in sequence for sequence in ran)


def test_a_long_batch_prompt_ends_beside_online_work() -> None:
    clock = Clock(planner(num_blocks=4000))
    clock.arrive("long", BATCH, prompt=4500, output=2)
    while clock.state.sequences["long"].computed < 4000:
        clock.run()
    clock.arrive("online", promised(tpot_s=0.03), output=1200)
    for _ in range(1000):
        clock.run()
    assert len(clock.tokens["long"]) == 2
    gaps = [b - a for a, b in zip(clock.tokens["online"], clock.tokens["online"][1:], strict=False)]
    assert max(gaps[1:]) <= 0.03
