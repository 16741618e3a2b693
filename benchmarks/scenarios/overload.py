"""`overload`: 1, 2, 5 and 10 times the load that fits, and the time to recover from it.

The capacity is measured first: prompt and output tokens that the workers process per second while a
closed loop keeps prompts waiting. At each load requests arrive at random; interactive requests are
half of the capacity, standard requests the rest. Their targets are those of the JSON. Of five
refused clients four return when Retry-After has passed, and one at once; each returns up to three
times. A request is in time if it is served completely within its targets, counted from the attempt
that is served. Tokens of such requests are counted in the steady part of a load, relative to the
capacity. After the last arrival, probes measure when the TTFT is that of an idle cluster again:
two of three probes in a row are at most 1.5 times as long.

Systems take turns at each load. `tideserve` has the default settings: `slo` and refusal of late
requests. `todays-rules` is `slo` with online requests by deadline alone, without that refusal.
`fcfs`, the former default, is first come, first served without it (in a quick run at 10 × only).
Tokens in time are compared with the better of these two. Then half of ten times the load are batch
requests, standard requests have no targets, and `slo` and `priority` are measured. Iterations are
paced, so that workers do not compete for processors.
"""

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchError
from benchmarks.overload.figures import Measured, load_figures
from benchmarks.overload.load import FACTORS, MIXED_FACTOR, Targets, targets_for
from benchmarks.overload.room import refused_with_room_s
from benchmarks.overload.trial import Load, Trial
from benchmarks.overload.verdict import cell_text, problems_of, rows_of, worst_recovery_s
from benchmarks.scenarios.scenario import LoadChoice, Scenario, TrialVerdict
from benchmarks.stats import Figures
from benchmarks.systems.schedulings import merged
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import Tideserve
from services.common.device_profile import split_slowdown
from services.core.scheduler.state_config import StateConfig

PACE = "A100-14B:4"
QUICK_S, FULL_S = 20.0, 120.0
CAPACITY_MIN_S, CAPACITY_SHARE = 10.0, 0.25
"""Duration of the closed loop: at least, and as a share of a load."""
QUICK_RECOVERY_S, FULL_RECOVERY_S = 12.0, 60.0
"""Longest time for which recovery is measured; then requests that still wait are cut off."""
TODAYS = {"scheduler": {"lateness": 0.0, "class_order": "deadline", "standard_wait_s": 0.0}}
"""Options that turn off the refusal of late requests."""
FCFS = "fcfs"
SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "tideserve": {},
    "todays-rules": TODAYS,
    FCFS: {"scheduling": "fcfs", **TODAYS},
}
MIXED = "mixed"
MIXED_SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "slo": {"scheduling": "slo"},
    "priority": {"scheduling": "priority"},
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a run. `folder` receives the schedulers' event logs."""

    deployment: Deployment
    seed: int
    seconds: float
    recovery_max_s: float
    folder: Path
    say: Say
    progress: Say

    @property
    def capacity_s(self) -> float:
        """Duration of the closed loop."""
        return max(CAPACITY_MIN_S, CAPACITY_SHARE * self.seconds)


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Measure the capacity, then all systems at each load, then the mixed load."""
    deployment = replace(deployment, paced=deployment.paced or PACE)
    assert deployment.paced is not None
    slowdown = split_slowdown(deployment.paced)[1]
    pattern = re.compile(choice.cells or "")
    cells = [(n, f) for f in FACTORS for n in SYSTEMS if pattern.search(f"{n}/{f}")]
    if choice.quick and choice.cells is None:
        cells = [cell for cell in cells if cell[0] != FCFS or cell[1] == FACTORS[-1]]
    mixed_cells = [(n, MIXED_FACTOR) for n in MIXED_SYSTEMS if pattern.search(f"{MIXED}/{n}")]
    if not cells and not mixed_cells:
        raise BenchError(f"no cell matches {choice.cells}; cells are SYSTEM/LOAD and mixed/SYSTEM")
    with tempfile.TemporaryDirectory(prefix="tideserve-overload-") as folder:
        plan = Plan(
            deployment,
            choice.seed,
            choice.seconds or (QUICK_S if choice.quick else FULL_S),
            QUICK_RECOVERY_S if choice.quick else FULL_RECOVERY_S,
            Path(folder),
            say,
            progress,
        )
        targets, mixed_targets = (targets_for(slowdown, mixed) for mixed in (False, True))
        capacities, systems = _measure(plan, SYSTEMS, cells, targets, None)
        capacity = max(capacities.values(), default=None)
        of_mixed, mixed = _measure(plan, MIXED_SYSTEMS, mixed_cells, mixed_targets, capacity)
    if capacity is None:
        capacity = max(of_mixed.values())
    last = {name: of[str(MIXED_FACTOR)] for name, of in mixed.items()}
    loads = systems.get("tideserve", {})
    problems = problems_of(capacity, systems, last)
    figures = {
        "paced": deployment.paced,
        "workers": deployment.workers,
        "seconds": plan.seconds,
        "capacity_tokens_s": capacity,
        "capacities_tokens_s": capacities | of_mixed,
        "targets": targets.figures(),
        "loads": loads,
        "recovery_s": worst_recovery_s(loads),
        "systems": systems,
        "mixed": {"targets": mixed_targets.figures(), "systems": last},
        "problems": problems,
    }
    return TrialVerdict(figures, rows_of(capacity, systems, last), problems)


def _measure(
    plan: Plan,
    options: Mapping[str, Mapping[str, Any]],
    cells: Sequence[tuple[str, int]],
    targets: Targets,
    capacity_tokens_s: float | None,
) -> tuple[dict[str, float], dict[str, dict[str, Figures]]]:
    """Capacities by system, then figures by system and load.

    The load is relative to `capacity_tokens_s`; None: to the largest capacity of the systems.
    """
    measured: dict[str, dict[str, Measured]] = {}
    capacities: dict[str, float] = {}
    with ExitStack() as stack:
        trials: dict[str, Trial] = {}
        for name in dict.fromkeys(name for name, _ in cells):
            cluster = _started(stack, name, options[name], plan)
            trials[name] = Trial(cluster, plan.recovery_max_s, plan.seed)
        for name, trial in trials.items():
            plan.progress(f"{name}: a closed loop")
            capacities[name] = trial.capacity_tokens_s(plan.capacity_s)
        base = capacity_tokens_s or max(capacities.values(), default=0.0)
        for name, factor in cells:
            load = Load.drawn(factor, base, plan.seconds, targets, f"{plan.seed} {factor}")
            progress = _labelled(plan.progress, f"{name}/{factor}: ")
            done = trials[name].measure(load, progress)
            measured.setdefault(name, {})[str(factor)] = done
            plan.say(f"{name}, {factor} ×: {cell_text(load_figures(done), base)}")
        with_room = {name: refused_with_room_s(plan.folder / name) for name in trials}
    return capacities, {
        name: {factor: load_figures(done, with_room[name]) for factor, done in of.items()}
        for name, of in measured.items()
    }


def _started(stack: ExitStack, name: str, options: Mapping[str, Any], plan: Plan) -> Tideserve:
    logged = {"scheduler": {"event_log": str(plan.folder / name)}}
    every = merged(merged(plan.deployment.options, options), logged)
    cluster = Tideserve(name, (), replace(plan.deployment, options=every))
    stack.callback(cluster.stop)
    cluster.start(plan.say)
    return cluster


def _labelled(progress: Say, label: str) -> Callable[[str], None]:
    return lambda line: progress(label + line)


SCENARIO = Scenario(
    name="overload",
    memory="256MiB",
    paced_memory="256MiB",
    run=run,
    options=frozenset({"paced", "cells", "seconds"}),
    tiny_model={"num_hidden_layers": 4},
    # Requests must not wait longer than by default.
    up_options={
        "queue_deadline": StateConfig().queue_deadline_s,
        "scheduler": {"lateness": StateConfig().lateness},
    },
)
