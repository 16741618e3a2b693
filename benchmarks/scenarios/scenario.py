"""Scenarios and trials, and how they are found."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from benchmarks import scenarios
from benchmarks.co_serving.judging import OnlineTargets
from benchmarks.co_serving.online_load import OnlineLoad
from benchmarks.errors import BenchError
from benchmarks.probes import drop_cost
from benchmarks.stats import Figures, LatencyTarget
from benchmarks.systems.system import Deployment, Say, System
from tideserve.load.record import Round
from tideserve.load.workload import Backlog, Workload

OF_ALL = frozenset({"model", "workers", "memory", "dtype", "quick", "json", "seed"})
OF_DEVICES = frozenset({"device", "load_format"})
OF_COMPARISONS = frozenset({"systems", "paced", "slo", "plot", "api_key"})
OF_TRACES = frozenset({"trace", "trace_start", "trace_duration", "trace_repeat", "time_scale"})
OF_CELLS = frozenset({"cells", "append", "minutes"})
"""Parameters of the command by what reads them."""
QUICK_LIMIT_S = 240.0
FASTEST = "fastest"
"""In place of a dtype: that in which this processor serves a model fastest."""
FULL_LIMIT_S = 1200.0
RoundsByCase = Mapping[str, Mapping[str, Sequence[Round]]]
"""Measured rounds by the name of the case, then by that of the system."""


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """The load as chosen on the command line. None leaves the choice to the scenario."""

    quick: bool = False
    seed: int = 0
    trace: str | None = None
    """A file, or a pattern of made-up arrivals (`patterns.py`)."""
    trace_start_s: float | None = None
    trace_duration_s: float | None = None
    trace_repeat: int | None = None
    rate_per_s: float | None = None
    time_scale: float | None = None
    """Times between arrivals become so many times as long, instead of a rate."""
    paced: bool = False
    """Whether the load is for the device that is paced to, instead of for this machine."""
    on_gpu: bool = False
    """Whether the load is for workers on GPUs, instead of for processors."""
    slowdown: float = 1.0
    """How many times slower that device is.

    A scenario divides its own rate by this; a chosen rate and chosen arrivals are kept.
    """
    cycles: int | None = None
    workers: int = 2
    cells: str | None = None
    """A regular expression: only cells with such names."""
    append: Path | None = None
    """File of the cells that are done, which are not run again."""
    minutes: float | None = None
    """No cell begins after so long, or so long it lasts."""


@dataclass(frozen=True, slots=True)
class Case:
    """One load. `workload(i)` makes the requests of round i, which all systems get.

    `concurrency` None is the open loop. `expected_s` is a guess for two cores, `limit_s` ends a
    round. With `own_dtype_only`, systems that are in the run in a second dtype do not get this load
    in that. With `reads_weights`, few rows run at a time, so that reading the weights takes most of
    an iteration. `backlog(i)` runs beside the requests of round i, except in a system without batch
    work.
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
class CoServing:
    """What sets a scenario of online requests beside batch work apart.

    `load` tells their targets and their window. `judge` makes the bars of the figures of the case
    that is called as the scenario, by system; the last argument is whether they are paced.
    """

    load: Callable[[LoadChoice], OnlineLoad]
    judge: Callable[[Mapping[str, Figures], OnlineTargets, bool], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named set of cases, each measured for `rounds` rounds in which the systems take turns.

    inspect        called after the last round; returns more figures by the system's name
    event_log      section of our options whose processes log their events, for `inspect`
    dtype          type that the models compute with, unless another is chosen; may be `FASTEST`
    second_dtype   in which the same systems are measured, too, if `FASTEST` is another
    paired         the report has a table of ratios of the first system to the others (`pairs.py`)
    paced_systems, paced_memory  in place of the others when the tiny model is paced
    paced_model    in place of entries of the tiny model's configuration, then
    steps          systems by label: the report compares each with the one before
    options        further options of `tideserve up`
    traced         whether the arrivals are those of a trace, which may then be chosen
    demand_min     peak KV demand that the load is meant to have, in multiples of the capacity
    rated          whether a rate of requests may be chosen without a trace
    on_gpus        its load also keeps GPUs busy, so its workers may have some
    co_serving     cases have a backlog of batch requests beside online ones: figures are those of
                   co-serving, and a paced run has no unpaced systems
    """

    name: str
    summary: str
    systems: tuple[str, ...]
    memory: str
    cases: Callable[[LoadChoice], Sequence[Case]]
    rounds: Callable[[bool], int] = lambda quick: 3 if quick else 5
    targets: tuple[LatencyTarget, ...] = (
        LatencyTarget("ttft_s", 5, relative=True),
        LatencyTarget("tpot_s", 5, relative=True),
    )
    inspect: Callable[[Mapping[str, System], RoundsByCase], Mapping[str, Any]] | None = None
    event_log: Literal["", "worker", "services"] = ""
    dtype: str = "bfloat16"
    second_dtype: str | None = None
    paired: bool = False
    paced_systems: tuple[str, ...] = ()
    paced_memory: str = ""
    paced_model: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    traced: bool = False
    demand_min: float = 0.0
    rated: bool = False
    on_gpus: bool = False
    co_serving: CoServing | None = None

    @property
    def reads(self) -> frozenset[str]:
        """Parameters of `tideserve bench` that make a difference to it."""
        own = OF_TRACES | {"rate"} if self.traced else frozenset()
        own |= {"rate"} if self.rated else frozenset()
        return OF_ALL | OF_COMPARISONS | own | (OF_DEVICES if self.on_gpus else frozenset())


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """Findings of a trial: `problems` is empty if the property holds; `rows` are for people."""

    figures: Mapping[str, Any]
    rows: Sequence[tuple[str, str]]
    problems: Sequence[str]


@dataclass(frozen=True, slots=True)
class Trial:
    """A scenario that checks a property of a cluster of its own, or measures in a way of its own.

    The last arguments of `run` are functions that show a sentence to keep, and the current step. It
    may raise SystemUnavailable. Unless a model is given, it gets a tiny one; with `real_model`, the
    default one, in the dtype that the processor is fastest with; `dtype` is that of the tiny one.
    `traced`: a trace may be chosen. `resumable`: it has cells, which may be chosen and resumed.
    `timed`: it lasts as long as is chosen. `cycled`: so are its cycles. With `gpu_memory`, that
    of the tiny model there, its workers may have GPUs. `details`: lines for its
    help.
    """

    name: str
    summary: str
    memory: str
    run: Callable[[Deployment, LoadChoice, Say, Say], TrialVerdict]
    real_model: bool = False
    traced: bool = False
    dtype: str = "float32"
    resumable: bool = False
    timed: bool = False
    cycled: bool = False
    gpu_memory: str = ""
    details: Callable[[], Sequence[str]] = lambda: ()

    @property
    def reads(self) -> frozenset[str]:
        """Parameters of `tideserve bench` that make a difference to it."""
        own = {"trace": self.traced, "minutes": self.timed, "cycles": self.cycled}
        # Cells have numbers of workers of their own.
        common = OF_ALL - {"workers"} | OF_CELLS if self.resumable else OF_ALL
        common |= OF_DEVICES if self.gpu_memory else frozenset()
        return common | {name for name, read in own.items() if read}


Kind = TypeVar("Kind", Scenario, Trial)


def find_scenarios() -> dict[str, Scenario]:
    """All scenarios by name."""
    return _found("SCENARIO", Scenario)


def find_trials() -> dict[str, Trial]:
    """All trials by name."""
    return _found("TRIAL", Trial)


def _found(attribute: str, kind: type[Kind]) -> dict[str, Kind]:
    found = {}
    for module in pkgutil.iter_modules(scenarios.__path__):
        loaded = importlib.import_module(f"benchmarks.scenarios.{module.name}")
        one = getattr(loaded, attribute, None)
        if isinstance(one, kind):
            found[one.name] = one
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Description:
    """What there is to say of a scenario: its details, and the parameters that it reads.

    `default_model`: what it runs without `--model`, where that is not the usual one.
    """

    text: str
    details: Sequence[str] = ()
    reads: frozenset[str] = OF_ALL
    default_model: str = ""


def describe(name: str) -> Description | None:
    """What there is to say of a scenario or trial; None for one that is measured without either."""
    one = find_scenarios().get(name) or find_trials().get(name)
    if one is None:
        return None
    text = importlib.import_module(f"benchmarks.scenarios.{name}").__doc__ or one.summary
    if isinstance(one, Scenario):
        return Description(text, reads=one.reads)
    default = "" if one.real_model else "a tiny one, made up"
    return Description(text, one.details(), one.reads, default)


def find_scenario(name: str) -> Scenario:
    """The scenario called `name`; raises BenchError."""
    known = find_scenarios()
    if name not in known:
        names = sorted({*known, *find_trials(), drop_cost.NAME})
        raise BenchError(f"unknown scenario '{name}'; there are {', '.join(names)}")
    return known[name]
