"""What a scenario is, and how all of them are found."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench.scenarios
from bench.errors import BenchError
from bench.record import Round
from bench.stats import Target
from bench.systems.system import System
from bench.workload import Workload

QUICK_LIMIT_S = 240.0
FULL_LIMIT_S = 1200.0
RoundsByCase = Mapping[str, Mapping[str, Sequence[Round]]]
"""Measured rounds by the name of the case, then by that of the system."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a person chose about the load. None leaves it to the scenario."""

    quick: bool = False
    seed: int = 0
    trace: Path | None = None
    trace_start_s: float | None = None
    trace_duration_s: float | None = None
    rate_per_s: float | None = None
    paced: bool = False
    """Whether the load shall fit a device that is paced to, instead of this machine."""


@dataclass(frozen=True, slots=True)
class Case:
    """One load. `workload(i)` makes the requests of round i, which all systems get.

    `concurrency` None is the open loop. `expected_s` is a guess for two cores, `limit_s` ends a
    round.
    """

    name: str
    workload: Callable[[int], Workload]
    concurrency: int | None
    expected_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named set of cases. `rounds` of all of them are measured, the systems taking turns.

    `inspect`, if any, is called after the last round and returns more figures by system's name;
    with `event_log`, our workers log their events for it. `dtype` is what the
    models compute with unless a person says otherwise. `paced_systems` and `paced_memory` take the
    place of the others when the tiny model is paced, `paced_model` of what is in its configuration.
    `steps`, labels with systems, has the report
    tell what each changes against the one before. With `fresh`, servers start anew for each round;
    `options` are more options of `tideserve up`.
    """

    name: str
    summary: str
    systems: tuple[str, ...]
    memory: str
    cases: Callable[[Choice], Sequence[Case]]
    rounds: Callable[[bool], int] = lambda quick: 3 if quick else 5
    targets: tuple[Target, ...] = (
        Target("ttft_s", 5, relative=True),
        Target("tpot_s", 5, relative=True),
    )
    inspect: Callable[[Mapping[str, System], RoundsByCase], Mapping[str, Any]] | None = None
    event_log: bool = False
    dtype: str = "bfloat16"
    paced_systems: tuple[str, ...] = ()
    paced_memory: str = ""
    paced_model: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, str] = field(default_factory=dict)
    fresh: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def find_scenarios() -> dict[str, Scenario]:
    """All scenarios by name."""
    found = {}
    for module in pkgutil.iter_modules(bench.scenarios.__path__):
        loaded = importlib.import_module(f"bench.scenarios.{module.name}")
        scenario = getattr(loaded, "SCENARIO", None)
        if isinstance(scenario, Scenario):
            found[scenario.name] = scenario
    return dict(sorted(found.items()))


def find_scenario(name: str) -> Scenario:
    """The scenario called `name`; raises BenchError."""
    known = find_scenarios()
    if name not in known:
        raise BenchError(f"unknown scenario '{name}'; there are {', '.join(known)}")
    return known[name]
