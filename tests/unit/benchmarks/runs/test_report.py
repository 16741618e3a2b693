"""Tables, JSON and pictures from measured rounds."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from rich.console import Console

from benchmarks.errors import BenchError
from benchmarks.run import read_target
from benchmarks.runs.report import show
from benchmarks.runs.result import effects, result_of
from benchmarks.runs.runner import BenchPlan, RunOutcomes
from benchmarks.scenarios.burst import STEPS
from benchmarks.scenarios.scenario import LoadChoice, find_scenario
from benchmarks.systems.catalog import is_reference
from benchmarks.systems.system import Deployment
from tests.support.safetensors_file import write_safetensors
from tideserve.load.record import RequestOutcome, Round, SentRequest


def measured(ttft_s: float, capacity: int | None = 1000, bubble_s: float | None = None) -> Round:
    """Ten requests with this time to first token; pipeline stages were busy for 9 s."""
    records = tuple(
        SentRequest(
            float(due),
            float(due),
            due + ttft_s + 1,
            RequestOutcome.COMPLETED,
            40,
            11,
            tuple(due + ttft_s + 0.1 * index for index in range(11)),
        )
        for due in range(10)
    )
    busy_s = None if bubble_s is None else 9.0
    return Round(records, 1, capacity, busy_s=busy_s, bubble_s=bubble_s)


def shown(result: dict[str, Any]) -> str:
    output = io.StringIO()
    show(result, Console(file=output, width=250))
    return output.getvalue()


@pytest.fixture
def outcomes() -> RunOutcomes:
    run_outcomes = RunOutcomes()
    run_outcomes.rounds = {
        "burst": {
            "recompute": [measured(20.0), measured(22.0)],
            "vllm": [measured(30.0, None)],
            "recompute-ample": [measured(1.0, 50_000)],
        }
    }
    run_outcomes.unavailable = {"other": "it said [nothing]"}
    return run_outcomes


@pytest.fixture
def plan(tmp_path: Path) -> BenchPlan:
    write_safetensors(tmp_path / "model.safetensors", [30])
    deployment = Deployment(
        model_dir=tmp_path,
        model_name="m",
        cache=tmp_path,
        workers=2,
        memory_bytes=100,
        paced="A100-14B",
    )
    scenario = find_scenario("burst")
    return BenchPlan(scenario, LoadChoice(quick=True), ("recompute",), deployment, scenario.targets)


def test_outputs_shorter_than_requested_are_reported(
    plan: BenchPlan, outcomes: RunOutcomes
) -> None:
    """A server that does not force lengths had less to do."""
    short = [msgspec.structs.replace(record, short=True) for record in measured(1.0).records]
    for records, expected in ((measured(1.0).records, False), (tuple(short), True)):
        outcomes.rounds["burst"]["vllm"] = [Round(records)]
        text = shown(result_of(plan, outcomes))
        assert ("shorter than asked for" in text) is expected


def test_a_reference_system_sets_no_target(plan: BenchPlan, outcomes: RunOutcomes) -> None:
    """ "5 × the best system's P50" is that of a competitor, not of the row without a limit."""
    result = result_of(plan, outcomes)
    assert result["systems"]["recompute"]["slo_attainment"]["ttft ≤ 5× best p50"] == 1.0
    assert is_reference("recompute-ample") and is_reference("recompute-ample@A100-14B")
    assert not is_reference("recompute") and not is_reference("vllm")


def test_the_best_system_has_the_same_pacing(plan: BenchPlan, outcomes: RunOutcomes) -> None:
    """An unpaced device cannot be compared with a paced one."""
    outcomes.rounds["burst"]["fast"] = [measured(0.01)]
    outcomes.rounds["burst"]["recompute@A100-14B"] = [measured(1.0)]
    paced = result_of(plan, outcomes)["systems"]["recompute@A100-14B"]
    assert paced["slo_attainment"]["ttft ≤ 5× best p50"] == 1.0


def test_the_table_marks_paced_systems_and_failures(plan: BenchPlan, outcomes: RunOutcomes) -> None:
    text = shown(result_of(plan, outcomes))
    assert "@A100-14B is paced" in text and "other could not run: it said [nothing]" in text


def test_a_load_below_capacity_is_reported(plan: BenchPlan, outcomes: RunOutcomes) -> None:
    outcomes.rounds["burst"] = {
        "recompute@A100-14B": [measured(20.0), measured(20.0, capacity=100)],
        "drop@A100-14B": [measured(20.0, capacity=100)],
        "recompute-ample@A100-14B": [measured(1.0, 50_000)],
        "recompute": [measured(1.0)],
        "vllm": [measured(30.0, None)],
    }
    (sentence,) = result_of(plan, outcomes)["too_mild"]
    assert sentence.startswith("recompute@A100-14B: KV demand peaked at 0.6")
    unpaced = replace(plan, deployment=replace(plan.deployment, paced=None))
    (sentence,) = result_of(unpaced, outcomes)["too_mild"]
    assert sentence.startswith("recompute: KV demand peaked at 0.1")
    outcomes.rounds["burst"] = {"recompute": [measured(20.0, capacity=100)]}
    assert "too_mild" not in result_of(unpaced, outcomes)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=-1", "ttft=inf", "what=1", "tpot=nanx"])
def test_an_invalid_target_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="is not a target"):
        read_target(text)


def test_a_real_time_result_is_judged_by_the_load_of_its_name(plan: BenchPlan) -> None:
    """The other loads of a full run are shown without bars."""
    plan = replace(
        plan, scenario=find_scenario("realtime"), choice=LoadChoice(paced=True, slowdown=0.1)
    )
    plan = replace(plan, deployment=replace(plan.deployment, paced="A100-40G-7B"))
    run_outcomes = RunOutcomes()
    fast, slow = measured(0.03), measured(20.0)
    run_outcomes.rounds = {
        "realtime": {"fcfs@A100-40G-7B": [slow], "slo@A100-40G-7B": [fast]},
        "realtime-lower": {"fcfs@A100-40G-7B": [fast], "slo@A100-40G-7B": [fast]},
    }
    result = result_of(plan, run_outcomes)
    attained = {
        name: scenario["systems"]["fcfs@A100-40G-7B"]["classes"]["online"]["slo_attainment"]
        for name, scenario in result["scenarios"].items()
    }
    assert {"ttft", "tpot", "token_group"} <= attained["realtime"].keys()
    assert (attained["realtime"]["ttft"], attained["realtime-lower"]["ttft"]) == (0.0, 1.0)
    first, *_ = result["co_serving"]["bars"]
    assert (first["system"], first["what"]) == ("fcfs", "attainment of first tokens")
    assert first["value"] == attained["realtime"]["ttft"]


def test_a_flood_is_judged_by_its_event_logs(plan: BenchPlan) -> None:
    """A change of groups that has never settled fails, and the result can be written."""
    plan = replace(plan, scenario=find_scenario("flood"), choice=LoadChoice(paced=True))
    run_outcomes = RunOutcomes()
    names = ("online-only@A100-14B", "slo@A100-14B")
    run_outcomes.rounds = {"flood": {name: [measured(20.0)] for name in names}}
    logged = {"changes": [{"merge": True, "settled_s": None}], "problems": ["I11: dearer"]}
    run_outcomes.inspections = {names[1]: logged}
    result = result_of(plan, run_outcomes)
    assert result["systems"][names[1]]["changes"] == logged["changes"]
    failed = {bar["what"] for bar in result["co_serving"]["bars"] if bar["verdict"] == "fails"}
    assert {"longest change of groups [s]", "problems in the logs", "splits"} <= failed
    assert orjson.dumps(result)


def test_each_ablation_step_is_compared_with_its_predecessor(plan: BenchPlan) -> None:
    first, second, _, last = STEPS.values()
    rounds = {
        first: [measured(8.0, bubble_s=3.0), measured(4.0, bubble_s=3.0)],
        second: [measured(4.0, bubble_s=1.0), measured(3.0, bubble_s=1.0)],
        last: [measured(1.0, bubble_s=0.0), measured(1.0)],
        f"{last}@A100-14B": [measured(2.0, bubble_s=1.0)],
    }
    cases = {"ablation/flood": rounds, "ablation/trickle": rounds}
    result = result_of(replace(plan, scenario=find_scenario("ablation")), RunOutcomes(cases))
    assert list(result["steps"]) == list(cases)
    by_device = result["steps"]["ablation/flood"]
    assert list(by_device) == ["unpaced", "A100-14B"]
    rows = by_device["unpaced"]
    assert [row["step"] for row in rows] == ["drop only", "+ coordinated exchange", "+ restore"]
    assert "effect" not in rows[0]
    assert rows[0]["bubble_share"] == pytest.approx(6 / 24)
    assert (rows[1]["bubble_s"], rows[1]["busy_s"]) == (2.0, 18.0)
    assert rows[1]["effect"]["ttft_p99_s"] == pytest.approx(0.5)
    assert rows[1]["effect_range"]["ttft_p99_s"] == pytest.approx([0.5, 0.75])
    assert rows[1]["effect"]["bubble_share"] == pytest.approx(0.1 / 0.25)
    assert rows[2]["effect_range"]["bubble_share"] == [0.0, 0.0]
    # Without pipelines there is no bubble.
    plain = {case: {name: [measured(1.0)] for name in STEPS.values()} for case in cases}
    systems = result_of(plan, RunOutcomes(plain))["systems"]
    assert [row["bubble_share"] for row in effects(STEPS, systems)["unpaced"]] == [None] * 4
