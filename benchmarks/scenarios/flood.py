"""`flood`: the flood of `burst` as online requests with targets, with batch work behind it.

Before the flood, batch requests fill the workers' memory. The flood then exceeds the workers'
capacity, so that groups merge while batch work is parked; after it, a few more requests show the
split, after which batch work resumes. `online-only` gets the same arrivals without batch work.
All processes write event logs, which show the order of concessions (I11) and the duration of the
changes of groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import psutil

from benchmarks.audit_logs import audit_logs
from benchmarks.co_serving.bars import FLOOD
from benchmarks.co_serving.online_load import OnlineLoad, OnlineTargets
from benchmarks.faults.cluster import await_true, blocks_free, is_stable
from benchmarks.scenarios import burst
from benchmarks.scenarios.coserve import co_served
from benchmarks.scenarios.scenario import (
    TRACE,
    Case,
    CoServing,
    LoadChoice,
    RoundsByCase,
)
from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.system import System
from benchmarks.systems.tideserve import Tideserve
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.workload import Backlog, PlannedRequest

BATCH_PROMPT, BATCH_OUTPUT = (96, 512), (64, 256)
CLIENTS_PER_WORKER = 32
"""A quarter of them fills a worker's memory, so some are always waiting."""
AFTER, AFTER_PAUSE_S = 4, 4.0
"""Requests after the flood, and the pause before each: with low demand, the groups split."""
# Targets of the class interactive; on two cores, iterations of SmolLM2 take about 3.5 times as long
# as on the device.
TARGETS = OnlineTargets(ttft_s=0.5, tpot_s=0.1)
UNPACED_SLOWDOWN = 3.5
REST_TIMEOUT_S = 60.0
SYSTEMS = ("online-only", "slo")


def load_for(choice: LoadChoice) -> OnlineLoad:
    """The flood and the requests after it, all within the window."""
    slowdown = choice.slowdown if choice.paced else UNPACED_SLOWDOWN
    flood = _flood_of(choice)
    flood_s = burst.flood(choice, 0, flood).requests[-1].arrival_s
    return OnlineLoad(
        flood.rate_per_s,
        replace(TARGETS, ttft_s=TARGETS.ttft_s * slowdown, tpot_s=TARGETS.tpot_s * slowdown),
        window_s=flood_s + AFTER * AFTER_PAUSE_S * slowdown,
        drain_s=flood.drain_s,
    )


def cases(choice: LoadChoice) -> Sequence[Case]:
    """An open loop with a concurrent backlog."""
    load = load_for(choice)
    flood = burst.flood(choice, 0, _flood_of(choice))
    pause_s = (load.last_s - load.window_from_s - flood.requests[-1].arrival_s) / AFTER
    statement = f"{flood.statement}; after it {AFTER} requests, {pause_s:g} s apart;"
    backlog = partial(_backlog, CLIENTS_PER_WORKER * choice.workers, choice.seed)
    return (co_served("flood", statement, load, partial(_online, choice, load), backlog),)


def _flood_of(choice: LoadChoice) -> burst.TraceSlice:
    return burst.load_for(choice, burst.PACED, burst.UNPACED)


def _backlog(clients: int, seed: int, turn: int) -> Backlog:
    return Backlog(clients, BATCH_PROMPT, BATCH_OUTPUT, seed * 1000 + turn)


def _online(choice: LoadChoice, load: OnlineLoad, turn: int) -> Sequence[PlannedRequest]:
    """A request that starts the round, the flood, and the requests after it.

    The first and the last requests are from another flood, so that prompts share no prefixes.
    """
    flood = burst.flood(choice, turn, _flood_of(choice)).requests
    first, *others = burst.flood(choice, turn + 500, _flood_of(choice)).requests
    ends_s = load.window_from_s + flood[-1].arrival_s
    # Spread the requests after the flood over the rest of the window.
    pause_s = (load.last_s - ends_s) / AFTER
    timed = [(0.0, first)]
    timed += [(load.window_from_s + request.arrival_s, request) for request in flood]
    timed += [(ends_s + (n + 1) * pause_s, request) for n, request in enumerate(others[:AFTER])]
    targets = load.targets
    return [
        replace(
            request,
            arrival_s=arrival_s,
            slo_class="interactive",
            ttft_s=targets.ttft_s,
            tpot_s=targets.tpot_s,
        )
        for arrival_s, request in timed
    ]


def inspect(systems: Mapping[str, System], rounds: RoundsByCase) -> dict[str, Any]:
    """Changes of groups and audit, from each system's event logs. Raises SystemUnavailable."""
    by_system = {}
    for name, system in systems.items():
        if isinstance(system, Tideserve):
            rests = partial(_rests, system)
            if not await_true(rests, REST_TIMEOUT_S):
                raise SystemUnavailable(f"{name} is not idle {REST_TIMEOUT_S:g} s after")
            audited = audit_logs(system.event_logs)
            by_system[name] = {
                "changes": [asdict(change) for change in audited.changes],
                "invariants_checked": audited.checks,
                "violations": audited.findings.broken,
                "problems": audited.problems,
            }
    return by_system


def _rests(system: Tideserve) -> bool:
    """Whether no KV block is in use and no change of groups is in progress."""
    names = [name for name in system.state["pids"] if name.startswith("worker-")]
    status = read_status(system.admin_url)
    return blocks_free(status) and is_stable(status, names, psutil.pid_exists)


SCENARIO = replace(
    burst.SCENARIO,
    name="flood",
    systems=SYSTEMS,
    paced_systems=SYSTEMS,
    cases=cases,
    inspect=inspect,
    event_log="services",
    options=TRACE,
    co_serving=CoServing(load_for, FLOOD),
)
