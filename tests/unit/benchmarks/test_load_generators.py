"""External load generators: their arguments, their reports and the comparison."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scenarios.clients import OURS, PEER, ROUNDS, client_load, judge, loads
from benchmarks.scenarios.scenario import LoadChoice
from benchmarks.systems.load_generators import (
    LOAD_GENERATORS,
    ClientLoad,
    ClientReport,
    LoadGenerator,
    MeasuredServer,
    guidellm_command,
    guidellm_report,
    run_generator,
    vllm_command,
    vllm_report,
)
from tideserve.cli.errors import SystemUnavailable

PYTHON = Path(sys.executable)
SERVER = MeasuredServer("http://127.0.0.1:9", "m", Path("folder"))
LOAD = ClientLoad(256, 32, requests=12, concurrency=8, seed=7)


def following(command: Sequence[str], option: str) -> str:
    return command[list(command).index(option) + 1]


def test_both_generators_get_the_same_load(tmp_path: Path) -> None:
    command = vllm_command(PYTHON, SERVER, LOAD, tmp_path)
    lengths = ("--random-input-len", "--random-output-len", "--num-prompts", "--max-concurrency")
    asked = [following(command, option) for option in (*lengths, "--seed", "--base-url")]
    assert asked == ["256", "32", "12", "8", "7", SERVER.url]
    assert "--ignore-eos" in command
    path = Path(following(guidellm_command(PYTHON, SERVER, LOAD, tmp_path), "-c"))
    spec = json.loads(path.read_text())["spec"]
    assert spec["data"] == [{"kind": "synthetic_text", "prompt_tokens": 256, "output_tokens": 32}]
    assert spec["profile"]["streams"] == 8 and spec["constraints"][0]["count"] == 12
    assert spec["seed"]["value"] == 7 and spec["backend"]["target"] == SERVER.url


def test_results_are_read_in_seconds() -> None:
    names = [f"{name}_{metric}_ms" for metric in ("ttft", "tpot") for name in ("p50", "p95")]
    vllm_result = {"completed": 12, "output_throughput": 99.5} | {name: 1500.0 for name in names}
    assert vllm_report(vllm_result) == ClientReport(12, 99.5, 1.5, 1.5, 1.5, 1.5)
    requests = [
        {
            "request_start_time": 10.0 + index,
            "request_end_time": 15.0 + index,
            "time_to_first_token_ms": 1000.0,
            "inter_token_latency_ms": 50.0,
            "output_tokens": 30,
        }
        for index in range(2)
    ]
    report = guidellm_report({"benchmarks": [{"requests": {"successful": requests}}]})
    assert report == ClientReport(2, 60 / 6, 1.0, 1.0, 0.05, 0.05)
    none = guidellm_report({"benchmarks": [{"requests": {"successful": None}}]})
    assert none.completed == 0 and none.ttft_p50_s is None


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("print('no server'); raise SystemExit(1)", "one left no result: no server"),
        ("import time; time.sleep(60)", "one did not end within 1 s"),
    ],
)
def test_a_failed_generator_reports_its_error(program: str, sentence: str, tmp_path: Path) -> None:
    generator = LoadGenerator(
        "one", lambda *_: PYTHON, lambda *_: [sys.executable, "-c", program], vllm_report
    )
    with pytest.raises(SystemUnavailable, match=sentence):
        run_generator(generator, PYTHON, SERVER, LOAD, tmp_path, 1.0)


@pytest.mark.parametrize("quick", [True, False])
def test_no_two_loads_have_the_same_prompts(quick: bool) -> None:
    choices = [LoadChoice(quick=quick, seed=seed) for seed in range(3)]
    made = [
        client_load(mix, choice, turn, number)
        for choice in choices
        for turn in range(ROUNDS)
        for number, mix in enumerate(loads(choice))
    ]
    assert len({load.seed for load in made}) == len(made)
    assert {load.prompt_tokens for load in made} == {64, 256, 1024}


def reports(completed: int, factor: float) -> list[ClientReport]:
    return [ClientReport(completed, factor * rate, 0.2, 0.4, 0.02, None) for rate in (90, 100, 300)]


def test_round_medians_are_compared_and_lost_requests_are_a_problem() -> None:
    choice = LoadChoice(quick=True)
    by_load: dict[Any, list[ClientReport]] = {}
    for client in LOAD_GENERATORS:
        for number, mix in enumerate(loads(choice)):
            wanted = client_load(mix, choice, 0, number).requests
            by_load[OURS, client.name, mix.name] = reports(wanted, 1.5)
            by_load[PEER, client.name, mix.name] = reports(wanted, 1.0)
    verdict = judge(by_load, choice, "bfloat16")
    assert not verdict.problems
    ratios = verdict.figures["ratios"]["guidellm"]["mixed"]
    assert ratios == pytest.approx(
        {"throughput_tokens_per_s": 1.5, "ttft_p50_s": 1.0, "ttft_p95_s": 1.0, "tpot_p50_s": 1.0}
    )
    by_load[PEER, "guidellm", "decode"] = reports(1, 1.0)
    (problem,) = judge(by_load, choice, "bfloat16").problems
    assert "guidellm completed 1 of 24 requests of decode against vllm" in problem
