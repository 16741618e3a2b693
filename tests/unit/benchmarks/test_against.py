"""`tideserve simulate --against`: simulated figures beside measured ones of the same load."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.against import CostScale, Measured, run_against, simulate
from benchmarks.scenarios.scenario import LoadChoice, find_scenario
from services.common.device_profile import parse_profile
from tideserve.cli.errors import CommandError

PROFILE = """
name: tiny, cpu, bfloat16, 1 thread
source: a test
cost: {alpha_s: 1.0e-8, beta_s: 1.0e-4, gamma_s: 0.02, lambda_s: 0.019}
"""
SHAPE = """
hidden_bytes: 100
shape: {num_layers: 4, layer_bytes: 1000000, embedding_bytes: 0, head_bytes: 0,
        tied_embeddings: false, kv_bytes: 100}
"""
OPTIONS = {
    "block_size": 16,
    "max_running": 128,
    "queue_deadline": 3600.0,
    "overload_policy": "recompute",
    "worker": {},
}


ONCE = {"prefill": 1.0, "decode": 1.0}


def result(scenario: str, sections: dict[str, Any]) -> dict[str, Any]:
    """A result of `tideserve bench`, with the fields that a simulation reads."""
    ours = {"kind": "tideserve", "paced": None, "options": OPTIONS, "kv_capacity_tokens": 4928}
    record = {
        "scenario": scenario,
        "config": {
            "load": {"quick": True, "seed": 3, "trace": None},
            "model": "tiny",
            "dtype": "bfloat16",
            "workers": 2,
            "systems": {"recompute": ours, "vllm": {"kind": "vllm"}},
        },
        "systems": sections.get(scenario, {}),
    }
    if scenario in sections:
        return record
    return record | {
        "scenarios": {load: {"systems": section} for load, section in sections.items()}
    }


def figures(ttft_s: float, tpot_s: float, tokens_per_s: float) -> dict[str, Any]:
    return {
        "ttft_s": {"p50": ttft_s},
        "tpot_s": {"p50": tpot_s},
        "throughput_tokens_per_s": tokens_per_s,
        "rounds": [{}, {}],
    }


def burst() -> dict[str, Any]:
    return result("burst", {"burst": {"recompute": figures(1, 1, 1)}})


def simulated(
    folder: Path,
    measured: dict[str, Any],
    device: str = PROFILE,
    other: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    profile, source, written = (folder / name for name in ("p.yaml", "bench.json", "out.json"))
    profile.write_text(device)
    source.write_text(json.dumps(measured))
    calibrate = None
    if other is not None:
        calibrate = source if other is measured else folder / "other.json"
        calibrate.write_text(json.dumps(other))
    run_against(source, str(profile), calibrate, written)
    rows: list[dict[str, Any]] = json.loads(written.read_text())["compared"]
    return rows


def test_figures_are_paired_by_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loads = ["steady/mixed", "steady/prefill"]
    both = result("steady", {load: {"recompute": figures(1, 1, 1)} for load in loads})
    rows = simulated(tmp_path, both)
    assert [row["load"] for row in rows] == [load for load in loads for _ in range(3)]
    measured = result("burst", {"burst": {"recompute": figures(1, 1, 1), "vllm": figures(1, 1, 1)}})
    rows = simulated(tmp_path, measured)
    assert [row["metric"] for row in rows] == ["TTFT p50", "TPOT p50", "output tokens/s"]
    assert {row["system"] for row in rows} == {"recompute"}
    # The same again, with the simulated figures as if they had been measured.
    ttft_s, tpot_s, tokens_per_s = (row["simulated"] for row in rows)
    measured["config"]["systems"]["recompute"]["paced"] = "A100-14B"
    # A paced system takes the time of its device.
    assert tpot_s != simulated(tmp_path, measured)[1]["simulated"]
    again = {"burst": {"recompute": figures(1.25 * ttft_s, tpot_s, tokens_per_s)}}
    capsys.readouterr()
    rows = simulated(tmp_path, result("burst", again))
    assert [row["difference"] for row in rows] == pytest.approx([-0.2, 0, 0])
    assert "2 of 3 figures agree within 15%" in capsys.readouterr().out


def test_iterations_are_calibrated_from_another_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = burst()
    plain = simulated(tmp_path, measured)
    loads = ["steady/prefill", "steady/mixed"]
    slow = result("steady", {load: {"recompute": figures(1, 1, 1)} for load in loads})
    slow["systems"] = {"recompute": {"cost_scale": {"prefill": 1.5, "decode": 2.0}}, "vllm": {}}
    capsys.readouterr()
    slower = simulated(tmp_path, measured, other=slow)
    output = capsys.readouterr().out
    # The figures are those of the same load, if that was measured there.
    slow["scenarios"]["burst"] = {"systems": {"recompute": {"cost_scale": ONCE}}}
    assert simulated(tmp_path, measured, other=slow) == plain
    del slow["scenarios"]["burst"]
    assert "1.50 (prefill) and 2.00 (decode) times as long" in " ".join(output.split())
    assert slower[1]["simulated"] > 1.5 * plain[1]["simulated"]
    slow["systems"]["recompute"]["cost_scale"]["decode"] = None
    with pytest.raises(CommandError, match=r"other\.json has no measured-over-predicted iteration"):
        simulated(tmp_path, measured, other=slow)


def test_a_system_is_not_calibrated_with_its_own_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = burst()
    plain = simulated(tmp_path, measured)
    measured["systems"]["recompute"]["cost_scale"] = {"prefill": 9.0, "decode": 9.0}
    with pytest.raises(CommandError, match="of systems other than recompute"):
        simulated(tmp_path, measured, other=measured)
    measured["systems"]["drop"] = figures(1, 1, 1) | {"cost_scale": ONCE}
    measured["config"]["systems"]["drop"] = {"kind": "another", "paced": None}
    assert [row["simulated"] for row in simulated(tmp_path, measured, other=measured)] == [
        row["simulated"] for row in plain
    ]
    assert "iterations of systems other than recompute took 1.00" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_result_of_another_load_is_refused(tmp_path: Path) -> None:
    measured = burst()
    choice = LoadChoice(quick=True, seed=3)
    statement = find_scenario("burst").cases(choice)[0].workload(0).statement
    measured["config"]["workload"] = {"burst": statement}
    assert simulated(tmp_path, measured)
    measured["config"]["workload"] = {"burst": statement.replace("requests", "other requests")}
    with pytest.raises(CommandError, match="another load for burst than the measured version"):
        simulated(tmp_path, measured)


def test_the_lead_in_is_simulated_and_not_counted(tmp_path: Path) -> None:
    case = find_scenario("steady").cases(LoadChoice(quick=True))[1]
    assert case.workload(0).lead_in == case.concurrency
    ours = result("steady", {})["config"]["systems"]["recompute"]
    measured = Measured(case, "recompute", figures(1, 1, 1), ours, rounds=2, workers=2)
    simulated = simulate(measured, parse_profile(yaml.safe_load(PROFILE), "a test"), CostScale())
    counted = len(case.workload(0).requests) - case.workload(0).lead_in
    assert simulated["sent"] == simulated["completed"] == 2 * counted


def test_workers_that_merge_do_so_in_the_simulation_too(tmp_path: Path) -> None:
    measured = result("burst", {"burst": {"drop": figures(1, 1, 1), "recompute": figures(1, 1, 1)}})
    systems = measured["config"]["systems"]
    systems["recompute"]["kv_capacity_tokens"] = 960
    systems["drop"] = systems["recompute"] | {"options": OPTIONS | {"overload_policy": "drop"}}
    with pytest.raises(CommandError, match="run 'tideserve profile' again"):
        simulated(tmp_path, measured)
    rows = simulated(tmp_path, measured, PROFILE + SHAPE)
    by_system = {name: [r["simulated"] for r in rows if r["system"] == name] for name in systems}
    assert by_system["drop"] != by_system["recompute"]
    systems["drop"]["paced"] = "A100-14B"
    assert {row["system"] for row in simulated(tmp_path, measured)} == {"recompute"}


def co_served(figures_of: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A result of coserve, unpaced, with a rate for the tiny device."""
    record = result("coserve", {"coserve": figures_of})
    record["config"]["load"]["rate_per_s"] = 2.0
    ours = record["config"]["systems"]["recompute"] | {"kv_capacity_tokens": 640_000}
    options = OPTIONS | {"max_batch_tokens": 512}
    settings: dict[str, dict[str, Any]] = {
        "online-only": {"scheduling": "slo"},
        "fcfs": {"scheduling": "fcfs"},
        "slo": {"scheduling": "slo"},
        "slo-quarter": {"scheduling": "slo", "harvest": 0.05},
        "reserved": {"scheduling": "priority", "scheduler": {"batch_groups": 1}},
    }
    record["config"]["systems"] = {
        name: ours | {"options": options | setting} for name, setting in settings.items()
    }
    return record


def class_figures_of(ttft_s: float, gap_s: float, tokens_per_s: float) -> dict[str, Any]:
    online = {"ttft_s": {"p50": ttft_s, "p99": ttft_s}, "inter_token_s": {"p99": gap_s}}
    tokens = {"processed_tokens_per_s": tokens_per_s}
    return {"classes": {"online": online | tokens, "batch": tokens}, "rounds": [{}]}


def test_a_result_of_coserve_is_compared_by_class(tmp_path: Path) -> None:
    names = ("online-only", "fcfs", "slo", "slo-quarter", "reserved")
    rows = simulated(tmp_path, co_served({name: class_figures_of(1, 1, 1) for name in names}))
    compared = {(row["system"], row["metric"]): row["simulated"] for row in rows}
    assert compared["online-only", "batch tokens/s"] == 0
    assert compared["slo", "batch tokens/s"] > 1.2 * compared["slo-quarter", "batch tokens/s"]
    assert compared["fcfs", "online TTFT p50"] > 10 * compared["slo", "online TTFT p50"]
    # Its group for online requests has no batch work beside them.
    alone = compared["online-only", "online gap p99"]
    assert compared["reserved", "online gap p99"] == pytest.approx(alone, rel=0.3)
    metrics = ["online TTFT p50", "online gap p99", "batch tokens/s"]
    measured = class_figures_of(*(compared["slo", metric] for metric in metrics))
    again = simulated(tmp_path, co_served({"slo": measured}))
    differences = {row["metric"]: row["difference"] for row in again}
    assert [differences[metric] for metric in metrics] == [0, 0, 0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not valid JSON"),
        ("{}", "is not a result of 'tideserve bench'"),
        (json.dumps(result("burst", {"burst": {}})), "no tideserve system that ran"),
        (json.dumps(result("burst", {"burst": {}}) | {"config": {}}), "of this version of"),
    ],
)
def test_unsupported_systems_are_a_short_error(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "p.yaml").write_text(PROFILE)
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(CommandError, match=reason):
        run_against(tmp_path / "bench.json", str(tmp_path / "p.yaml"), None, None)


def test_a_missing_profile_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDESERVE_CACHE", str(tmp_path))
    (tmp_path / "bench.json").write_text(json.dumps(result("burst", {"burst": {}})))
    with pytest.raises(CommandError, match="run 'tideserve profile --dtype bfloat16' first"):
        run_against(tmp_path / "bench.json", None, None, None)
