"""`batch`: the load of llm-d's batch gateway during a batch of /v1/batches.

Online requests have 512 prompt tokens and log-normal outputs of 500 ± 400 tokens, cut at 1,400.
They arrive by a Poisson process in phases of 15 and of 1 per second; --rate sets the mean of both.
The lines of the batch have ConServe's lengths (`coserve`), and `online-only` has no batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random

from benchmarks.co_serving.bars import BATCH_API, FILES
from benchmarks.co_serving.online_load import OnlineLoad, OnlineTargets
from benchmarks.scenarios import coserve
from benchmarks.scenarios.scenario import Case, CoServing, LoadChoice, Scenario
from tideserve.load.workload import PlannedRequest
from tideserve.sim.workload import Length, phased_times

NAME = "batch"
PROMPT = 512
OUTPUT = Length(500, 400 / 500, least=4, most=1400)
BUSY_PER_S, CALM_PER_S = 15.0, 1.0
PHASES = 4
"""Phases of a window: busy, calm, busy, calm. A calm phase precedes it."""
LOAD = OnlineLoad(
    (BUSY_PER_S + CALM_PER_S) / 2,
    OnlineTargets(ttft_s=0.45, tpot_s=0.096),
    window_s=PHASES * 12.0,
    drain_s=20.0,
)
UNPACED_SLOWDOWN = 10.0
"""Two cores as a multiple of the times of two H100: an estimate."""
SYSTEMS = ("online-only", FILES)


def load_for(choice: LoadChoice) -> OnlineLoad:
    """The load for the device of a run."""
    load = LOAD.slowed(choice.slowdown if choice.paced else UNPACED_SLOWDOWN)
    return replace(load, rate_per_s=choice.rate_per_s or load.rate_per_s)


def cases(choice: LoadChoice) -> Sequence[Case]:
    """An open loop beside a batch."""
    load = load_for(choice)
    busy, calm = (rate * load.rate_per_s / LOAD.rate_per_s for rate in (BUSY_PER_S, CALM_PER_S))
    statement = (
        f"phases of {busy:.3g} and {calm:.3g} online requests per second of {PROMPT} prompt and"
        f" {OUTPUT.mean:g} ± {OUTPUT.mean * OUTPUT.cv:g} output tokens,"
    )
    online = partial(_online, choice.seed, load, busy, calm)
    return (coserve.co_served(NAME, statement, load, online, coserve.backlog_for(choice)),)


def _online(
    seed: int, load: OnlineLoad, busy: float, calm: float, turn: int
) -> Sequence[PlannedRequest]:
    """The requests of round `turn`; the first is at its start, the last at the window's end."""
    phase_s = load.window_s / PHASES
    phases = [(load.window_from_s, calm), *[(phase_s, busy), (phase_s, calm)] * (PHASES // 2)]
    name = f"{NAME} {seed} {turn}"
    rng = Random(name)
    times_s = [0.0, *phased_times(phases, 1.0, rng), load.last_s]
    return coserve.requests_at(times_s, name, load, lambda rng: PROMPT, OUTPUT.draw, rng)


SCENARIO = Scenario(
    name=NAME,
    systems=SYSTEMS,
    memory="3GiB",
    paced_systems=SYSTEMS,
    paced_memory="256MiB",
    cases=cases,
    rounds=(1, 3),
    # Disable merges, whatever the demand.
    up_options=coserve.SCENARIO.up_options,
    options=frozenset({"rate"}),
    co_serving=CoServing(load_for, BATCH_API),
)
