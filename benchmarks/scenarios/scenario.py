"""Definition of a scenario, and loading by name."""

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
COMPARISON = frozenset({"systems", "rounds", "paced", "slo", "plot", "api_key"})
GPU = frozenset({"device", "load_format"})
TRACE = frozenset({"trace", "trace_start", "trace_duration", "trace_repeat", "time_scale", "rate"})
"""Groups of parameters of `tideserve bench`."""
ABLATION = "ablation"
"""The scenario of `burst --ablation`."""
QUICK_LIMIT_S, FULL_LIMIT_S = 240.0, 1200.0
FASTEST = "fastest"
"""Instead of a dtype: the fastest dtype of this processor."""
RoundsByCase = Mapping[str, Mapping[str, Sequence[Round]]]
"""Measured rounds by case name, then by system name."""


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """The load chosen on the command line; None selects the scenario's default.

    trace         a file, or a pattern of synthetic arrivals (`patterns.py`)
    time_scale    factor on the times between arrivals, instead of a rate
    paced         whether the load is sized for the paced device instead of this machine
    on_gpu        whether the load is sized for workers on GPUs
    slowdown      slowdown of the paced device. A scenario divides its default rate by it; a given
                  rate and given arrivals are kept
    cells         a regular expression: names of the cells to run
    append        file with the finished cells, which are skipped
    minutes       no cell starts after this time, or duration of random faults
    seconds       duration of each load
    rounds        number of rounds of a comparison, instead of the scenario's
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
    seconds: float | None = None
    rounds: int | None = None

    @property
    def draws_faults(self) -> bool:
        """Whether faults are random instead of given by cells."""
        return self.minutes is not None and self.cells is None and self.append is None


@dataclass(frozen=True, slots=True)
class Case:
    """A load. `workload(i)` makes the requests of round i, the same for all systems.

    concurrency    concurrency of a closed loop; None for an open loop
    expected_s     approximate duration of a round on two cores; `limit_s` ends a round
    own_dtype_only  not measured in the second dtype
    reads_weights  batches are small, so reading the weights dominates an iteration
    backlog        `backlog(i)` runs during round i, except in a system without batch work
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
    """Figures for JSON, table rows, and problems; a scenario with problems has failed."""

    figures: Mapping[str, Any]
    rows: Sequence[tuple[str, str]]
    problems: Sequence[str]


Run = Callable[[Deployment, LoadChoice, Say, Say], TrialVerdict]
"""The last arguments print a permanent line and the current step. May raise SystemUnavailable."""


@dataclass(frozen=True, slots=True)
class CoServing:
    """Co-serving of online and batch requests: the online load, and the rules for the figures.

    The rules judge the case that is named like the scenario.
    """

    load: Callable[[LoadChoice], OnlineLoad]
    rules: Rules


@dataclass(frozen=True, slots=True)
class Scenario:
    """A comparison of `systems` under `cases`, or `run` with its own measurement.

    options        parameters of `tideserve bench` that it reads in addition to `COMMON`, and to
                   `COMPARISON` for a comparison
    dtype          default dtype of the model; may be `FASTEST`
    tiny_model     changes to the configuration of the tiny model with random weights. A `run` with
                   this uses the tiny model in `tiny_dtype` unless --model is given; a comparison
                   uses it when paced, with `paced_systems` and `paced_memory`
    gpu_memory     memory of a worker with the tiny model on a GPU
    random_memory  the same on a processor and on a GPU for random faults
    up_options     further options of `tideserve up`
    paced_options  further ones of paced systems
    details        further lines for its --help

    Only for comparisons:

    rounds         number of rounds of a quick and of a full run; systems alternate by round
    second_dtype   also measure the systems in this dtype if `FASTEST` is another
    inspect        reads further figures by system after the last round, from running systems
    event_log      option section whose processes write event logs, for `inspect`
    paired         the report has ratios of the first system to the others (`pairs.py`)
    steps          systems by label: the report compares each with the previous system
    demand_min     minimum peak KV demand of the load, as a multiple of the capacity
    co_serving     cases have online requests and a backlog of batch requests: other figures, bars,
                   and no unpaced systems in a paced run
    paced_alone    the load of a paced run overflows paced systems only, so it has no unpaced ones
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
    paced_options: Mapping[str, Any] = field(default_factory=dict)
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
    paced_alone: bool = False

    @property
    def reads(self) -> frozenset[str]:
        """Parameters of `tideserve bench` that the scenario reads."""
        compared = COMPARISON if self.run is None else frozenset[str]()
        return COMMON | compared | self.options

    def memory_for(self, choice: LoadChoice, tiny: bool) -> str:
        """Default memory of a worker."""
        if not tiny:
            return self.memory
        if self.random_memory is not None and choice.draws_faults:
            return self.random_memory[choice.on_gpu]
        return (self.gpu_memory if choice.on_gpu else self.paced_memory) or self.memory

    def round_count(self, choice: LoadChoice) -> int:
        """Number of rounds of a run."""
        return choice.rounds or self.rounds[0 if choice.quick else 1]


def find_scenario(name: str) -> Scenario:
    """The scenario `name`. Raises BenchError."""
    if name == ABLATION:
        scenario: Scenario = importlib.import_module("benchmarks.scenarios.burst").ABLATION_SCENARIO
        return scenario
    if name not in SUMMARIES:
        raise BenchError(f"unknown scenario '{name}'; scenarios are {', '.join(SUMMARIES)}")
    scenario = importlib.import_module(f"benchmarks.scenarios.{name}").SCENARIO
    return scenario
