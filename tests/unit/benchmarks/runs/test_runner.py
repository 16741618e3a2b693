"""Systems run in turn; waiting systems are paused."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.co_serving.bars import COSERVE
from benchmarks.co_serving.online_load import OnlineLoad, OnlineTargets
from benchmarks.runs import runner
from benchmarks.runs.runner import BenchPlan, Runner, RunOutcomes
from benchmarks.scenarios.scenario import Case, CoServing, LoadChoice, Scenario
from benchmarks.systems.system import Counters, Deployment, Say
from tideserve.load.client import Job
from tideserve.load.record import RequestOutcome, SentRequest
from tideserve.load.workload import Backlog, fixed

LOAD = fixed(2, 4, 1, seed=0)


class Noted:
    """A system that records its calls; `patient` ones can be paused."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self.urls: Sequence[str] = (f"http://{name}",)
        self.model = "m"
        self.api_key: str | None = None
        self._notes = notes

    def start(self, say: Say) -> None:
        self._notes.append(f"{self.name} starts")

    def stop(self) -> None:
        self._notes.append(f"{self.name} stops")

    def rest(self) -> bool:
        self._notes.append(f"{self.name} rests")
        return self.name == "patient"

    def wake(self) -> None:
        self._notes.append(f"{self.name} wakes")

    def counters(self) -> Counters:
        return Counters()

    def describe(self) -> Mapping[str, Any]:
        return {}


class Sent(list[tuple[str, Job]]):
    """(system, job) of every job; jobs of LOAD are also in `notes`."""

    notes: list[str]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """The jobs that are sent; each of their requests completes."""
    jobs = Sent()
    jobs.notes = []

    def run_job(job: Job, progress: Say) -> tuple[SentRequest, ...]:
        jobs.append((job.urls[0].removeprefix("http://"), job))
        if job.requests == LOAD.requests:
            jobs.notes.append(f"{jobs[-1][0]} is measured")
        return tuple(
            SentRequest(0.0, 0.0, 0.1, RequestOutcome.COMPLETED, 4, 1, token_times_s=(0.1,))
            for _ in job.requests
        )

    monkeypatch.setattr(runner, "run_job", run_job)
    monkeypatch.setattr(runner, "SETTLE_S", 0.0)
    return jobs


def run(
    folder: Path,
    cases: Sequence[Case],
    names: tuple[str, ...],
    rounds: int = 2,
    paced: str | None = None,
    say: Say = lambda line: None,
    choice: LoadChoice | None = None,
    **options: Any,
) -> RunOutcomes:
    scenario = Scenario("one", "1GiB", lambda choice: cases, rounds=(rounds, rounds), **options)
    deployment = Deployment(folder, "m", folder, workers=1, memory_bytes=1, paced=paced)
    plan = BenchPlan(scenario, choice or LoadChoice(), names, deployment, ())
    outcomes = Runner(plan, say, lambda line: None).run()
    assert outcomes.unavailable == {}
    return outcomes


def test_systems_rest_while_another_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: Sent
) -> None:
    notes: list[str] = []
    sent.notes = notes
    monkeypatch.setattr(runner, "make_system", lambda name, *_: Noted(name, notes))
    case = Case("one", lambda turn: LOAD, concurrency=2, expected_s=1, limit_s=1)
    run(tmp_path, [case], ("patient", "restless"))
    assert notes == [
        *("patient starts", "patient is measured", "patient rests"),
        *("restless starts", "restless is measured", "restless rests", "restless stops"),
        *("patient wakes", "patient is measured", "patient rests"),
        *("restless starts", "restless is measured", "restless rests", "restless stops"),
        "patient stops",
    ]


def test_vllm_warms_up_before_its_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: Sent
) -> None:
    """Compilation for a new batch size is not part of its speed."""
    loads = [fixed(2, 4, 1, seed=turn) for turn in range(3)]
    monkeypatch.setattr(runner, "make_system", lambda name, *_: Noted(name, []))
    case = Case("one", loads.__getitem__, concurrency=2, expected_s=1, limit_s=1)
    outcomes = run(tmp_path, [case], ("vllm",))
    turns = [
        turn for _, job in sent for turn, load in enumerate(loads) if load.requests == job.requests
    ]
    # Its server was restarted for the second round, so it warms up again.
    assert turns == [2, 0, 2, 1]
    assert len(outcomes.rounds["one"]["vllm"]) == 2


def test_systems_of_a_dtype_alternate_and_a_second_dtype_gets_fewer_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: Sent
) -> None:
    loads = {"all": fixed(2, 4, 1, seed=0), "some": fixed(2, 4, 1, seed=1)}
    monkeypatch.setattr(runner, "make_system", lambda name, *_: Noted(name, []))
    cases = [
        Case(name, lambda turn, name=name: loads[name], 2, 1, 1, own_dtype_only=name == "some")
        for name in loads
    ]
    names = ("a=http://a", "drop", "a-float32=http://b", "drop-float32", "recompute")
    lines: list[str] = []
    run(tmp_path, cases, names, rounds=1, say=lines.append)
    by_load = {
        name: [system for system, job in sent if job.requests == load.requests]
        for name, load in loads.items()
    }
    own = ["drop", "recompute", "a=http://a", "a-float32=http://b"]
    assert by_load == {"all": [*own, "drop-float32"], "some": own}
    # Few requests are rough figures only where more were meant to be measured.
    assert not [line for line in lines if "fitted into the time" in line]


def test_co_serving_systems_get_the_backlog_and_a_paced_run_has_no_unpaced_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: Sent
) -> None:
    def make(name: str, deployment: Deployment, _: str | None) -> Noted:
        return Noted(name + ("@paced" if deployment.paced else ""), [])

    monkeypatch.setattr(runner, "make_system", make)
    backlog = Backlog(3, (8, 8), (2, 2), seed=7)
    case = Case("one", lambda turn: LOAD, None, 1, 1, backlog=lambda turn: backlog)
    load = OnlineLoad(1.0, OnlineTargets(1.0, 1.0), 1.0, 1.0)
    co_serving = CoServing(lambda choice: load, COSERVE)
    names = ("online-only", "slo")
    run(tmp_path, [case], names, rounds=1, paced="A100-14B", co_serving=co_serving)
    backlogs = {system: job.backlog for system, job in sent if job.requests == LOAD.requests}
    assert backlogs == {"online-only@paced": None, "slo@paced": backlog}


@pytest.mark.parametrize(
    ("alone", "measured"), [(True, ["drop@paced"]), (False, ["drop@paced", "drop"])]
)
def test_a_load_that_overflows_paced_systems_only_has_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: Sent, alone: bool, measured: list[str]
) -> None:
    def make(name: str, deployment: Deployment, _: str | None) -> Noted:
        return Noted(name + ("@paced" if deployment.paced else ""), [])

    monkeypatch.setattr(runner, "make_system", make)
    case = Case("one", lambda turn: LOAD, None, 1, 1)
    run(tmp_path, [case], ("drop",), rounds=1, paced="A100-14B", paced_alone=alone)
    assert [system for system, job in sent if job.requests == LOAD.requests] == measured


def test_the_number_of_rounds_is_configurable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: Sent
) -> None:
    monkeypatch.setattr(runner, "make_system", lambda name, *_: Noted(name, []))
    case = Case("one", lambda turn: LOAD, None, 1, 1)
    outcomes = run(tmp_path, [case], ("drop", "migrate"), choice=LoadChoice(rounds=1))
    assert [len(rounds) for rounds in outcomes.rounds["one"].values()] == [1, 1]


class Counting(Noted):
    """A system whose counters rise by 10 tokens each time they are read."""

    processed = 0.0

    def counters(self) -> Counters:
        self.processed += 10.0
        return Counters(processed=self.processed, batch_processed=self.processed / 2)


def test_counters_are_sampled_while_a_round_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "INTERVAL_S", 0.001)
    with runner.sampled(Counting("one", [])) as samples:
        while len(samples) < 3:
            time.sleep(0.001)
    (first_s, first), (second_s, second) = samples[:2]
    assert (first.processed, first.batch_processed, first.output) == (10.0, 5.0, None)
    assert second.processed == 20.0 and second_s > first_s
