"""Run a comparison: systems alternate by round, so that drift of the machine affects all of them.

While a system is measured, the others are suspended or stopped, since idle servers use processors.
"""

import contextlib
import platform
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import psutil

from benchmarks.client_process import run_job
from benchmarks.scenarios.scenario import Case, LoadChoice, Scenario
from benchmarks.stats import LatencyTarget
from benchmarks.systems.catalog import (
    class_fields_of,
    dtype_of,
    is_reference,
    is_tideserve,
    is_vllm,
    make_system,
)
from benchmarks.systems.processor import read_bytes_per_s, read_gpus, read_processor
from benchmarks.systems.schedulings import gets_files, serves_batch
from benchmarks.systems.system import CPU, Counters, Deployment, Say, System
from benchmarks.systems.tideserve import TIMES, Tideserve
from services.common.clock import monotonic_s
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.client import UNFINISHED, Job
from tideserve.load.record import RequestOutcome, Round, SentRequest, TokenSample
from tideserve.load.workload import fixed

# Servers report their counters once a second.
SETTLE_S = 1.5
INTERVAL_S = 1.0
WARM_UP_TIMEOUT_S = 120.0
LINES_PER_CLIENT = 4
"""Lines of a file per client of the backlog that it replaces: more than run in a round."""
REQUESTS_MIN = 200
PROCESS_BYTES = 1 << 30
"""Approximate memory of a server process in addition to KV cache and parameters."""
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Scenario, systems and options of a comparison."""

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
    """A run of a scenario."""

    def __init__(self, plan: BenchPlan, say: Say, progress: Say) -> None:
        """`say` prints permanent lines, `progress` the current step."""
        self._plan = plan
        self._say = say
        self._progress = progress
        self._deployment = plan.deployment
        self._cases = plan.scenario.cases(plan.choice)
        self._round_count = plan.scenario.round_count(plan.choice)
        self._systems = self._in_order()
        self._fits = True
        self._kv_bytes: dict[str, int] = {}
        self._up: dict[str, System] = {}
        self.outcomes = RunOutcomes()

    def run(self) -> RunOutcomes:
        """Measure all systems. A system that cannot run is recorded, and the others continue.

        Raises:
            BenchError: if the comparison cannot run at all.
        """
        outcomes = self.outcomes
        outcomes.machine = describe_machine(self._deployment)
        outcomes.statements = {case.name: case.workload(0).statement for case in self._cases}
        self._check_memory()
        self._announce()
        try:
            for key, (name, _) in self._systems.items():
                if "=" in name:
                    # Report an unreachable server before measuring.
                    with self._noting(key):
                        self._start(key)
            for turn in range(self._round_count):
                for key in self._systems:
                    if key not in outcomes.unavailable:
                        with self._noting(key):
                            self._take_turn(key, turn)
            self._inspect()
            self._check_requests()
        finally:
            with contextlib.ExitStack() as stack:
                for system in self._up.values():
                    stack.callback(system.stop)
            self._up.clear()
        return outcomes

    def _in_order(self) -> dict[str, tuple[str, bool]]:
        """(name, paced) by label. Systems of the same dtype alternate; tideserve is first, since
        vLLM gets the same number of KV bytes.
        """
        names = self._plan.system_names
        dtypes = [self._dtype_of(name) for name in names]
        systems = {}
        for name in sorted(
            names, key=lambda name: (dtypes.index(self._dtype_of(name)), not is_tideserve(name))
        ):
            if self._deployment.paced and is_tideserve(name):
                systems[f"{name}@{self._deployment.paced}"] = (name, True)
                scenario = self._plan.scenario
                if scenario.paced_alone or scenario.co_serving is not None:
                    continue  # its load is sized for a single pace
            systems[name.partition("=")[0]] = (name, False)
        return systems

    def _dtype_of(self, name: str) -> str:
        return dtype_of(name) or self._deployment.dtype

    def _cases_of(self, key: str) -> Sequence[Case]:
        """The loads of a system."""
        second = self._dtype_of(self._systems[key][0]) != self._deployment.dtype
        return [case for case in self._cases if not (second and case.own_dtype_only)]

    def _announce(self) -> None:
        for case in self._cases:
            self._say(f"{case.name}: {self.outcomes.statements[case.name]}")
            if case.expected_s > case.limit_s:
                self._say(
                    f"{case.name}: a round takes about {case.expected_s:.0f} s but is ended after"
                    f" {case.limit_s:.0f} s, so the last answers may be cut off; choose a higher"
                    " --rate, or leave --quick out"
                )
        count = self._round_count
        turns = {key: sum(case.expected_s for case in self._cases_of(key)) for key in self._systems}
        # A warm-up round that does not count follows each start of vLLM.
        rehearsals_s = (1 if self._fits else count) * sum(
            turns[key] for key, (name, _) in self._systems.items() if is_vllm(name)
        )
        self._say(
            f"{count} rounds of {len(turns)} systems in turn: about"
            f" {(sum(turns.values()) * count + rehearsals_s) / 60:.0f} minutes on two cores (at"
            f" most {sum(case.limit_s for case in self._cases) * count / 60:.0f} per system),"
            " without starting the servers"
        )

    def _check_memory(self) -> None:
        """Check whether all servers kept between their turns fit into memory."""
        deployment = self._deployment
        kept: list[int] = []
        passing: list[int] = []
        for name in {name for name, _ in self._systems.values() if "=" not in name}:
            ample = is_reference(name)
            own = deployment.ample_memory_bytes if ample else deployment.memory_bytes
            (passing if is_tideserve(name) else kept).append(PROCESS_BYTES + own)
        needed = sum(kept)
        needed += sum(passing) if self._plan.scenario.inspect else max(passing, default=0)
        self._fits = needed * deployment.workers < psutil.virtual_memory().available
        if not self._fits:
            self._say("memory is short: servers are restarted for each round")

    @contextlib.contextmanager
    def _noting(self, key: str) -> Iterator[None]:
        """Record and stop a system that cannot run."""
        try:
            yield
        except SystemUnavailable as error:
            self._say(f"{key} cannot run: {error}")
            self.outcomes.unavailable[key] = str(error)
            if (broken := self._up.pop(key, None)) is not None:
                broken.stop()

    def _take_turn(self, key: str, turn: int) -> None:
        if key in self._up:
            self._up[key].wake()
        else:
            self._start(key)
        system = self._up[key]
        for case in self._cases_of(key):
            label = f"round {turn + 1}/{self._round_count} {case.name} {key}"
            measured = self._measure(system, case, turn, label)
            self.outcomes.rounds.setdefault(case.name, {}).setdefault(key, []).append(measured)
        if self._plan.scenario.inspect is not None and self._fits:
            return  # `inspect` reads from the servers, so keep them running
        if not self._fits or not system.rest():
            self._up.pop(key).stop()

    def _start(self, key: str) -> None:
        name, paced = self._systems[key]
        dtype = self._dtype_of(name)
        deployment = replace(
            self._deployment,
            paced=self._deployment.paced if paced else None,
            kv_bytes=self._kv_bytes.get(dtype, self._deployment.kv_bytes),
        )
        self._up[key] = system = make_system(name, deployment, self._plan.api_key)
        started_s = time.monotonic()
        system.start(self._say)
        self._say(f"{key}: ready after {time.monotonic() - started_s:.0f} s")
        if isinstance(system, Tideserve) and not is_reference(name):
            self._kv_bytes[dtype] = system.kv_bytes_per_worker()
        self._warm_up(system)
        if is_vllm(name):
            # vLLM compiles at the first use of each batch size.
            for case in self._cases_of(key):
                label = f"{key}: rehearsing {case.name}"
                self._note_failures(label, self._send(system, case, self._round_count, label))
        # Let warm-up iterations be counted before the first round.
        time.sleep(SETTLE_S)
        self.outcomes.descriptions[key] = {**system.describe(), "rehearsed": is_vllm(name)}

    def _warm_up(self, system: System) -> None:
        # Each server gets the same number: a closed-loop client keeps its server.
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
            raise SystemUnavailable(f"the first request failed: {failed[0].error}")

    def _send(self, system: System, case: Case, turn: int, label: str) -> tuple[SentRequest, ...]:
        workload = case.workload(turn)
        backlog = case.backlog(turn) if case.backlog and serves_batch(system.name) else None
        if backlog is not None and gets_files(system.name):
            backlog = replace(backlog, lines=LINES_PER_CLIENT * backlog.clients)
        job = Job(
            urls=tuple(system.urls),
            model=system.model,
            requests=workload.requests,
            timeout_s=case.limit_s,
            concurrency=case.concurrency,
            lead_in=workload.lead_in,
            api_key=system.api_key,
            backlog=backlog,
            class_fields=class_fields_of(system.name),
        )
        return run_job(job, lambda line: self._progress(f"{label}: {line} requests"))

    def _measure(self, system: System, case: Case, turn: int, label: str) -> Round:
        before = system.counters()
        with sampled(system) as samples:
            records = self._send(system, case, turn, label)
        self._note_failures(label, records)
        # Wait until the servers have reported their final counters.
        if before.preemptions is not None:
            time.sleep(SETTLE_S)
        after = system.counters()
        return Round(
            records=records,
            preemptions=_increase(after.preemptions, before.preemptions),
            recomputed_tokens=_increase(after.recomputed, before.recomputed),
            capacity_tokens=after.capacity_tokens,
            capacity_samples=tuple(
                (time_s, now.capacity_now_tokens)
                for time_s, now in samples
                if now.capacity_now_tokens is not None
            ),
            pipeline_samples=tuple(
                (time_s, now.busy_s, now.bubble_s)
                for time_s, now in samples
                if now.busy_s is not None and now.bubble_s is not None
            ),
            token_samples=tuple(
                TokenSample(
                    *(time_s, now.processed, now.output, now.recomputed),
                    *(now.batch_processed, now.batch_recomputed),
                )
                for time_s, now in samples
                if now.processed is not None
            ),
            **{name: _increase(getattr(after, name), getattr(before, name)) for name in TIMES},
        )

    def _note_failures(self, label: str, records: Sequence[SentRequest]) -> None:
        failed = [record for record in records if record.outcome is RequestOutcome.FAILED]
        if failed:
            self._say(f"{label}: {len(failed)} requests failed, the first: {failed[0].error}")
        # A slow round is a result; a round in which all requests fail for other causes is not.
        if len(failed) == len(records) and any(record.error != UNFINISHED for record in failed):
            raise SystemUnavailable(f"every request failed, the first: {failed[0].error}")

    def _check_requests(self) -> None:
        """Record systems without completed requests, and report quick runs that were too slow."""
        for key in self._systems:
            rounds = [round_ for by in self.outcomes.rounds.values() for round_ in by.get(key, ())]
            records = [record for round_ in rounds for record in round_.records]
            # In co-serving, answers may outlast a round.
            beside = self._plan.scenario.co_serving is not None
            answered = any(
                record.outcome is RequestOutcome.COMPLETED or (beside and record.token_times_s)
                for record in records
            )
            loads = [case.workload(0) for case in self._cases_of(key)]
            planned = self._round_count * sum(len(load.requests) - load.lead_in for load in loads)
            if rounds and not answered:
                self.outcomes.unavailable.setdefault(key, "no request completed in time")
            elif rounds and len(records) < min(REQUESTS_MIN, planned):
                self._say(
                    f"{key}: only {len(records)} requests fitted into the time, so the figures"
                    " are rough; the machine is slow or busy"
                )

    def _inspect(self) -> None:
        scenario, outcomes = self._plan.scenario, self.outcomes
        if scenario.inspect is not None:
            self._progress("reading the servers' figures")
            try:
                outcomes.inspections = dict(scenario.inspect(self._up, outcomes.rounds))
            except SystemUnavailable as error:
                outcomes.unavailable[scenario.name] = str(error)


@contextlib.contextmanager
def sampled(system: System) -> Iterator[list[tuple[float, Counters]]]:
    """(time on the clock, counters), sampled once a second in a thread."""
    samples: list[tuple[float, Counters]] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(INTERVAL_S):
            counters = system.counters()
            samples.append((monotonic_s(), counters))

    # Sample in a thread, since the caller blocks on the load generator.
    thread = threading.Thread(target=sample, name="sampler", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def _increase(after: Number | None, before: Number | None) -> Number | None:
    """Increase of a counter; None if a value is unknown or the counter was reset."""
    if after is None or before is None or after < before:
        return None
    return after - before


def describe_machine(deployment: Deployment) -> dict[str, Any]:
    """The measuring machine, and its load before the run."""
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
