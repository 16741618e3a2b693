"""Planning time of up to 256 sequences, relative to an iteration of a 7B model.

The planner decides as in an engine, and a cost model says how long its iterations take. Cases take
turns, so that a busy machine disturbs all alike, and the time is that of the processor. All
sequences decode; a quarter is of the class batch, and more batch requests wait. `fcfs` is what a
worker does without classes.

With `fills`, long batch prompts fill the time that deadlines leave: iterations in which these run
beside decodes count. With `parts`, all parts of BROS are on (`packing`, `adaptive_slots`, `victims:
slack`), and every second online request has ten times its target. Cases of few sequences measure
what a decision costs at all; they have no bar.
"""

import time
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from services.core.cost.model import Coefficients, CostModel
from services.core.planner.config import IterationConfig
from services.core.planner.events import EmitToken, IterationFinished, RequestArrived
from services.core.planner.harvester import BATCH_CHUNK_MIN_TOKENS
from services.core.planner.state import PlannerState
from services.core.planner.victims import VictimRule
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass
from tests.perf.measuring import show

MODEL_7B = CostModel(
    alpha=2.801e-9,
    beta=6.919e-5,
    gamma=1.264e-2,
    lam=1.262e-2,
    kappa=4.215e-7,
    decode=Coefficients(alpha=4.215e-7, beta=0.0, gamma=1.264e-2),
)
"""Llama-2-7B on an A100 40GB, by the formulas and efficiencies of `A100-14B.yaml`."""
KV_TOKENS, BLOCK_SIZE = 45_000, 16
SEQUENCES, BATCH_EVERY, WAITING = 256, 4, 32
PROMPT_TOKENS, LONG_PROMPT_TOKENS, OUTPUT_TOKENS = 100, 600, 80
MAX_BATCH_TOKENS = 512
ROUNDS = 20
PATIENCE = 10
ADDED_MAX, SHARE_MAX = 0.01, 0.04
"""Limits of planning time over iteration time: beyond `fcfs`, and in total."""


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The load of a case; online requests are promised `tpot_s` for each token."""

    scheduling: Scheduling
    tpot_s: float = 0.2
    fills: bool = False
    parts: bool = False
    sequences: int = SEQUENCES
    waiting: int = WAITING


CASES = {
    "fcfs": PlannedLoad(Scheduling.FCFS),
    "priority": PlannedLoad(Scheduling.PRIORITY),
    "slo": PlannedLoad(Scheduling.SLO),
    "slo, targets that bind": PlannedLoad(Scheduling.SLO, tpot_s=0.02),
    "slo, filled with batch prompts": PlannedLoad(Scheduling.SLO, tpot_s=0.06, fills=True),
    "slo, parts of BROS": PlannedLoad(Scheduling.SLO, tpot_s=0.045, parts=True),
}
FEW = {
    f"fcfs of {count}": PlannedLoad(Scheduling.FCFS, sequences=count, waiting=0)
    for count in (1, 16, 64)
}


class Iteration(NamedTuple):
    """A measured iteration."""

    sequences: int
    prompt_tokens: int
    planning_s: float
    iteration_s: float


class PlannerRun:
    """A planner under load, and its measured iterations."""

    def __init__(self, case: PlannedLoad) -> None:
        config = IterationConfig(
            block_size=BLOCK_SIZE,
            num_blocks=KV_TOKENS // BLOCK_SIZE,
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_running=SEQUENCES,
            max_waiting=2 * (SEQUENCES + WAITING),
            cost_model=MODEL_7B,
            prefix_caching=True,
            scheduling=case.scheduling,
            packing=case.parts,
            adaptive_slots=case.parts,
            victims=VictimRule.SLACK if case.parts else VictimRule.NEWEST,
        )
        self.state, self.case, self.now_s, self.arrived = PlannerState(config), case, 0.0, 0
        self.batch_work: set[str] = set()
        self.iterations: list[Iteration] = []

    def arrive(self) -> None:
        """Add the next request."""
        name, batch = f"r{self.arrived}", self.arrived % BATCH_EVERY == 0
        service, tokens = Service(ServiceClass.BATCH), PROMPT_TOKENS
        if batch:
            self.batch_work.add(name)
            tokens = LONG_PROMPT_TOKENS if self.case.fills else PROMPT_TOKENS
        else:
            patience = PATIENCE if self.case.parts and self.arrived % 2 == 1 else 1
            tpot_s = self.case.tpot_s * patience
            service = Service(ServiceClass.INTERACTIVE, ttft_s=1.0, tpot_s=tpot_s)
        prompt = tuple(range(self.arrived, self.arrived + tokens))
        sampling, limits = Sampling(temperature=0.0), Limits(OUTPUT_TOKENS)
        request = Request(name, prompt, sampling, limits, self.now_s, service=service)
        self.arrived += 1
        self.state.handle(RequestArrived(self.now_s, request))

    def step(self) -> int:
        """Plan and end one iteration; return how many sequences ended."""
        began_s = time.thread_time()
        microbatch = self.state.plan(self.now_s)
        planned_s = time.thread_time() - began_s
        assert microbatch is not None, "no sequence runs"
        chunks = microbatch.batch.chunks
        took_s = MODEL_7B.batch_s((chunk.start, len(chunk.token_ids)) for chunk in chunks)
        sampled = {chunk.seq_id: 7 for chunk in chunks if chunk.sample is not None}
        self.now_s += took_s
        event = IterationFinished(self.now_s, sampled, microbatch.number)
        began_s = time.thread_time()
        commands = self.state.handle(event)
        planned_s += time.thread_time() - began_s
        prompts = [chunk for chunk in chunks if len(chunk.token_ids) > 1]
        only_batch = all(chunk.seq_id in self.batch_work for chunk in prompts)
        if only_batch and bool(prompts) == self.case.fills:
            tokens = sum(len(chunk.token_ids) for chunk in prompts)
            self.iterations.append(Iteration(len(chunks), tokens, planned_s, took_s))
        return sum(
            isinstance(command, EmitToken) and command.finish_reason is not None
            for command in commands
        )

    def middle(self) -> Iteration:
        """Medians over the iterations with the most sequences."""
        most = max(each.sequences for each in self.iterations)
        counted = [each for each in self.iterations if each.sequences >= 0.9 * most]
        return Iteration(*map(median, zip(*counted, strict=True)))


def measured() -> dict[str, PlannerRun]:
    """Measure all cases; in each round all requests arrive and end."""
    runs = {name: PlannerRun(case) for name, case in (CASES | FEW).items()}
    for _ in range(ROUNDS):
        left = {name: run.case.sequences + run.case.waiting for name, run in runs.items()}
        for name, run in runs.items():
            for _ in range(left[name]):
                run.arrive()
        while any(left.values()):
            for name, run in runs.items():
                if left[name]:
                    left[name] -= run.step()
    return runs


def test_planning_is_a_small_part_of_an_iteration() -> None:
    middles = {name: run.middle() for name, run in measured().items()}
    shares = {name: each.planning_s / each.iteration_s for name, each in middles.items()}
    rows = {
        name: f"{1e3 * each.planning_s:.4f} ms of {1e3 * each.iteration_s:.1f} ms:"
        f" {shares[name]:.2%}; {each.sequences:.0f} sequences,"
        f" {each.prompt_tokens:.0f} tokens of prompts"
        for name, each in middles.items()
    }
    show("planning time of an iteration", rows)
    counts = {name: each.sequences for name, each in middles.items()}
    assert [counts[name] for name in FEW] == [1, 16, 64]
    assert counts["fcfs"] == counts["priority"] == counts["slo"] == SEQUENCES
    assert counts["slo, targets that bind"] < SEQUENCES < 2 * counts["slo, parts of BROS"]
    filled = middles["slo, filled with batch prompts"]
    assert filled.sequences > SEQUENCES / 2
    assert BATCH_CHUNK_MIN_TOKENS <= filled.prompt_tokens < MAX_BATCH_TOKENS - filled.sequences
    for name in CASES:
        assert shares[name] <= shares["fcfs"] + ADDED_MAX, name
        assert name == "fcfs" or shares[name] <= SHARE_MAX, name
