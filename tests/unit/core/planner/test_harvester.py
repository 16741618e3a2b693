"""Online decodes that run if not all fit, compared with a greedy reference rule.

Blocks and cost of batch work.
"""

import random
from collections import deque
from math import inf

import pytest

from services.core.cost.model import CostModel
from services.core.planner import deadline
from services.core.planner.bros_planner import BrosPlanner
from services.core.planner.budget import Spent
from services.core.planner.config import IterationConfig
from services.core.planner.events import RequestArrived
from services.core.planner.feedback import Feedback, feedback_of
from services.core.planner.harvester import STARVED_EVERY, Harvester
from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.slo import SloPlanner
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass

SEEDS = 300
NOW_S = 10.0
COSTS = CostModel(alpha=0.0, beta=1e-4, gamma=0.011, lam=0.01)


def config(random_: random.Random) -> IterationConfig:
    tokens = random_.choice((4, 12, 64))
    return IterationConfig(
        block_size=4,
        num_blocks=400,
        max_batch_tokens=tokens,
        max_running=min(tokens, random_.choice((2, 8, 64))),
        max_waiting=100,
        scheduling=Scheduling.SLO,
        adaptive_slots=random_.random() < 0.5,
        cost_model=CostModel(
            alpha=random_.choice((1e-6, 3e-5)),
            beta=1e-4,
            gamma=0.011,
            lam=0.01,
            knee=random_.choice((0, 6)),
            mu=random_.choice((0.0, 1e-3)),
        ),
    )


def decode(random_: random.Random, number: int) -> Sequence:
    tpot_s = random_.choice((None, 0.01, 0.05))
    group = random_.choice((1, 4)) if tpot_s is not None else 1
    service = Service(ServiceClass.INTERACTIVE, 1.0, tpot_s, group)
    prompt = tuple(range(1, random_.choice((3, 20, 300))))
    sequence = Sequence(
        Request(f"r{number}", prompt, Sampling(), Limits(8), 0.0, service=service), number, 0.0
    )
    sequence.computed = len(prompt) - 1
    sequence.token_s = NOW_S - random_.random()
    sequence.due_s = inf if tpot_s is None else NOW_S + random_.choice((-0.01, 0.005, 0.02, 0.06))
    sequence.group_left = random_.randint(1, group)
    return sequence


def one_by_one(
    decodes: list[Sequence], harvester: Harvester, spent: Spent, limit_s: float, iteration_s: float
) -> list[Sequence]:
    """The most urgent first: each that fits, and each overdue one, while tokens are left."""
    chosen: list[Sequence] = []

    def residual_s(sequence: Sequence) -> float:
        return deadline.residual_or_implied_s(sequence, NOW_S, iteration_s)

    for decode_ in sorted(decodes, key=residual_s):
        prefix_tokens = sum(other.computed for other in [*chosen, decode_])
        in_time = spent.decodes_s(len(chosen) + 1, prefix_tokens) <= limit_s
        fits = in_time and len(chosen) < harvester.slots.limit
        if len(chosen) < spent.tokens_left and (
            fits or not chosen or residual_s(decode_) < iteration_s
        ):
            chosen.append(decode_)
    return [decode_ for decode_ in decodes if decode_ in chosen]


def test_the_most_urgent_fitting_and_all_overdue_decodes_run() -> None:
    left_out = skipped = 0
    for seed in range(SEEDS):
        random_ = random.Random(seed)
        bounds = config(random_)
        feedback = feedback_of(bounds.scheduling, 1.0)
        assert isinstance(feedback, Feedback) and bounds.cost_model is not None
        feedback.budget.note_time(random_.choice((0.004, 0.012, 0.03)))
        harvester = Harvester(bounds, PlannerState(bounds).sequence_table, feedback)
        decodes = [decode(random_, number) for number in range(random_.randint(0, 24))]
        spent = Spent(bounds.cost_model, bounds.max_batch_tokens)
        limit_s = random_.choice((0.005, 0.013, 0.02, 0.04))
        iteration_s = feedback.budget.iteration_s
        chosen = harvester.most_urgent(decodes, spent, limit_s, NOW_S)
        assert chosen == one_by_one(decodes, harvester, spent, limit_s, iteration_s), seed
        left_out += len(chosen) < len(decodes)
        order = sorted(
            decodes, key=lambda decode_: deadline.residual_or_implied_s(decode_, NOW_S, iteration_s)
        )
        skipped += chosen != [decode_ for decode_ in decodes if decode_ in order[: len(chosen)]]
    assert left_out > SEEDS / 2 and skipped > 3, "the cases are not those that this is for"


def batch_world(
    *prompts: int, scheduling: Scheduling = Scheduling.SLO
) -> tuple[SloPlanner | BrosPlanner, list[Sequence]]:
    """A planner with running batch sequences with prompts of so many tokens, oldest first."""
    bounds = IterationConfig(
        block_size=4,
        num_blocks=16,
        max_batch_tokens=64,
        max_running=8,
        max_waiting=10,
        scheduling=scheduling,
        block_sharing=True,
        harvest=0.01,
        cost_model=COSTS,
    )
    state = PlannerState(bounds)
    for number, tokens in enumerate(prompts):
        prompt, service = tuple(range(1, tokens + 1)), Service(ServiceClass.BATCH)
        request = Request(f"r{number}", prompt, Sampling(), Limits(8), 0.0, service=service)
        state.handle(RequestArrived(0.0, request))
        state.sequence_table.admit(state.sequences[f"r{number}"], bounds.max_running)
    planner = state._planner
    assert isinstance(planner, SloPlanner | BrosPlanner)
    return planner, list(state.running)


def shrink(planner: SloPlanner | BrosPlanner, sequence: Sequence, blocks: int) -> None:
    """Take the last blocks of a sequence, as from a batch sequence that loses its tail."""
    planner.sequence_table.table.truncate(sequence.seq_id, blocks)
    sequence.blocks, sequence.computed = blocks, blocks * planner.config.block_size


def take_free_blocks(planner: SloPlanner | BrosPlanner, but: int = 0) -> None:
    """Fill the KV cache except for `but` blocks; not twice."""
    table = planner.sequence_table
    table.table.adopt("others", table.ledger.free - but)


@pytest.mark.parametrize("free", [0, 1])
def test_a_prompt_that_finds_no_block_does_not_starve_those_behind_it(free: int) -> None:
    """The oldest has lost its shared tail, and the next fits into the whole slack only."""
    planner, (oldest, behind) = batch_world(8, 32)
    shrink(planner, oldest, 1)
    take_free_blocks(planner, but=free)
    plan, spent, harvester = Plan(STARVED_EVERY), Spent(COSTS, 64), planner.harvester
    harvester.harvest_slack(plan, harvester.scan(0.0), spent, limit_s=0.02)
    assert [chunk.sequence for chunk in plan.prefills] == [oldest if free else behind]


@pytest.mark.parametrize("scheduling", [Scheduling.SLO, Scheduling.CONSERVE, Scheduling.BROS])
def test_a_lost_tail_takes_no_blocks_of_others_that_can_run(scheduling: Scheduling) -> None:
    planner, (oldest, newest) = batch_world(8, 8, scheduling=scheduling)
    shrink(planner, oldest, 1)
    newest.computed = 7
    take_free_blocks(planner)
    for expected in ([newest], [oldest]):
        plan = Plan(1)
        planner.schedule(plan, deque())
        assert plan.sequences() == expected
        newest.computed = 8  # it waits for the sampled token
    assert newest.phase is Phase.WAITING


def test_preempted_work_leaves_the_cost_of_the_iteration() -> None:
    """The sequence with host copies is preempted for the block of a newer one."""
    planner, sequences = batch_world(8, 8, 9)
    for sequence in sequences:
        sequence.computed = sequence.prompt_tokens - 1
    first, saved, growing = sequences
    saved.registered = saved.saved = 1
    shrink(planner, growing, 2)
    take_free_blocks(planner)
    plan = Plan(1)
    planner.schedule(plan, deque())
    assert plan.decodes == [first, growing] and saved.phase is Phase.WAITING
    alone = Spent(COSTS, 64)
    alone.add_decodes(2, first.computed + growing.computed)
    assert plan.cost_s == pytest.approx(alone.seconds)
