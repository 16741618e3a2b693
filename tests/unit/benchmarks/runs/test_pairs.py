"""Ratios of the first system to the others, by load and dtype."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.runs.pairs import faster_than_chosen, pairs
from benchmarks.runs.runner import BenchPlan
from benchmarks.scenarios.scenario import LoadChoice, find_scenario
from benchmarks.systems.system import Deployment
from tests.support.safetensors_file import write_safetensors

NAMES = ("tideserve", "vllm", "tideserve-float32", "vllm-float32")


def figures(throughput: float, tpot_s: float = 0.05) -> dict[str, Any]:
    latency = {"p50": tpot_s, "p95": 2 * tpot_s}
    return {
        "throughput_tokens_per_s": throughput,
        "rounds": [{"throughput_tokens_per_s": throughput * share} for share in (0.5, 1, 2)],
        "ttft_s": {"p50": 10 * tpot_s, "p95": 20 * tpot_s},
        "tpot_s": latency,
    }


@pytest.fixture
def plan(tmp_path: Path) -> BenchPlan:
    write_safetensors(tmp_path / "model.safetensors", [500])
    deployment = Deployment(tmp_path, "m", tmp_path, workers=2, memory_bytes=1)
    return BenchPlan(find_scenario("steady"), LoadChoice(quick=True), NAMES, deployment, ())


def of_run(peer: float, peer_float32: float) -> dict[str, dict[str, Any]]:
    both = dict(zip(NAMES, (100.0, peer, 60.0, peer_float32), strict=True))
    return {
        "steady/alone": {"tideserve": figures(30, 0.025), "vllm": figures(20, 0.05)},
        "steady/mixed": {name: figures(rate, 1 / rate) for name, rate in both.items()},
    }


def test_each_system_is_compared_in_its_faster_dtype_and_in_float32(plan: BenchPlan) -> None:
    pairs_ = pairs(plan, of_run(peer=80.0, peer_float32=50.0))
    assert pairs_["tables"]["fastest"]["dtypes"] == {"tideserve": "bfloat16", "vllm": "bfloat16"}
    row = pairs_["tables"]["fastest"]["loads"]["steady/mixed"]["vllm"]
    assert row["throughput"] == pytest.approx(1.25)
    assert row["throughput_by_round"] == pytest.approx([1.25] * 3)
    assert [row[key] for key in ("ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95")] == pytest.approx(
        [0.8] * 4
    )
    second = pairs_["tables"]["float32"]
    assert set(second["dtypes"].values()) == {"float32"}
    # A load that was measured in bfloat16 alone is not reported as float32.
    assert list(second["loads"]) == ["steady/mixed"]
    assert second["loads"]["steady/mixed"]["vllm"]["throughput"] == pytest.approx(1.2)
    assert faster_than_chosen(pairs_) == []


def test_a_peer_that_is_faster_in_another_dtype_than_the_rule_chose_is_compared_in_that(
    plan: BenchPlan,
) -> None:
    pairs_ = pairs(plan, of_run(peer=80.0, peer_float32=125.0))
    fastest = pairs_["tables"]["fastest"]
    assert fastest["dtypes"] == {"tideserve": "bfloat16", "vllm": "float32"}
    assert fastest["loads"]["steady/mixed"]["vllm"]["throughput"] == pytest.approx(0.8)
    # This load was measured in one dtype only.
    assert fastest["loads"]["steady/alone"]["vllm"]["throughput"] == pytest.approx(1.5)
    assert faster_than_chosen(pairs_) == [
        "vllm was faster in float32 than in bfloat16, so it is compared in float32"
    ]


def test_weight_bytes_are_reported_if_reading_them_dominates(
    plan: BenchPlan,
) -> None:
    loads = pairs(plan, of_run(peer=80.0, peer_float32=50.0))["tables"]["fastest"]["loads"]
    weight_rate = loads["steady/alone"]["weight_bytes_per_s"]
    assert weight_rate == pytest.approx({"tideserve": 1000 / 0.025, "vllm": 1000 / 0.05})
    assert "weight_bytes_per_s" not in loads["steady/mixed"]


def test_a_single_system_has_no_pair(plan: BenchPlan) -> None:
    alone = {"steady/mixed": {"tideserve": figures(1.0), "tideserve-float32": figures(1.0)}}
    assert pairs(plan, alone) == {}
