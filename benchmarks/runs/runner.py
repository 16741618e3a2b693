"""Runs a scenario: systems take turns, round by round, so that a drift of the machine hits all.

While one system is measured, the others are suspended or stopped: idle servers use processors, too.
"""

import contextlib
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import psutil

from benchmarks.client_process import run_job
from benchmarks.runs.sampler import CounterSampler
from benchmarks.scenarios.scenario import Case, LoadChoice, Scenario
from benchmarks.stats import LatencyTarget
from benchmarks.systems.catalog import (
    dtype_of,
    is_reference,
    is_tideserve,
    is_vllm,
    make_system,
    marks_of,
)
from benchmarks.systems.processor import read_bytes_per_s, read_gpus, read_processor
from benchmarks.systems.schedulings import serves_batch
from benchmarks.systems.system import CPU, Deployment, Say, System
from benchmarks.systems.tideserve import TIMES, Tideserve
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.client import UNFINISHED, Job
from tideserve.load.record import RequestOutcome, Round, SentRequest
from tideserve.load.workload import fixed

# The servers report their counters once a second.
SETTLE_S = 1.5
WARM_UP_TIMEOUT_S = 120.0
REQUESTS_MIN = 200
Number = TypeVar("Number", int, float)
# Beside its KV cache and parameters, a server process needs about so much.
PROCESS_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is to be measured."""

    scenario: Scenario
    choice: LoadChoice
    system_names: tuple[str, ...]
    deployment: Deployment
    targets: tuple[LatencyTarget, ...]
    api_key: str | None = None


@dataclass(slots=True)
class RunOutcomes:
    """Results of a run: rounds by case and system, and the systems that could not run."""

    rounds: dict[str, dict[str, list[Round]]] = field(default_factory=dict)
    descriptions: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    inspections: dict[str, Any] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    statements: dict[str, str] = field(default_factory=dict)


class Runner:
    """One run of one scenario."""

    def __init__(self, plan: BenchPlan, say: Say, progress: Say) -> None:
        """`say` gets sentences to keep, `progress` the current step."""
        self._plan = plan
        self._say = say
        self._progress = progress
        self._deployment = plan.deployment
        self._cases = plan.scenario.cases(plan.choice)
        self._round_count = plan.scenario.rounds(plan.choice.quick)
        self._kv_bytes: dict[str, int] = {}
        self._up: dict[str, System] = {}
        self.outcomes = RunOutcomes()

    def run(self) -> RunOutcomes:
        """Measure everything. A system that cannot run is noted, and the others go on.

        Raises:
            BenchError: if the request cannot be carried out at all.
        """
        outcomes = self.outcomes
        outcomes.machine = describe_machine(self._deployment)
        outcomes.statements = {case.name: case.workload(0).statement for case in self._cases}
        systems = self._systems()
        fits = self._fits(systems)
        self._announce(systems, fits)
        try:
            for key, (name, paced) in systems.items():
                if "=" in name:
                    # A server that does not answer is reported before anything is measured.
                    self._prepare(key, name, paced)
            for turn in range(self._round_count):
                for key in systems:
                    if key not in outcomes.unavailable:
                        self._take_turn(key, systems[key], turn, fits)
            self._inspect()
            self._judge()
        finally:
            self._stop_all()
        return outcomes

    def _systems(self) -> dict[str, tuple[str, bool]]:
        """(name, paced) by label. Those of one dtype take turns, tideserve first: it tells the KV
        bytes that vLLM gets.
        """
        names = self._plan.system_names
        dtypes = [self._dtype_of(name) for name in names]
        named = sorted(
            names, key=lambda name: (dtypes.index(self._dtype_of(name)), not is_tideserve(name))
        )
        found = {}
        for name in named:
            if self._deployment.paced and is_tideserve(name):
                found[f"{name}@{self._deployment.paced}"] = (name, True)
                if self._plan.scenario.co_serving is not None:
                    continue  # its load is for the one pace or for the other
            found[name.partition("=")[0]] = (name, False)
        return found

    def _dtype_of(self, name: str) -> str:
        return dtype_of(name) or self._deployment.dtype

    def _cases_of(self, name: str) -> Sequence[Case]:
        """The loads that this system gets."""
        second = self._dtype_of(name) != self._deployment.dtype
        return [case for case in self._cases if not (second and case.own_dtype_only)]

    def _announce(self, systems: Mapping[str, tuple[str, bool]], fits: bool) -> None:
        for case in self._cases:
            self._say(f"{case.name}: {self.outcomes.statements[case.name]}")
        turn_s = {
            key: sum(case.expected_s for case in self._cases_of(name))
            for key, (name, _) in systems.items()
        }
        seconds = sum(turn_s.values()) * self._round_count
        limit_s = sum(case.limit_s for case in self._cases) * self._round_count
        self._say(
            f"{self._round_count} rounds of {len(systems)} systems in turn: about"
            f" {seconds / 60:.0f} minutes of measuring on two cores (at most"
            f" {limit_s / 60:.0f} per system), without starting the servers"
        )
        if rehearsing := [key for key, (name, _) in systems.items() if is_vllm(name)]:
            times = 1 if fits else self._round_count
            more_s = times * sum(turn_s[key] for key in rehearsing)
            self._say(
                f"{', '.join(rehearsing)}: a round that does not count goes before each start's"
                f" first: about {more_s / 60:.0f} minutes more"
            )
        for case in self._cases:
            if case.expected_s > case.limit_s:
                self._say(
                    f"{case.name}: a round takes about {case.expected_s:.0f} s and is ended after"
                    f" {case.limit_s:.0f} s, so the last answers may be cut off; choose a higher"
                    " --rate, or leave --quick out"
                )

    def _fits(self, systems: Mapping[str, tuple[str, bool]]) -> bool:
        """Whether there is memory for all servers that are kept between their turns."""
        ours = [name for name, _ in systems.values() if "=" not in name]
        deployment = self._deployment
        each = {
            name: PROCESS_BYTES
            + (deployment.ample_memory_bytes if is_reference(name) else deployment.memory_bytes)
            for name in ours
        }
        kept = [name for name in each if not is_tideserve(name)]
        passing = [each[name] for name in each if is_tideserve(name)]
        needed = sum(each[name] for name in kept)
        needed += sum(passing) if self._plan.scenario.inspect else max(passing, default=0)
        needed *= deployment.workers
        fits = needed < psutil.virtual_memory().available
        if not fits:
            self._say("memory is short: servers are started anew for each round")
        return fits

    def _take_turn(self, key: str, named: tuple[str, bool], turn: int, fits: bool) -> None:
        name, paced = named
        try:
            if key in self._up:
                system = self._up[key]
                system.wake()
            else:
                system = self._start(key, name, paced)
            for case in self._cases_of(name):
                label = f"round {turn + 1}/{self._round_count} {case.name} {key}"
                measured = self._measure(system, case, turn, label)
                self.outcomes.rounds.setdefault(case.name, {}).setdefault(key, []).append(measured)
            self._set_aside(key, fits)
        except SystemUnavailable as error:
            self._give_up(key, error)

    def _prepare(self, key: str, name: str, paced: bool) -> None:
        try:
            self._start(key, name, paced)
        except SystemUnavailable as error:
            self._give_up(key, error)

    def _give_up(self, key: str, error: SystemUnavailable) -> None:
        self._say(f"{key} cannot run: {error}")
        self.outcomes.unavailable[key] = str(error)
        if (broken := self._up.pop(key, None)) is not None:
            broken.stop()

    def _set_aside(self, key: str, fits: bool) -> None:
        """Keep a system out of the way of the others until its next turn."""
        if self._plan.scenario.inspect is not None and fits:
            return  # this reads figures of servers, so they must still run
        if not fits or not self._up[key].rest():
            self._up.pop(key).stop()

    def _start(self, key: str, name: str, paced: bool) -> System:
        dtype = self._dtype_of(name)
        deployment = replace(
            self._deployment,
            paced=self._deployment.paced if paced else None,
            kv_bytes=self._kv_bytes.get(dtype, self._deployment.kv_bytes),
        )
        system = make_system(name, deployment, self._plan.api_key)
        self._up[key] = system
        started_s = time.monotonic()
        system.start(self._say)
        self._say(f"{key}: ready after {time.monotonic() - started_s:.0f} s")
        if isinstance(system, Tideserve) and not is_reference(name):
            self._kv_bytes[dtype] = system.kv_bytes_per_worker()
        self._warm_up(system)
        rehearses = is_vllm(name)
        if rehearses:
            self._rehearse(key, system, self._cases_of(name))
        # Its iterations are to be counted before the first round, not in it.
        time.sleep(SETTLE_S)
        self.outcomes.descriptions[key] = {**system.describe(), "rehearsed": rehearses}
        return system

    def _warm_up(self, system: System) -> None:
        # Each server gets as many: a client of a closed loop keeps its own.
        clients = max(2, len(system.urls))
        job = Job(
            urls=tuple(system.urls),
            model=system.model,
            requests=fixed(2 * clients, 64, 16, seed=-1).requests,
            timeout_s=WARM_UP_TIMEOUT_S,
            concurrency=clients,
            api_key=system.api_key,
        )
        records = run_job(job, lambda line: None)
        failed = [record for record in records if record.outcome is not RequestOutcome.COMPLETED]
        if failed:
            raise SystemUnavailable(f"it does not answer a first request: {failed[0].error}")

    def _rehearse(self, key: str, system: System, cases: Sequence[Case]) -> None:
        """A round that does not count: vLLM compiles for each batch size that it first meets."""
        for case in cases:
            label = f"{key}: rehearsing {case.name}"
            self._note_failures(label, self._run(system, case, self._round_count, label))

    def _run(self, system: System, case: Case, turn: int, label: str) -> tuple[SentRequest, ...]:
        workload = case.workload(turn)
        make_backlog = case.backlog if serves_batch(system.name) else None
        job = Job(
            urls=tuple(system.urls),
            model=system.model,
            requests=workload.requests,
            timeout_s=case.limit_s,
            concurrency=case.concurrency,
            lead_in=workload.lead_in,
            api_key=system.api_key,
            backlog=None if make_backlog is None else make_backlog(turn),
            marks=marks_of(system.name),
        )
        return run_job(job, lambda line: self._progress(f"{label}: {line} requests"))

    def _measure(self, system: System, case: Case, turn: int, label: str) -> Round:
        before = system.counters()
        with CounterSampler(system) as sampler:
            records = self._run(system, case, turn, label)
        self._note_failures(label, records)
        if before.preemptions is not None:
            time.sleep(SETTLE_S)
        after = system.counters()
        return Round(
            records=records,
            preemptions=_difference(after.preemptions, before.preemptions),
            capacity_tokens=after.capacity_tokens,
            capacity_samples=tuple(sampler.capacity_samples),
            pipeline_samples=tuple(sampler.pipeline_samples),
            token_samples=tuple(sampler.token_samples),
            **{name: _difference(getattr(after, name), getattr(before, name)) for name in TIMES},
        )

    def _note_failures(self, label: str, records: Sequence[SentRequest]) -> None:
        failed = [record for record in records if record.outcome is RequestOutcome.FAILED]
        if failed:
            self._say(f"{label}: {len(failed)} requests failed, the first: {failed[0].error}")
        # Slow is a result; a round without any answer of another cause is not.
        if len(failed) == len(records) and any(one.error != UNFINISHED for one in failed):
            raise SystemUnavailable(f"every request failed, the first: {failed[0].error}")

    def _judge(self) -> None:
        """Note systems without any completed request, and quick runs that were too slow."""
        for key, (name, _) in self._systems().items():
            measured = [found.get(key, ()) for found in self.outcomes.rounds.values()]
            if not any(measured):
                continue
            records = [r for rounds in measured for one in rounds for r in one.records]
            # Beside batch work, answers may last longer than a round.
            beside = self._plan.scenario.co_serving is not None
            if not any(
                record.outcome is RequestOutcome.COMPLETED or (beside and record.token_times_s)
                for record in records
            ):
                self.outcomes.unavailable.setdefault(key, "it completed no request in time")
            elif len(records) < min(REQUESTS_MIN, self._requests_of(name)):
                self._say(
                    f"{key}: only {len(records)} requests fitted into the time, so the figures"
                    " are rough; the machine is slow or busy"
                )

    def _requests_of(self, name: str) -> int:
        """How many a system would be measured with if there were no limit of time."""
        loads = [case.workload(0) for case in self._cases_of(name)]
        return self._round_count * sum(len(load.requests) - load.lead_in for load in loads)

    def _inspect(self) -> None:
        if self._plan.scenario.inspect is None:
            return
        self._progress("reading the servers' own figures")
        try:
            self.outcomes.inspections = dict(
                self._plan.scenario.inspect(self._up, self.outcomes.rounds)
            )
        except SystemUnavailable as error:
            self.outcomes.unavailable[self._plan.scenario.name] = str(error)

    def _stop_all(self) -> None:
        with contextlib.ExitStack() as stack:
            for system in self._up.values():
                stack.callback(system.stop)
        self._up.clear()


def _difference(after: Number | None, before: Number | None) -> Number | None:
    """The increase of a counter; None if a value is unknown or the counter was reset."""
    if after is None or before is None or after < before:
        return None
    return after - before


def describe_machine(deployment: Deployment) -> dict[str, Any]:
    """The machine on which the figures were measured, and how busy it was before."""
    processor = read_processor()
    gpus = {} if deployment.device == CPU else {"device": deployment.device, "gpus": read_gpus()}
    return gpus | {
        "cpu": processor.name,
        "cpu_flags": list(processor.flags),
        "cores": len(deployment.cores),
        "read_bytes_per_s": read_bytes_per_s(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average_before": list(psutil.getloadavg()),
    }
