"""`planning`: the time of planning up to 256 sequences, beside an iteration of a 7B model.

Nothing is served: the planner of a worker decides as in an engine, and a cost model says how long
its iterations take. Systems take turns, so that a busy machine disturbs all alike, and the time is
that of the processor. All sequences decode; a quarter is of the class batch, more batch requests
wait. `fcfs` is what a worker does without classes; the others pay for what they know.

One case looks at other iterations: online requests decode, and long batch prompts fill the
time that deadlines leave, so that chunks are searched which fit. Those in which prompts of batch
requests run beside most of the online requests count.

Some look at few sequences, first come: what the decision costs at all. No bar is for them.

Another one has all parts of BROS on (`packing`, `adaptive_slots`, `victims: slack`), and every
second online request has ten times its target, so that batch requests take its turns.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.scenarios.scenario import LoadChoice, Trial, TrialVerdict
from benchmarks.systems.system import Deployment, Say
from services.core.cost.model import Coefficients, CostModel
from services.core.line_order import Scheduling
from services.core.planner.config import IterationConfig
from services.core.planner.events import EmitToken, IterationFinished, RequestArrived
from services.core.planner.state import PlannerState
from services.core.planner.victims import VictimRule
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass

MODEL_7B = CostModel(
    alpha=2.801e-9,
    beta=6.919e-5,
    gamma=1.264e-2,
    lam=1.262e-2,
    kappa=4.215e-7,
    decode=Coefficients(alpha=4.215e-7, beta=0.0, gamma=1.264e-2),
)
"""Llama-2-7B on an A100 40GB, by the formulas and efficiencies of `A100-14B.yaml`."""
KV_TOKENS = 45_000
"""KV tokens of that worker."""
SEQUENCES, BATCH_EVERY, WAITING = 256, 4, 32
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 80
MAX_BATCH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """What is planned: online requests are promised `tpot_s` for each token.

    With `fills`, batch requests have prompts of `LONG_PROMPT_TOKENS`, and what counts are the
    iterations in which some of these run. `parts`: those of BROS. `waiting` more requests come in
    each round than run at once.
    """

    scheduling: Scheduling
    tpot_s: float = 0.2
    fills: bool = False
    parts: bool = False
    sequences: int = SEQUENCES
    waiting: int = WAITING

    @property
    def arrivals(self) -> int:
        """Requests of a round."""
        return self.sequences + self.waiting


LONG_PROMPT_TOKENS = 600
SYSTEMS = {
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
FULL_ROUNDS, QUICK_ROUNDS = 20, 5
PATIENCE = 10
"""The targets of every second online request over those of the others, with the parts of BROS."""
ADDED_MAX, SHARE_MAX = 0.01, 0.04


@dataclass(slots=True)
class _Planned:
    """A planner under load: what each iteration cost to plan, and how long it takes."""

    state: PlannerState
    case: PlannedLoad
    now_s: float = 0.0
    arrived: int = 0
    batch_work: set[str] = field(default_factory=set)
    planning_s: list[float] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)

    def arrive(self) -> None:
        """The next request comes."""
        batch = self.arrived % BATCH_EVERY == 0
        service = Service(ServiceClass.BATCH)
        if not batch:
            patient = self.case.parts and self.arrived % 2 == 1
            tpot_s = self.case.tpot_s * (PATIENCE if patient else 1)
            service = Service(ServiceClass.INTERACTIVE, ttft_s=1.0, tpot_s=tpot_s)
        tokens = LONG_PROMPT_TOKENS if batch and self.case.fills else PROMPT_TOKENS
        prompt = tuple(range(self.arrived, self.arrived + tokens))
        request = Request(
            f"r{self.arrived}",
            prompt,
            Sampling(temperature=0.0),
            Limits(OUTPUT_TOKENS),
            self.now_s,
            service=service,
        )
        self.arrived += 1
        if batch:
            self.batch_work.add(request.request_id)
        self.state.handle(RequestArrived(self.now_s, request))

    def step(self) -> int:
        """One iteration; returns how many sequences ended."""
        began_s = time.thread_time()
        microbatch = self.state.plan(self.now_s)
        planned_s = time.thread_time() - began_s
        assert microbatch is not None, "there is always something to run"
        chunks = microbatch.batch.chunks
        took_s = MODEL_7B.batch_s((chunk.start, len(chunk.token_ids)) for chunk in chunks)
        sampled = {chunk.request_id: 7 for chunk in chunks if chunk.sample is not None}
        self.now_s += took_s
        event = IterationFinished(self.now_s, sampled, microbatch.number)
        began_s = time.thread_time()
        commands = self.state.handle(event)
        planned_s += time.thread_time() - began_s
        prompts = [chunk for chunk in chunks if len(chunk.token_ids) > 1]
        batch_prompts = [one for one in prompts if one.request_id in self.batch_work]
        if len(prompts) == len(batch_prompts) and bool(prompts) == self.case.fills:
            self.planning_s.append(planned_s)
            self.iteration_s.append(took_s)
            self.sequences.append(len(chunks))
            self.prompt_tokens.append(sum(len(one.token_ids) for one in prompts))
        return sum(isinstance(one, EmitToken) and one.finish_reason is not None for one in commands)


def run(_deployment: Deployment, choice: LoadChoice, _line: Say, doing: Say) -> TrialVerdict:
    """Measure in this process."""
    doing(f"planning up to {SEQUENCES} sequences")
    return judge(measure(QUICK_ROUNDS if choice.quick else FULL_ROUNDS))


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """In each round all sequences of every system arrive and end."""
    planned = {name: _planner(case) for name, case in (SYSTEMS | FEW).items()}
    for _ in range(rounds):
        left = {}
        for name, one in planned.items():
            for _ in range(one.case.arrivals):
                one.arrive()
            left[name] = one.case.arrivals
        while any(left.values()):
            for name, one in planned.items():
                if left[name]:
                    left[name] -= one.step()
    return {name: _figures(one) for name, one in planned.items()}


def judge(figures: Mapping[str, Mapping[str, float]]) -> TrialVerdict:
    """Figures, and a problem for each bar that is missed."""
    base = figures["fcfs"]["share"]
    problems = []
    for name, found in figures.items():
        if name in FEW:
            continue
        if found["share"] - base > ADDED_MAX:
            problems.append(
                f"{name} adds {100 * (found['share'] - base):.2f} points of an iteration to"
                f" planning; at most {100 * ADDED_MAX:g} is right"
            )
        if name != "fcfs" and found["share"] > SHARE_MAX:
            problems.append(f"{name} plans for {found['share']:.1%} of an iteration")
    return TrialVerdict({"planning": figures, "problems": problems}, rows(figures), problems)


def rows(figures: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str]]:
    """The figures for people."""
    base = figures["fcfs"]["share"]
    told = []
    for name, found in figures.items():
        compared = name != "fcfs" and name not in FEW
        added = f"; {100 * (found['share'] - base):+.2f} points" if compared else ""
        beside = ""
        if found["prompt_tokens"]:
            beside = f" and {found['prompt_tokens']:.0f} tokens of prompts"
        told.append(
            (
                name,
                f"{1e3 * found['planning_s']:.4f} ms of {1e3 * found['iteration_s']:.1f} ms with"
                f" {found['sequences']:.0f} sequences{beside}: {found['share']:.2%}{added}",
            )
        )
    bars = f"{100 * ADDED_MAX:g} point more than fcfs, {SHARE_MAX:.0%} in all"
    return [*told, ("bars", bars)]


def _planner(case: PlannedLoad) -> _Planned:
    block_size = 16
    config = IterationConfig(
        block_size=block_size,
        num_blocks=KV_TOKENS // block_size,
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
    return _Planned(PlannerState(config), case)


def _figures(planned: _Planned) -> dict[str, float]:
    """Medians over the iterations that count and have most sequences."""
    most = max(planned.sequences)
    large = [number for number, count in enumerate(planned.sequences) if count >= 0.9 * most]

    def middle(values: Sequence[float]) -> float:
        return median(values[number] for number in large)

    planning_s, iteration_s = middle(planned.planning_s), middle(planned.iteration_s)
    return {
        "planning_s": planning_s,
        "iteration_s": iteration_s,
        "share": planning_s / iteration_s,
        "sequences": middle(planned.sequences),
        "prompt_tokens": middle(planned.prompt_tokens),
        "iterations": float(len(large)),
    }


TRIAL = Trial(
    name="planning",
    summary="what planning up to 256 sequences takes of an iteration of a 7B model, by scheduling",
    memory="64MiB",
    run=run,
)
