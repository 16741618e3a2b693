"""The ablation: its load, and what each step changes against the one before."""

import io
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.ablation import effects
from benchmarks.runs.report import show
from benchmarks.runs.result import result_of
from benchmarks.runs.runner import BenchPlan, RunOutcomes
from benchmarks.scenarios.ablation import SCENARIO, STEPS
from benchmarks.scenarios.scenario import LoadChoice
from benchmarks.systems.catalog import check_names
from benchmarks.systems.system import Deployment
from tests.support.safetensors_file import write_safetensors
from tideserve.load.record import RequestOutcome, Round, SentRequest


def measured(ttft_s: float, bubble_s: float | None) -> Round:
    """Ten requests with that time to first token, on stages that were busy for 9 s."""
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
    return Round(records, 1, 1000, busy_s=busy_s, bubble_s=bubble_s)


def result(tmp_path: Path, rounds: dict[str, list[Round]]) -> dict:
    write_safetensors(tmp_path / "model.safetensors", [30])
    deployment = Deployment(tmp_path, "m", tmp_path, 2, 100, paced="A100-14B")
    plan = BenchPlan(SCENARIO, LoadChoice(quick=True), tuple(rounds), deployment, SCENARIO.targets)
    found = RunOutcomes()
    found.rounds = {"ablation/flood": rounds, "ablation/trickle": rounds}
    return result_of(plan, found)


def test_the_steps_switch_one_mechanism_on_after_the_other() -> None:
    check_names(SCENARIO.systems)
    off = [set(system.split("-")[1:]) for system in STEPS.values()]
    assert off[0] == {"exchange", "lookahead", "restore"} and not off[-1]
    assert all(len(one - other) == 1 and other < one for one, other in pairwise(off))


@pytest.mark.parametrize("paced", [False, True])
def test_prompts_differ_much_and_a_trickle_follows_the_flood(paced: bool) -> None:
    flood, trickle = SCENARIO.cases(LoadChoice(quick=True, paced=paced))
    assert flood.expected_s < flood.limit_s and trickle.expected_s < trickle.limit_s
    requests = flood.workload(1).requests
    lengths = sorted(len(request.prompt_ids) for request in requests)
    assert lengths[len(lengths) * 9 // 10] > 4 * lengths[len(lengths) // 10]
    again = trickle.workload(1).requests
    assert [one.prompt_ids for one in again] == [one.prompt_ids for one in requests[: len(again)]]
    rate_per_s = len(requests) / requests[-1].arrival_s
    assert len(again) / again[-1].arrival_s < rate_per_s / 2


def test_each_step_is_compared_with_the_one_before(tmp_path: Path) -> None:
    first, second, _, last = STEPS.values()
    rounds = {
        first: [measured(8.0, 3.0), measured(4.0, 3.0)],
        second: [measured(4.0, 1.0), measured(3.0, 1.0)],
        last: [measured(1.0, 0.0), measured(1.0, None)],
        f"{last}@A100-14B": [measured(2.0, 1.0)],
    }
    found = result(tmp_path, rounds)
    assert list(found["steps"]) == ["ablation/flood", "ablation/trickle"]
    by_device = found["steps"]["ablation/flood"]
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
    output = io.StringIO()
    show(found, Console(width=250, file=output))
    (line, _) = [
        one for one in output.getvalue().splitlines() if one.strip(" │┃").startswith("+ coord")
    ]
    assert "10.0% (×0.40)" in line and "4,000 (×0.50)" in line


def test_without_pipelines_there_is_no_bubble(tmp_path: Path) -> None:
    rounds = {system: [measured(1.0, None)] for system in STEPS.values()}
    systems = result(tmp_path, rounds)["systems"]
    rows = effects(STEPS, systems)["unpaced"]
    assert all(row["bubble_share"] is None for row in rows)
    assert rows[1]["effect"]["bubble_share"] is None
