"""`flood`: the flood of `burst` as online requests with targets, with offline load behind it.

Before the flood, batch requests fill the workers' memory. The flood then needs more than the
workers hold, so that groups merge while batch work rests; after it a few requests more show the
split, with which batch work comes back. `online-only` gets the same arrivals without batch work.
All processes log their events, which tell the order of concessions (I11) and how long the changes
of groups took.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import psutil

from benchmarks.audit_logs import audit_logs
from benchmarks.co_serving.flood_bars import judge
from benchmarks.co_serving.judging import OnlineTargets
from benchmarks.co_serving.online_load import OnlineLoad
from benchmarks.faults.cluster import blocks_free, is_stable
from benchmarks.scenarios import burst
from benchmarks.scenarios.scenario import Case, CoServing, LoadChoice, RoundsByCase, Scenario
from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.system import System
from benchmarks.systems.tideserve import Tideserve
from services.common.clock import monotonic_s
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.workload import Backlog, Workload

NAME = "flood"
BATCH_PROMPT, BATCH_OUTPUT = (96, 512), (64, 256)
CLIENTS_PER_WORKER = 32
"""A quarter of them fills a worker's memory, so some always wait."""
AFTER, AFTER_PAUSE_S = 4, 4.0
"""Requests after the flood, and the time before each: demand is low, and the groups split."""
# The targets of the class interactive; on two cores iterations of SmolLM2 take some 3.5 times as
# long as those of the device.
TARGETS = OnlineTargets(ttft_s=0.5, tpot_s=0.1)
UNPACED_SLOWDOWN = 3.5
REST_TIMEOUT_S, POLL_S = 60.0, 0.2
SYSTEMS = ("online-only", "slo")


def load_for(choice: LoadChoice) -> OnlineLoad:
    """The flood and what comes after it, all of which is measured."""
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
    """One open loop, with the backlog beside it."""
    load, clients = load_for(choice), CLIENTS_PER_WORKER * choice.workers
    return (
        Case(
            name=NAME,
            workload=partial(_online, choice, load, clients),
            concurrency=None,
            expected_s=load.last_s + load.drain_s / 2,
            limit_s=load.limit_s,
            backlog=partial(_backlog, clients, choice.seed),
        ),
    )


def _flood_of(choice: LoadChoice) -> burst.TraceSlice:
    return burst.load_for(choice, burst.PACED, burst.UNPACED)


def _backlog(clients: int, seed: int, turn: int) -> Backlog:
    return Backlog(clients, BATCH_PROMPT, BATCH_OUTPUT, seed * 1000 + turn)


def _online(choice: LoadChoice, load: OnlineLoad, clients: int, turn: int) -> Workload:
    """A request that begins the round, the flood, and the requests after it.

    These are other requests of another flood, so that no prompt begins as another.
    """
    flood = burst.flood(choice, turn, _flood_of(choice))
    first, *others = burst.flood(choice, turn + 500, _flood_of(choice)).requests
    ends_s = load.window_from_s + flood.requests[-1].arrival_s
    pause_s = (load.last_s - ends_s) / AFTER
    requests = (
        replace(first, arrival_s=0.0),
        *(replace(one, arrival_s=load.window_from_s + one.arrival_s) for one in flood.requests),
        *(
            replace(one, arrival_s=ends_s + (number + 1) * pause_s)
            for number, one in enumerate(others[:AFTER])
        ),
    )
    targets = load.targets
    return Workload(
        tuple(
            replace(one, slo_class="interactive", ttft_s=targets.ttft_s, tpot_s=targets.tpot_s)
            for one in requests
        ),
        f"{flood.statement}; after it {AFTER} requests, {pause_s:g} s apart; {load}; beside them"
        f" {_backlog(clients, choice.seed, turn)}",
    )


def inspect(systems: Mapping[str, System], rounds: RoundsByCase) -> dict[str, Any]:
    """What the logs of each system show. Raises SystemUnavailable."""
    found = {}
    for name, system in systems.items():
        if isinstance(system, Tideserve):
            _await_rest(system)
            audited = audit_logs(system.event_logs)
            found[name] = {
                "changes": [asdict(one) for one in audited.changes],
                "invariants_checked": audited.checks,
                "violations": audited.findings.broken,
                "problems": audited.problems,
            }
    return found


def _await_rest(system: Tideserve) -> None:
    """Wait until no request has a block, and no change of groups is under way."""
    deadline_s = monotonic_s() + REST_TIMEOUT_S
    names = [name for name in system.state["pids"] if name.startswith("worker-")]
    while True:
        status = read_status(system.admin_url)
        if blocks_free(status) and is_stable(status, names, psutil.pid_exists):
            return
        if monotonic_s() > deadline_s:
            raise SystemUnavailable(f"{system.name} is not at rest {REST_TIMEOUT_S:g} s after")
        time.sleep(POLL_S)


SCENARIO = Scenario(
    name=NAME,
    summary="the flood of burst with offline load behind it: what online requests notice of it",
    systems=SYSTEMS,
    memory=burst.SCENARIO.memory,
    dtype=burst.SCENARIO.dtype,
    paced_systems=SYSTEMS,
    paced_memory=burst.SCENARIO.paced_memory,
    paced_model=burst.PACED_MODEL,
    cases=cases,
    rounds=burst.SCENARIO.rounds,
    inspect=inspect,
    event_log="services",
    traced=True,
    demand_min=burst.SCENARIO.demand_min,
    co_serving=CoServing(load_for, judge),
)
