"""`overload`: 1, 2, 5 and 10 times the load that fits, and the time to recover from it.

The capacity is measured first: prompt and output tokens that the workers process per second while a
closed loop keeps prompts waiting. At each load requests arrive at random; interactive requests are
half of the capacity, standard requests the rest. Their targets are those of the JSON. Of five
refused clients four return when Retry-After has passed, and one at once; each returns up to three
times. A request is in time if it is served completely within its targets, counted from the attempt
that is served. Tokens of such requests are counted in the steady part of a load, relative to the
capacity. After the last arrival, probes measure when the TTFT is that of an idle cluster again.

Systems take turns at each load: the default settings, the same without refusal of late requests
(`todays-rules`), and first come, first served (`fcfs`). Then batch requests are half of ten times
the load, standard requests have no targets, and `slo` and `priority` are measured. Iterations are
paced, so that workers do not compete for processors.
"""

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from random import Random
from statistics import median
from threading import Event
from typing import Any

import psutil

from benchmarks.client_process import run_job
from benchmarks.faults.cluster import await_true, blocks_free
from benchmarks.overload.figures import RECOVERED_FACTOR, Measured, Probe, load_figures
from benchmarks.overload.load import (
    FACTORS,
    MIXED_FACTOR,
    Targets,
    class_shares,
    mean_tokens,
    request,
    targets_for,
)
from benchmarks.scenarios.recovery import EndlessStreams
from benchmarks.scenarios.scenario import LoadChoice, Scenario, TrialVerdict
from benchmarks.stats import Figures, quotient
from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.schedulings import merged
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import Tideserve
from services.common.clock import monotonic_s
from services.common.device_profile import split_slowdown
from services.core.scheduler.class_rules import ClassRules
from services.core.scheduler.state_config import StateConfig
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.client import LEAD_S, Job, Returns
from tideserve.load.event_stream import OpenAIServer, StreamedAnswer, StreamFailed
from tideserve.load.record import SentRequest
from tideserve.load.workload import DEFAULT_CLASS, PlannedRequest, Workload, with_lead_in

PACE = "A100-14B:4"
CLIENTS_PER_WORKER = 64
"""Clients of the closed loop: about twice as many as decode at the same time."""
CAPACITY_FROM_S = 6.0
QUICK_S, FULL_S = 24.0, 120.0
SETTLE_SHARE = 1 / 3
"""Part of a load before its steady state."""
RECOVERY_MAX_S, QUICK_RECOVERY_MAX_S = 60.0, 15.0
REST_TIMEOUT_S = 90.0
IDLE_PROBES = 5
PROBE_EVERY_S, SAMPLE_S = 0.25, 0.5
AT_ONCE_EVERY, RETURNS_MAX = 5, 3
_OFF = {"lateness": 0.0, "class_order": "deadline", "standard_wait_s": 0.0}
_KNOWN = {field_.name for config in (StateConfig, ClassRules) for field_ in fields(config)}
TODAYS = {"scheduler": {name: value for name, value in _OFF.items() if name in _KNOWN}}
SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "tideserve": {},
    "todays-rules": TODAYS,
    "fcfs": {"scheduling": "fcfs", **TODAYS},
}
MIXED_SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "slo": {"scheduling": "slo"},
    "priority": {"scheduling": "priority"},
}


class ClosedLoop(EndlessStreams):
    """Clients with a standard request each at a time, at all stages from the start."""

    def drawn(self, clients: int, seed: int) -> Iterator[PlannedRequest]:
        targets = targets_for(1.0, mixed=True)
        first = tuple(request(n, f"{seed} closed", DEFAULT_CLASS, targets) for n in range(clients))
        yield from with_lead_in(Workload(first, ""), clients).requests[:clients]
        for number in itertools.count(clients):
            if self._stopped.is_set():
                return
            yield request(number, f"{seed} closed", DEFAULT_CLASS, targets)


@dataclass(frozen=True, slots=True)
class Load:
    """A load: requests in order of arrival, for `seconds`."""

    requests: Sequence[PlannedRequest]
    seconds: float
    targets: Targets

    @classmethod
    def drawn(
        cls, factor: float, capacity_tokens_s: float, seconds: float, targets: Targets, seed: str
    ) -> "Load":
        """Poisson arrivals of `factor` times the capacity, in tokens."""
        rng = Random(f"overload arrivals {seed}")
        shares = class_shares(factor, mixed=DEFAULT_CLASS not in targets.stated)
        sample = [request(n, "sample", DEFAULT_CLASS, targets) for n in range(1000)]
        rate = factor * capacity_tokens_s / mean_tokens(sample)
        requests, at_s = list[PlannedRequest](), 0.0
        while at_s < seconds:
            (name,) = rng.choices(list(shares), list(shares.values()))
            made = request(len(requests), seed, name, targets)
            requests.append(replace(made, arrival_s=at_s))
            at_s += rng.expovariate(rate)
        return cls(requests, seconds, targets)


class Trial:
    """Measures loads on a running cluster."""

    def __init__(self, cluster: Tideserve, recovery_max_s: float, seed: int) -> None:
        self._cluster = cluster
        self._recovery_max_s = recovery_max_s
        self._seed = seed
        self._probes = itertools.count()
        self._gateway = psutil.Process(cluster.state["pids"]["gateway"])

    def capacity_tokens_s(self, seconds: float) -> float:
        """Tokens processed per second in a closed loop. Raises SystemUnavailable."""
        cluster = self._cluster
        clients = CLIENTS_PER_WORKER * int(cluster.options()["workers"])
        loop = ClosedLoop(cluster.urls[0], cluster.model, clients, self._seed)
        loop.start()
        try:
            time.sleep(CAPACITY_FROM_S)
            before, from_s = cluster.counters(), monotonic_s()
            time.sleep(seconds)
            after, to_s = cluster.counters(), monotonic_s()
        finally:
            loop.stop()
        self._rest()
        if before.processed is None or after.processed is None or loop.failures:
            raise SystemUnavailable(f"{cluster.name}: the closed loop failed: {loop.failures[:1]}")
        return (after.processed - before.processed) / (to_s - from_s)

    def measure(self, load: Load, progress: Say) -> Figures:
        """Send a load to the idle cluster, wait until it has recovered, and return the figures."""
        cluster, targets = self._cluster, load.targets
        idle = [probe.ttft_s for probe in asyncio.run(self._probe(targets, IDLE_PROBES))]
        known = [ttft_s for ttft_s in idle if ttft_s is not None]
        if len(known) < IDLE_PROBES:
            raise SystemUnavailable(f"{cluster.name} refused a request while it was idle")
        measured = Measured((), (0.0, 0.0), median(known), [], [self._gateway.memory_info().rss])
        before = cluster.counters()
        job = Job(
            tuple(cluster.urls),
            cluster.model,
            tuple(load.requests),
            timeout_s=load.seconds + self._recovery_max_s,
            returns=Returns(load.seconds, AT_ONCE_EVERY, RETURNS_MAX),
        )
        begun = Event()

        def note(line: str) -> None:
            begun.set()
            progress(line)

        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(run_job, job, note)
            while not (begun.wait(SAMPLE_S) or sending.done()):
                pass
            start_s = monotonic_s() + LEAD_S
            self._watch(measured, sending, start_s + load.seconds)
            limit_s = RECOVERED_FACTOR * measured.idle_ttft_s
            until_s = start_s + load.seconds + self._recovery_max_s
            measured.probes = asyncio.run(self._probe(targets, None, limit_s, until_s))
            measured.records = sending.result()
        begun_s = measured.records[0].due_s
        end_s = begun_s + load.seconds
        measured.window_s = (begun_s + SETTLE_SHARE * load.seconds, end_s)
        self._rest()
        after = cluster.counters()
        if None not in (before.decode_s, after.decode_s):
            measured.decode_over_paced = quotient(
                (after.decode_s or 0) - (before.decode_s or 0),
                (after.decode_predicted_s or 0) - (before.decode_predicted_s or 0),
            )
        return load_figures(measured, targets)

    def _watch(
        self, measured: Measured, sending: "Future[tuple[SentRequest, ...]]", until_s: float
    ) -> None:
        """Sample the gateway's memory until `until_s`."""
        while monotonic_s() < until_s and not sending.done():
            measured.gateway_bytes.append(self._gateway.memory_info().rss)
            time.sleep(min(SAMPLE_S, max(0.0, until_s - monotonic_s())))

    async def _probe(
        self,
        targets: Targets,
        count: int | None,
        limit_s: float = 0.0,
        until_s: float = float("inf"),
    ) -> list[Probe]:
        """Send standard requests in turn: `count`, or until a TTFT is at most `limit_s`."""
        server = OpenAIServer(self._cluster.urls[0], None)
        probes = list[Probe]()
        try:
            while len(probes) != count and monotonic_s() < until_s:
                made = request(
                    next(self._probes), f"{self._seed} probe {id(self)}", DEFAULT_CLASS, targets
                )
                answer, sent_s = StreamedAnswer(), monotonic_s()
                try:
                    async with asyncio.timeout(min(60.0, until_s - sent_s)):
                        await server.complete(self._cluster.model, made, answer, lambda: None)
                except (StreamFailed, OSError, TimeoutError):
                    answer.error = "failed"
                times_s = answer.token_times_s
                probes.append(Probe(sent_s, times_s[0] - sent_s if times_s else None))
                if (ttft_s := probes[-1].ttft_s) is not None and ttft_s <= limit_s:
                    break
                await asyncio.sleep(max(0.0, sent_s + PROBE_EVERY_S - monotonic_s()))
        finally:
            await server.close()
        return probes

    def _rest(self) -> None:
        """Wait until no request is in the cluster. Raises SystemUnavailable."""
        url = self._cluster.admin_url
        if not await_true(lambda: blocks_free(read_status(url)), REST_TIMEOUT_S):
            raise SystemUnavailable(f"{self._cluster.name}: blocks are in use without a request")


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Measure the capacity, then all systems at each load, then the mixed load."""
    deployment = replace(deployment, paced=deployment.paced or PACE)
    assert deployment.paced is not None
    slowdown = split_slowdown(deployment.paced)[1]
    seconds = choice.seconds or (QUICK_S if choice.quick else FULL_S)
    recovery_max_s = QUICK_RECOVERY_MAX_S if choice.quick else RECOVERY_MAX_S
    pattern = re.compile(choice.cells or "")
    wanted = [
        (name, factor)
        for factor in FACTORS
        for name in SYSTEMS
        if pattern.search(f"{name}/{factor}")
    ]
    targets = targets_for(slowdown, mixed=False)
    results: dict[str, dict[str, Figures]] = {}
    capacities: dict[str, float] = {}
    with ExitStack() as stack:
        trials = {}
        for name in SYSTEMS:
            if any(name == system for system, _ in wanted):
                cluster = _started(stack, name, SYSTEMS[name], deployment, say)
                trials[name] = Trial(cluster, recovery_max_s, choice.seed)
        for name, trial in trials.items():
            progress(f"{name}: closed loop")
            capacities[name] = trial.capacity_tokens_s(seconds / 2)
            say(f"{name}: {capacities[name]:,.0f} tokens a second in a closed loop")
        capacity = max(capacities.values())
        for name, factor in wanted:
            load = Load.drawn(factor, capacity, seconds, targets, f"{choice.seed} {factor}")
            figures = trials[name].measure(load, _labelled(progress, f"{name}/{factor}: "))
            results.setdefault(name, {})[str(factor)] = figures
            say(f"{name}/{factor}: {figures}")
    figures = {
        "paced": deployment.paced,
        "seconds": seconds,
        "capacity_tokens_s": capacity,
        "capacities_tokens_s": capacities,
        "loads": results.get("tideserve", {}),
        "systems": results,
    }
    return TrialVerdict(figures, [("capacity", f"{capacity:,.0f} tokens/s")], [])


def _started(
    stack: ExitStack, name: str, options: Mapping[str, Any], deployment: Deployment, say: Say
) -> Tideserve:
    every = merged(deployment.options, options)
    cluster = Tideserve(name, (), replace(deployment, options=every))
    stack.callback(cluster.stop)
    cluster.start(say)
    return cluster


def _labelled(progress: Say, label: str) -> Callable[[str], None]:
    return lambda line: progress(label + line)


SCENARIO = Scenario(
    name="overload",
    memory="256MiB",
    run=run,
    options=frozenset({"paced", "cells", "seconds"}),
    tiny_model={"num_hidden_layers": 4},
    # Requests must not wait longer than by default.
    up_options={"queue_deadline": StateConfig().queue_deadline_s},
)
