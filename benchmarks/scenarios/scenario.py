"""What a scenario is, and how one is loaded by its name."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.co_serving.bars import Rules
from benchmarks.co_serving.online_load import OnlineLoad
from benchmarks.errors import BenchError
from benchmarks.scenarios import SUMMARIES
from benchmarks.stats import LatencyTarget
from benchmarks.systems.system import Deployment, Say, System
from tideserve.load.record import Round
from tideserve.load.workload import Backlog, Workload

COMMON = frozenset({"model", "workers", "memory", "dtype", "quick", "json", "seed"})
COMPARISON = frozenset({"systems", "paced", "slo", "plot", "api_key"})
GPU = frozenset({"device", "load_format"})
TRACE = frozenset({"trace", "trace_start", "trace_duration", "trace_repeat", "time_scale", "rate"})
"""Parameters of `tideserve bench` by what they are for."""
ABLATION = "ablation"
"""The scenario of `burst --ablation`."""
QUICK_LIMIT_S, FULL_LIMIT_S = 240.0, 1200.0
FASTEST = "fastest"
"""In place of a dtype: the one in which this processor serves a model fastest."""
RoundsByCase = Mapping[str, Mapping[str, Sequence[Round]]]
"""Measured rounds by the name of the case, then by that of the system."""


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """The load as chosen on the command line; None leaves the choice to the scenario.

    trace         a file, or a pattern of made-up arrivals (`patterns.py`)
    time_scale    factor of the times between arrivals, in place of a rate
    paced         whether the load is for the device that is paced to, not for this machine
    on_gpu        whether the load is for workers on GPUs
    slowdown      how many times slower the paced device is. A scenario divides its own rate by
                  this; a chosen rate and chosen arrivals are kept
    cells         a regular expression: names of the cells to run
    append        file of the finished cells, which are not run again
    minutes       no cell begins after so long, or random faults last so long
    """

    quick: bool = False
    seed: int = 0
    trace: str | None = None
    trace_start_s: float | None = None
    trace_duration_s: float | None = None
    trace_repeat: int | None = None
    rate_per_s: float | None = None
    time_scale: float | None = None
    paced: bool = False
    on_gpu: bool = False
    slowdown: float = 1.0
    cycles: int | None = None
    workers: int = 2
    cells: str | None = None
    append: Path | None = None
    minutes: float | None = None

    @property
    def draws_faults(self) -> bool:
        """Whether faults are drawn at random instead of from cells."""
        return self.minutes is not None and self.cells is None and self.append is None


@dataclass(frozen=True, slots=True)
class Case:
    """One load. `workload(i)` makes the requests of round i, the same for all systems.

    concurrency    of a closed loop; None is the open loop
    expected_s     duration of a round on two cores, roughly; `limit_s` ends a round
    own_dtype_only  systems that run in a second dtype as well do not get this load in that
    reads_weights  few rows run at a time, so reading the weights takes most of an iteration
    backlog        `backlog(i)` runs beside round i, except in a system without batch work
    """

    name: str
    workload: Callable[[int], Workload]
    concurrency: int | None
    expected_s: float
    limit_s: float
    own_dtype_only: bool = False
    reads_weights: bool = False
    backlog: Callable[[int], Backlog] | None = None


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """Figures for JSON, rows for people, and problems; a scenario with problems has failed."""

    figures: Mapping[str, Any]
    rows: Sequence[tuple[str, str]]
    problems: Sequence[str]


Run = Callable[[Deployment, LoadChoice, Say, Say], TrialVerdict]
"""The last arguments show a sentence to keep, and the current step. May raise SystemUnavailable."""


@dataclass(frozen=True, slots=True)
class CoServing:
    """Online requests beside batch work: their load, and the rules for the figures.

    The rules judge the case that has the name of the scenario.
    """

    load: Callable[[LoadChoice], OnlineLoad]
    rules: Rules


@dataclass(frozen=True, slots=True)
class Scenario:
    """A comparison of `systems` under `cases`, or else `run`, which measures on its own.

    options        parameters of `tideserve bench` that it reads, beside `COMMON`, and beside
                   `COMPARISON` if it compares
    dtype          dtype of the model, unless another is chosen; may be `FASTEST`
    tiny_model     changes to the configuration of the tiny model with random weights. A `run` with
                   this has the tiny model unless --model is given, in `tiny_dtype`; a comparison
                   has it when it is paced, with `paced_systems` and `paced_memory`
    gpu_memory     memory of a worker with the tiny model on a GPU
    random_memory  the same on a processor and on a GPU for faults that are drawn
    up_options     further options of `tideserve up`
    details        more lines for its --help

    Of comparisons alone:

    rounds         number of rounds, in which the systems take turns, of a quick and of a full run
    second_dtype   the same systems are measured in this dtype as well, if `FASTEST` is another
    inspect        reads more figures by system after the last round, from systems that still run
    event_log      section of our options whose processes log their events, for `inspect`
    paired         the report has ratios of the first system to the others (`pairs.py`)
    steps          systems by label: the report compares each with the one before
    demand_min     peak KV demand that the load should reach, in multiples of the capacity
    co_serving     cases have a backlog of batch requests beside online ones: other figures, bars,
                   and no unpaced systems in a paced run
    """

    name: str
    memory: str
    cases: Callable[[LoadChoice], Sequence[Case]] = lambda choice: ()
    run: Run | None = None
    options: frozenset[str] = frozenset()
    dtype: str = "bfloat16"
    tiny_model: Mapping[str, Any] = field(default_factory=dict)
    tiny_dtype: str = "float32"
    gpu_memory: str = ""
    random_memory: tuple[str, str] | None = None
    up_options: Mapping[str, Any] = field(default_factory=dict)
    details: Callable[[], Sequence[str]] = lambda: ()
    systems: tuple[str, ...] = ()
    rounds: tuple[int, int] = (3, 3)
    targets: tuple[LatencyTarget, ...] = (
        LatencyTarget("ttft_s", 5, relative=True),
        LatencyTarget("tpot_s", 5, relative=True),
    )
    second_dtype: str | None = None
    paced_systems: tuple[str, ...] = ()
    paced_memory: str = ""
    inspect: Callable[[Mapping[str, System], RoundsByCase], Mapping[str, Any]] | None = None
    event_log: Literal["", "worker", "services"] = ""
    paired: bool = False
    steps: Mapping[str, str] = field(default_factory=dict)
    demand_min: float = 0.0
    co_serving: CoServing | None = None

    @property
    def reads(self) -> frozenset[str]:
        """Parameters of `tideserve bench` that make a difference to it."""
        compared = COMPARISON if self.run is None else frozenset[str]()
        return COMMON | compared | self.options

    def memory_for(self, choice: LoadChoice, tiny: bool) -> str:
        """The memory of a worker, unless it is given."""
        if not tiny:
            return self.memory
        if self.random_memory is not None and choice.draws_faults:
            return self.random_memory[choice.on_gpu]
        return (self.gpu_memory if choice.on_gpu else self.paced_memory) or self.memory

    def round_count(self, quick: bool) -> int:
        """Rounds of a quick or a full run."""
        return self.rounds[0 if quick else 1]


def find_scenario(name: str) -> Scenario:
    """The scenario called `name`; raises BenchError."""
    if name == ABLATION:
        scenario: Scenario = importlib.import_module("benchmarks.scenarios.burst").ABLATION_SCENARIO
        return scenario
    if name not in SUMMARIES:
        raise BenchError(f"unknown scenario '{name}'; there are {', '.join(SUMMARIES)}")
    scenario = importlib.import_module(f"benchmarks.scenarios.{name}").SCENARIO
    return scenario
