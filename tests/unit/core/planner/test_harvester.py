"""Online decodes that run if not all fit, compared with a greedy reference rule; starved prompts."""

import random
from math import inf

from services.core.cost.model import TOKEN_COSTS, CostModel
from services.core.planner import deadline
from services.core.planner.budget import Spent
from services.core.planner.config import IterationConfig
from services.core.planner.events import RequestArrived
from services.core.planner.feedback import Feedback, feedback_of
from services.core.planner.harvester import STARVED_EVERY, Harvester
from services.core.planner.plan import Plan
from services.core.planner.sequence import Sequence
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass

SEEDS = 300
NOW_S = 10.0


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


def test_a_prompt_that_finds_no_block_does_not_starve_those_behind_it() -> None:
    """The oldest has lost its shared tail, and the next fits into the whole slack only."""
    bounds = IterationConfig(
        block_size=4,
        num_blocks=12,
        max_batch_tokens=64,
        max_running=8,
        max_waiting=10,
        scheduling=Scheduling.SLO,
        block_sharing=True,
        harvest=0.01,
        cost_model=CostModel(alpha=0.0, beta=1e-4, gamma=0.011, lam=0.01),
    )
    state = PlannerState(bounds)
    table, feedback = state.sequence_table, feedback_of(bounds.scheduling, bounds.harvest)
    assert feedback is not None
    for number, tokens in enumerate((8, 32)):
        prompt = tuple(range(1, tokens + 1))
        service = Service(ServiceClass.BATCH)
        request = Request(f"r{number}", prompt, Sampling(), Limits(8), 0.0, service=service)
        state.handle(RequestArrived(0.0, request))
        table.admit(state.sequences[f"r{number}"], bounds.max_running)
    lost, behind = state.running
    table.table.truncate(lost.seq_id, 1)
    lost.blocks, lost.computed = 1, 4
    harvester = Harvester(bounds, table, feedback)
    for free, chosen in ((0, behind), (1, lost)):
        table.table.adopt("others", table.ledger.free - free)
        plan = Plan(STARVED_EVERY)
        spent = Spent(harvester.config.cost_model or TOKEN_COSTS, bounds.max_batch_tokens)
        harvester.harvest_slack(plan, harvester.scan(0.0), spent, limit_s=0.02)
        assert [chunk.sequence.seq_id for chunk in plan.prefills] == [chosen.seq_id]
        table.table.release("others")
