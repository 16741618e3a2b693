"""`coserve --phases`: ConServe's mechanisms one by one under phases of online requests (Figure 4).

Online requests arrive at the rate of `coserve` for half of each phase, the highest at which they
meet their target of the first token alone, and not at all for the other half. In busy halves they
need most of the KV cache, so batch requests lose their KV. The steps add: iterations within
deadlines (`budget`), batch work in their slack (`fill`), interruption of batch iterations
(`preempt`), copies of KV in host memory (`save`), and their return while other requests run
(`prefetch`). `conserve` and `bros`, as their papers describe them, run with and without host
memory. `bros` preempts online requests, too, so their KV is copied as well.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random

from benchmarks.co_serving.bars import PHASES as RULES
from benchmarks.co_serving.online_load import OnlineLoad
from benchmarks.scenarios import coserve
from benchmarks.scenarios.scenario import PHASES, Case, CoServing, LoadChoice, Scenario
from tideserve.load.workload import PlannedRequest
from tideserve.sim.workload import phased_times

STEPS = {
    "budget": "slo-idle-patient",
    "+ fill": "slo-patient",
    "+ preempt": "slo",
    "+ save": "slo-save",
    "+ prefetch": "slo-host",
}
PAPERS = ("conserve", "conserve-host", "bros", "bros-host-all")
PHASE_S = 10.0
"""Duration of a phase at the pace of the device, half of it with online requests."""
PHASES_QUICK, PHASES_FULL = 3, 6


def load_for(choice: LoadChoice) -> OnlineLoad:
    """The load of `coserve`, for whole phases."""
    load = coserve.load_for(choice)
    slowdown = choice.slowdown if choice.paced else 1.0
    phases = PHASES_QUICK if choice.quick else PHASES_FULL
    return replace(load, window_s=phases * PHASE_S * slowdown)


def cases(choice: LoadChoice) -> Sequence[Case]:
    """An open loop in phases beside the backlog of `coserve`."""
    load = load_for(choice)
    phases = PHASES_QUICK if choice.quick else PHASES_FULL
    what = (
        f"{phases} phases, half of each with {load.rate_per_s:.3g} online requests per second"
        f" of {coserve.ONLINE_PROMPT} prompt and {coserve.ONLINE_OUTPUT} output tokens,"
    )
    online = partial(_online, choice.seed, load, phases)
    return (coserve.co_served(PHASES, what, load, online, coserve.backlog_for(choice)),)


def _online(seed: int, load: OnlineLoad, phases: int, turn: int) -> Sequence[PlannedRequest]:
    """The requests of round `turn`; the first is at its start, the last at the window's end."""
    half_s = load.window_s / phases / 2
    spans = [
        (load.window_from_s, load.rate_per_s),
        *[(half_s, load.rate_per_s), (half_s, 0.0)] * phases,
    ]
    name = f"{PHASES} {seed} {turn}"
    rng = Random(name)
    times_s = [0.0, *phased_times(spans, 1.0, rng), load.last_s]
    prompt, output = (lambda rng: coserve.ONLINE_PROMPT), (lambda rng: coserve.ONLINE_OUTPUT)
    return coserve.requests_at(times_s, name, load, prompt, output, rng)


SCENARIO = Scenario(
    name=PHASES,
    systems=(*STEPS.values(), *PAPERS),
    memory="1GiB",
    paced_systems=(*STEPS.values(), *PAPERS),
    # 26,000 tokens of KV per worker: 13 batch requests, or 36 online requests.
    paced_memory="32MiB",
    cases=cases,
    rounds=(1, 3),
    steps=STEPS,
    up_options=coserve.SCENARIO.up_options,
    options=frozenset({"rate", PHASES}),
    co_serving=CoServing(load_for, RULES),
)
