"""The loads of scenarios: quick runs within their bounds, prompts that no cache helps, targets."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import torch

from benchmarks.errors import BenchError
from benchmarks.scenarios import realtime
from benchmarks.scenarios.burst import STEPS
from benchmarks.scenarios.scenario import QUICK_LIMIT_S, CoServing, LoadChoice, find_scenario
from benchmarks.systems.catalog import check_names
from benchmarks.systems.system import Deployment
from services.common.device_profile import load_profile
from services.common.size import parse_size_bytes
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from tideserve.cli.tiny_model import CONFIG, TINY_OPTIONS, VOCABULARY, write_tiny_model
from tideserve.load.workload import PlannedRequest

REQUESTS_MIN = 200


def test_an_unknown_one_is_one_sentence() -> None:
    with pytest.raises(
        BenchError,
        match="unknown scenario 'x'; there are burst, churn, clients, coserve, drop,",
    ):
        find_scenario("x")


@pytest.mark.parametrize("name", ["ablation", "burst", "overhead", "steady"])
def test_a_quick_run_is_bounded_and_large_enough(name: str) -> None:
    scenario = find_scenario(name)
    cases = scenario.cases(LoadChoice(quick=True))
    rounds = scenario.round_count(True)
    assert sum(case.limit_s for case in cases) * rounds <= QUICK_LIMIT_S + 1e-6
    made = [case.workload(0) for case in cases]
    assert sum(len(one.requests) - one.lead_in for one in made) * rounds >= REQUESTS_MIN


def test_no_prompt_of_steady_begins_as_another() -> None:
    """Or a prefix cache would skip that part, in the load or from one load to the next."""
    scenario = find_scenario("steady")
    cases = scenario.cases(LoadChoice(quick=True))
    turns = range(scenario.round_count(True) + 1)  # the last one is that of the rehearsal
    loads = [case.workload(turn) for case in cases for turn in turns]
    beginnings = [one.prompt_ids[:8] for load in loads for one in load.requests]
    assert len(set(beginnings)) == len(beginnings)
    assert cases[0].workload(0) == scenario.cases(LoadChoice(quick=True))[0].workload(0)


def test_rounds_have_other_prompts_of_the_same_lengths() -> None:
    case = find_scenario("burst").cases(LoadChoice(quick=True))[0]
    first, second = case.workload(0).requests, case.workload(1).requests
    assert [len(r.prompt_ids) for r in first] == [len(r.prompt_ids) for r in second]
    assert first[0].prompt_ids != second[0].prompt_ids


def test_a_paced_burst_is_as_large_and_fits_the_tiny_model() -> None:
    scenario = find_scenario("burst")
    case = scenario.cases(LoadChoice(quick=True, paced=True))[0]
    requests = case.workload(0).requests
    assert len(requests) * scenario.round_count(True) >= REQUESTS_MIN
    longest = max(len(one.prompt_ids) + one.output_tokens for one in requests)
    assert longest <= CONFIG["max_position_embeddings"]
    assert all(max(one.prompt_ids) < VOCABULARY for one in requests)
    assert "vllm" not in scenario.paced_systems  # the tiny model has no weights


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


QUICK = LoadChoice(quick=True, paced=True, slowdown=4)


def co_serving(name: str) -> CoServing:
    found = find_scenario(name).co_serving
    assert found is not None
    return found


def lengths_of(requests: Sequence[PlannedRequest]) -> set[tuple[int, int]]:
    return {(len(one.prompt_ids), one.output_tokens) for one in requests}


@pytest.mark.parametrize("choice", [QUICK, LoadChoice()])
def test_coserve_has_the_lengths_of_conserve_and_a_backlog_beside_them(choice: LoadChoice) -> None:
    scenario = find_scenario("coserve")
    (case,) = scenario.cases(choice)
    load = co_serving("coserve").load(choice)
    loads = [case.workload(turn).requests for turn in range(scenario.round_count(choice.quick))]
    online = [request for requests in loads for request in requests]
    assert lengths_of(online) == {(642, 64)}
    assert len({one.prompt_ids[:8] for one in online}) == len(online)
    assert sum(one.arrival_s >= load.window_from_s for one in online) >= 300
    assert {(len(one), one[-1].arrival_s) for one in loads} == {(len(loads[0]), load.last_s)}
    assert case.limit_s > load.last_s
    assert {(one.ttft_s, one.tpot_s) for one in online} == {
        (load.targets.ttft_s, load.targets.tpot_s)
    }
    assert case.backlog is not None
    batch = case.backlog(1).request(0)
    assert lengths_of([batch]) == {(1800, 128)}
    assert batch.slo_class == "batch" and batch.ttft_s is batch.tpot_s is None
    assert case.backlog(0).request(0).prompt_ids[:8] != batch.prompt_ids[:8]
    places = choice.workers * Deployment(Path(), "m", Path(), choice.workers, 1).max_running
    assert case.backlog(0).clients > places


@pytest.mark.parametrize("name", ["coserve", "realtime"])
def test_a_load_is_that_of_the_device_and_of_the_workers(name: str) -> None:
    load_for = co_serving(name).load
    load, slower = load_for(QUICK), load_for(replace(QUICK, slowdown=8))
    assert slower.rate_per_s == load.rate_per_s / 2
    assert slower.window_s == 2 * load.window_s
    assert slower.targets.ttft_s == 2 * load.targets.ttft_s
    assert load_for(replace(QUICK, workers=1)).rate_per_s == load.rate_per_s / 2
    assert load_for(replace(QUICK, rate_per_s=3.0)).rate_per_s == 3.0
    requests = find_scenario(name).cases(QUICK)[0].workload(0).requests
    assert len(requests) / requests[-1].arrival_s == pytest.approx(load.rate_per_s, rel=0.02)


@pytest.mark.parametrize(("name", "systems", "minutes"), [("coserve", 4, 25), ("realtime", 2, 20)])
def test_a_quick_run_is_bounded(name: str, systems: int, minutes: int) -> None:
    scenario = find_scenario(name)
    (case,) = scenario.cases(QUICK)
    start_s = 25
    turns = systems * scenario.round_count(True)
    assert turns * (case.limit_s + start_s) <= minutes * 60


def test_real_time_requests_have_the_lengths_of_sharegpt_and_128_others_beside_them() -> None:
    (case,) = find_scenario("realtime").cases(QUICK)
    online = case.workload(0).requests
    longest = max(len(one.prompt_ids) + one.output_tokens for one in online)
    assert longest <= CONFIG["max_position_embeddings"]
    assert len({one.prompt_ids[:8] for one in online}) == len(online)
    assert {(one.ttft_s, one.tpot_s) for one in online} == {(1.6, 0.8)}
    assert case.backlog is not None and case.backlog(0).clients == 128 * QUICK.workers
    batch = [case.backlog(0).request(number) for number in range(400)]
    # BROS Table 2, less the part that is cut off; batch requests are uniform.
    for lengths, mean, deviation in (
        ([len(one.prompt_ids) for one in online], 215, 230),
        ([one.output_tokens for one in online], 227, 240),
        ([len(one.prompt_ids) for one in batch], 768, 512 / 12**0.5),
        ([one.output_tokens for one in batch], 80, 96 / 12**0.5),
    ):
        assert fmean(lengths) == pytest.approx(mean, rel=0.1)
        assert pstdev(lengths) == pytest.approx(deviation, rel=0.15)


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
            max_batch_tokens=scenario.up_options["max_batch_tokens"],
            max_running=scenario.up_options["max_running"],
        )
    )
    tokens = runner.num_blocks * runner.block_size
    assert tokens == pytest.approx(kv_bytes / profile.kv_bytes_per_token, rel=0.02)
    assert f"{round(tokens, -2):,} tokens" in " ".join((realtime.__doc__ or "").split())


FLOOD = LoadChoice(quick=True, paced=True, slowdown=2)


def test_a_flood_is_that_of_burst_with_targets_once_batch_work_has_got_going() -> None:
    scenario = find_scenario("flood")
    (case,) = scenario.cases(FLOOD)
    assert case.backlog is not None
    load = co_serving("flood").load(FLOOD)
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
    slower = co_serving("flood").load(replace(FLOOD, slowdown=4.0))
    assert slower.targets.tpot_s == 2 * load.targets.tpot_s
    assert slower.window_s == pytest.approx(2 * load.window_s)
    assert len({one.prompt_ids[:8] for one in online}) == len(online)
    backlog = case.backlog(0)
    lengths = [len(backlog.request(number).prompt_ids) for number in range(64)]
    assert min(lengths) < 150 and 450 < max(lengths) <= 512
    assert case.backlog(1).request(0).prompt_ids[:8] != backlog.request(0).prompt_ids[:8]


def test_the_steps_switch_one_mechanism_on_after_the_other() -> None:
    check_names(find_scenario("ablation").systems)
    off = [set(system.split("-")[1:]) for system in STEPS.values()]
    assert off[0] == {"exchange", "lookahead", "restore"} and not off[-1]
    assert all(len(one - other) == 1 and other < one for one, other in pairwise(off))


@pytest.mark.parametrize("paced", [False, True])
def test_prompts_differ_much_and_a_trickle_follows_the_flood(paced: bool) -> None:
    flood, trickle = find_scenario("ablation").cases(LoadChoice(quick=True, paced=paced))
    assert flood.expected_s < flood.limit_s and trickle.expected_s < trickle.limit_s
    requests = flood.workload(1).requests
    lengths = sorted(len(request.prompt_ids) for request in requests)
    assert lengths[len(lengths) * 9 // 10] > 4 * lengths[len(lengths) // 10]
    again = trickle.workload(1).requests
    assert [one.prompt_ids for one in again] == [one.prompt_ids for one in requests[: len(again)]]
    rate_per_s = len(requests) / requests[-1].arrival_s
    assert len(again) / again[-1].arrival_s < rate_per_s / 2
