"""Scenarios: all found, quick runs within their bounds."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import torch

from benchmarks.co_serving.figures import WINDOW_FROM_S
from benchmarks.errors import BenchError
from benchmarks.scenarios import realtime
from benchmarks.scenarios.scenario import (
    QUICK_LIMIT_S,
    LoadChoice,
    find_scenario,
    find_scenarios,
)
from benchmarks.systems.system import Deployment
from services.common.device_profile import load_profile
from services.common.size import parse_size_bytes
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from tideserve.cli.tiny_model import CONFIG, TINY_OPTIONS, VOCABULARY, write_tiny_model

REQUESTS_MIN = 200


def test_all_are_found() -> None:
    names = ["ablation", "burst", "coserve", "flood", "overhead", "realtime", "steady"]
    assert list(find_scenarios()) == names


def test_an_unknown_one_is_one_sentence() -> None:
    with pytest.raises(
        BenchError,
        match="unknown scenario 'x'; there are ablation, burst, churn, clients, coserve, doors,",
    ):
        find_scenario("x")


@pytest.mark.parametrize("name", ["ablation", "burst", "overhead", "steady"])
def test_a_quick_run_is_bounded_and_large_enough(name: str) -> None:
    scenario = find_scenario(name)
    cases = scenario.cases(LoadChoice(quick=True))
    rounds = scenario.rounds(True)
    assert rounds >= 3
    assert sum(case.limit_s for case in cases) * rounds <= QUICK_LIMIT_S + 1e-6
    made = [case.workload(0) for case in cases]
    assert sum(len(one.requests) - one.lead_in for one in made) * rounds >= REQUESTS_MIN


def test_steady_has_short_and_long_prompts_from_one_at_a_time_to_many() -> None:
    for quick in (True, False):
        cases = find_scenario("steady").cases(LoadChoice(quick=quick))
        names = [f"steady/{mix}" for mix in ("alone", "decode", "wide", "mixed", "prefill")]
        assert [case.name for case in cases] == names
        lengths = {len(one.prompt_ids) for case in cases for one in case.workload(0).requests}
        assert lengths == {64, 256, 1024}
        at_a_time = {case.concurrency for case in cases}
        assert (min(at_a_time), max(at_a_time)) == (1, 64)
        assert {case.name for case in cases if case.own_dtype_only} == (
            {"steady/alone", "steady/wide"} if quick else set()
        )


def test_no_prompt_of_steady_begins_as_another() -> None:
    """Or a prefix cache would skip that part, in the load or from one load to the next."""
    scenario = find_scenario("steady")
    cases = scenario.cases(LoadChoice(quick=True))
    turns = range(scenario.rounds(True) + 1)  # the last one is that of the rehearsal
    loads = [case.workload(turn) for case in cases for turn in turns]
    beginnings = [one.prompt_ids[:8] for load in loads for one in load.requests]
    assert len(set(beginnings)) == len(beginnings)
    assert cases[0].workload(0) == scenario.cases(LoadChoice(quick=True))[0].workload(0)


def test_a_quick_steady_of_two_systems_in_two_dtypes_takes_twelve_minutes() -> None:
    scenario = find_scenario("steady")
    cases = scenario.cases(LoadChoice(quick=True))
    both_s = sum(case.expected_s * (1 if case.own_dtype_only else 2) for case in cases)
    starts_s = 180
    assert len(scenario.systems) * scenario.rounds(True) * both_s + both_s + starts_s <= 720


def test_rounds_have_other_prompts_of_the_same_lengths() -> None:
    case = find_scenario("burst").cases(LoadChoice(quick=True))[0]
    first, second = case.workload(0).requests, case.workload(1).requests
    assert [len(r.prompt_ids) for r in first] == [len(r.prompt_ids) for r in second]
    assert first[0].prompt_ids != second[0].prompt_ids


def test_a_paced_burst_is_as_large_and_fits_the_tiny_model() -> None:
    scenario = find_scenario("burst")
    case = scenario.cases(LoadChoice(quick=True, paced=True))[0]
    requests = case.workload(0).requests
    assert len(requests) * scenario.rounds(True) >= REQUESTS_MIN
    longest = max(len(one.prompt_ids) + one.output_tokens for one in requests)
    assert longest <= CONFIG["max_position_embeddings"]
    assert all(max(one.prompt_ids) < VOCABULARY for one in requests)
    assert "vllm" not in scenario.paced_systems  # the tiny model has no weights


def test_a_full_burst_has_the_slice_twice_and_a_quick_one_once() -> None:
    quick, full = (
        find_scenario("burst").cases(LoadChoice(quick=quick))[0].workload(0).requests
        for quick in (True, False)
    )
    assert len(full) == 2 * len(quick)
    assert [one.output_tokens for one in full] == 2 * [one.output_tokens for one in quick]


def test_a_slower_device_gets_a_thinner_load_and_more_workers_a_denser_one() -> None:
    cases = find_scenario("burst").cases
    whole = cases(LoadChoice(quick=True, paced=True))[0].workload(0).requests
    thin = cases(LoadChoice(quick=True, paced=True, slowdown=2, workers=4))[0].workload(0).requests
    assert [one.arrival_s for one in thin] == pytest.approx([one.arrival_s for one in whole])
    # Alone it does not fit into a quick round.
    with pytest.raises(BenchError, match="but a round ends after"):
        cases(LoadChoice(quick=True, paced=True, slowdown=2))
    assert cases(LoadChoice(paced=True, slowdown=2))[0].limit_s > whole[-1].arrival_s


@pytest.mark.parametrize("name", ["burst", "ablation"])
def test_what_arrives_after_the_end_of_a_round_is_refused(name: str) -> None:
    with pytest.raises(BenchError, match="but a round ends after"):
        find_scenario(name).cases(LoadChoice(quick=True, trace="gamma:4,1,300"))


def test_a_slice_that_is_too_short_is_refused() -> None:
    with pytest.raises(BenchError, match="a quick run needs at least"):
        find_scenario("burst").cases(LoadChoice(quick=True, trace_duration_s=2.0))


def test_a_burst_takes_made_up_arrivals_as_they_are() -> None:
    choice = LoadChoice(trace="phases:5@2,5@0,5@4", trace_repeat=2)
    workload = find_scenario("burst").cases(choice)[0].workload(0)
    arrivals = [request.arrival_s for request in workload.requests]
    assert all(time % 15 < 5 or time % 15 >= 10 for time in arrivals)
    assert sum(time >= 15 for time in arrivals) == len(arrivals) / 2
    assert "phases:5@2,5@0,5@4" in workload.statement and "2 times over" in workload.statement
    rest = find_scenario("burst").cases(replace(choice, trace_start_s=10.0))[0].workload(0)
    assert "10-15 s, 2 times over" in rest.statement
    assert all(time < 10 for time in [request.arrival_s for request in rest.requests])
    scaled = find_scenario("burst").cases(LoadChoice(trace="gamma:2,3,30", rate_per_s=4.0))[0]
    assert "a mean of 4 requests/s" in scaled.workload(0).statement


def test_a_trace_may_be_replayed_at_its_own_pace_or_a_multiple() -> None:
    cases = find_scenario("burst").cases
    recorded, slower = (
        cases(LoadChoice(time_scale=scale))[0].workload(0).requests for scale in (1.0, 2.0)
    )
    assert [one.arrival_s for one in slower] == [2 * one.arrival_s for one in recorded]
    last_s = max(one.arrival_s for one in recorded)
    at_a_rate = cases(LoadChoice(rate_per_s=5.0))[0].workload(0).requests
    assert last_s < at_a_rate[-1].arrival_s


@pytest.mark.parametrize("choice", [LoadChoice(quick=True, paced=True, slowdown=4), LoadChoice()])
def test_coserve_has_the_lengths_of_conserve_and_a_backlog_beside_them(choice: LoadChoice) -> None:
    scenario = find_scenario("coserve")
    (case,) = scenario.cases(choice)
    loads = [case.workload(turn) for turn in range(scenario.rounds(choice.quick))]
    online = [request for load in loads for request in load.requests]
    assert {(len(one.prompt_ids), one.output_tokens) for one in online} == {(642, 64)}
    assert len({one.prompt_ids[:8] for one in online}) == len(online)
    last_s = loads[0].requests[-1].arrival_s
    windows = [[one for one in load.requests if one.arrival_s >= WINDOW_FROM_S] for load in loads]
    assert sum(map(len, windows)) >= 300
    assert {len(load.requests) for load in loads} == {len(loads[0].requests)}
    assert {load.requests[-1].arrival_s for load in loads} == {last_s}
    assert case.limit_s > last_s
    assert scenario.co_serving is not None
    targets = scenario.co_serving.load(choice).targets
    assert {(one.ttft_s, one.tpot_s) for one in online} == {(targets.ttft_s, targets.tpot_s)}
    assert case.backlog is not None
    backlog = case.backlog(1)
    batch = backlog.request(0)
    assert (len(batch.prompt_ids), batch.output_tokens) == (1800, 128)
    assert batch.slo_class == "batch" and batch.ttft_s is batch.tpot_s is None
    assert case.backlog(0).request(0).prompt_ids[:8] != batch.prompt_ids[:8]
    longest = len(batch.prompt_ids) + batch.output_tokens
    assert longest <= CONFIG["max_position_embeddings"]


def test_the_backlog_of_coserve_is_more_than_the_workers_have_places_for() -> None:
    for workers in (2, 5):
        (case,) = find_scenario("coserve").cases(LoadChoice(workers=workers))
        assert case.backlog is not None
        assert (
            case.backlog(0).clients
            > workers * Deployment(Path(), "m", Path(), workers, 1).max_running
        )


def test_coserve_takes_a_rate_and_scales_its_own_with_the_device() -> None:
    cases = find_scenario("coserve").cases

    def rate_per_s(choice: LoadChoice) -> float:
        requests = cases(choice)[0].workload(0).requests
        return len(requests) / requests[-1].arrival_s

    paced = LoadChoice(quick=True, paced=True, slowdown=4)
    slower, more = replace(paced, slowdown=8), replace(paced, workers=4)
    assert rate_per_s(paced) == pytest.approx(2 * rate_per_s(slower), rel=0.02)
    assert rate_per_s(more) == pytest.approx(2 * rate_per_s(paced), rel=0.02)
    assert rate_per_s(replace(paced, rate_per_s=5.0)) == pytest.approx(5.0, rel=0.02)
    beside = find_scenario("coserve").co_serving
    assert beside is not None
    tpot_s = [beside.load(one).targets.tpot_s for one in (paced, slower)]
    assert tpot_s[1] == pytest.approx(2 * tpot_s[0])


def test_a_quick_coserve_of_four_systems_takes_25_minutes_at_most() -> None:
    scenario = find_scenario("coserve")
    (case,) = scenario.cases(LoadChoice(quick=True, paced=True, slowdown=4))
    start_s = 25
    assert 4 * scenario.rounds(True) * (case.limit_s + start_s) <= 25 * 60


QUICK = LoadChoice(quick=True, paced=True, slowdown=4)


def test_real_time_requests_have_the_lengths_of_sharegpt_and_128_others_beside_them() -> None:
    scenario = find_scenario("realtime")
    (case,) = scenario.cases(QUICK)
    assert case.name == scenario.name
    online = case.workload(0).requests
    longest = max(len(one.prompt_ids) + one.output_tokens for one in online)
    assert longest <= CONFIG["max_position_embeddings"]
    # BROS Table 2, less what the cut takes.
    for lengths, mean, deviation in (
        ([len(one.prompt_ids) for one in online], 215, 230),
        ([one.output_tokens for one in online], 227, 240),
    ):
        assert fmean(lengths) == pytest.approx(mean, rel=0.1)
        assert pstdev(lengths) == pytest.approx(deviation, rel=0.15)
    assert len({one.prompt_ids[:8] for one in online}) == len(online)
    assert {(one.ttft_s, one.tpot_s) for one in online} == {(1.6, 0.8)}
    assert case.backlog is not None
    backlog = case.backlog(0)
    assert backlog.clients == 128 * QUICK.workers
    batch = [backlog.request(number) for number in range(400)]
    assert batch[0] == backlog.request(0)
    for lengths, low, high in (
        ([len(one.prompt_ids) for one in batch], 512, 1024),
        ([one.output_tokens for one in batch], 32, 128),
    ):
        assert low <= min(lengths) < low + 20 and high - 20 < max(lengths) <= high
        assert fmean(lengths) == pytest.approx((low + high) / 2, rel=0.05)
    assert case.backlog(1).request(0).prompt_ids[:8] != batch[0].prompt_ids[:8]


def test_the_real_time_load_is_that_of_the_device_and_of_the_workers() -> None:
    beside = find_scenario("realtime").co_serving
    assert beside is not None
    load = beside.load(QUICK)
    slower = beside.load(replace(QUICK, slowdown=8))
    assert slower.rate_per_s == load.rate_per_s / 2
    assert (slower.window_from_s, slower.window_s) == (2 * load.window_from_s, 2 * load.window_s)
    assert slower.targets.ttft_s == 2 * load.targets.ttft_s
    assert beside.load(replace(QUICK, workers=1)).rate_per_s == load.rate_per_s / 2
    assert beside.load(replace(QUICK, rate_per_s=3.0)).rate_per_s == 3.0
    assert load.window_s * load.rate_per_s > 300


def test_a_full_real_time_run_has_three_rates_and_the_middle_one_without_batch_work() -> None:
    cases = find_scenario("realtime").cases
    full = replace(QUICK, quick=False)
    found = {case.name: case for case in cases(full)}
    counts = {name: len(case.workload(0).requests) for name, case in found.items()}
    assert list(counts) == ["realtime", "realtime-lower", "realtime-higher", "realtime-alone"]
    assert counts["realtime-lower"] < counts["realtime"] < counts["realtime-higher"]
    assert counts["realtime-alone"] == counts["realtime"]
    alone = found["realtime-alone"]
    assert alone.backlog is None and "beside them" not in alone.workload(0).statement
    chosen = [case.name for case in cases(replace(full, rate_per_s=2.0))]
    assert chosen == ["realtime", "realtime-alone"]


def test_a_quick_real_time_run_of_two_systems_takes_20_minutes_at_most() -> None:
    scenario = find_scenario("realtime")
    (case,) = scenario.cases(QUICK)
    start_s = 30
    assert 2 * scenario.rounds(True) * (case.limit_s + start_s) <= 20 * 60


def test_real_time_workers_have_the_kv_of_a_7b_model_on_an_a100_of_40_gb(tmp_path: Path) -> None:
    scenario = find_scenario("realtime")
    profile = load_profile("A100-40G-7B")
    assert profile.memory_bytes and profile.parameter_bytes and profile.kv_bytes_per_token
    kv_bytes = 0.9 * profile.memory_bytes - profile.parameter_bytes
    tokenizer = tmp_path / "tokenizer"
    runner = ModelRunner.load(
        RunnerConfig(
            write_tiny_model(tmp_path / "model", tokenizer),
            "cpu",
            torch.float32,
            parse_size_bytes(scenario.paced_memory),
            chunk_bytes=parse_size_bytes(TINY_OPTIONS["chunk_size"]),
            load_format="dummy",
            max_batch_tokens=scenario.options["max_batch_tokens"],
            max_running=scenario.options["max_running"],
        )
    )
    tokens = runner.num_blocks * runner.block_size
    assert tokens == pytest.approx(kv_bytes / profile.kv_bytes_per_token, rel=0.02)
    assert f"{round(tokens, -2):,} tokens" in " ".join((realtime.__doc__ or "").split())


FLOOD = LoadChoice(quick=True, paced=True, slowdown=2)


def test_a_flood_is_that_of_burst_with_targets_once_batch_work_has_got_going() -> None:
    scenario = find_scenario("flood")
    (case,) = scenario.cases(FLOOD)
    beside = scenario.co_serving
    assert beside is not None and case.backlog is not None
    load = beside.load(FLOOD)
    online = case.workload(0).requests
    burst = find_scenario("burst").cases(replace(FLOOD, quick=False, trace_repeat=1))[0]
    flood = burst.workload(0).requests
    of_flood = online[1 : len(flood) + 1]
    assert [one.prompt_ids for one in of_flood] == [one.prompt_ids for one in flood]
    assert [one.arrival_s for one in of_flood] == [15 + one.arrival_s for one in flood]
    after_s = [one.arrival_s - of_flood[-1].arrival_s for one in online[len(flood) + 1 :]]
    assert after_s == pytest.approx([8.0, 16.0, 24.0, 32.0])
    assert online[0].arrival_s == 0 and online[-1].arrival_s == load.last_s < case.limit_s
    assert {(one.ttft_s, one.tpot_s) for one in online} == {(1.0, 0.2)}
    assert len({one.prompt_ids[:8] for one in online}) == len(online)
    backlog = case.backlog(0)
    lengths = [len(backlog.request(number).prompt_ids) for number in range(64)]
    assert min(lengths) < 150 and 450 < max(lengths) <= 512
    assert case.backlog(1).request(0).prompt_ids[:8] != backlog.request(0).prompt_ids[:8]


def test_the_targets_of_a_flood_are_those_of_the_device() -> None:
    beside = find_scenario("flood").co_serving
    assert beside is not None
    load, slower = (beside.load(replace(FLOOD, slowdown=slow)) for slow in (2.0, 4.0))
    assert slower.targets.tpot_s == 2 * load.targets.tpot_s == 4 * 0.1
    assert slower.window_s == pytest.approx(2 * load.window_s)
