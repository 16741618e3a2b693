"""Loads of scenarios: bounds of quick runs, prompts without shared prefixes, targets."""

from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

import pytest

from benchmarks.errors import BenchError
from benchmarks.scenarios.burst import STEPS
from benchmarks.scenarios.scenario import QUICK_LIMIT_S, CoServing, LoadChoice, find_scenario
from benchmarks.systems.catalog import check_names
from tideserve.cli.tiny_model import CONFIG

REQUESTS_MIN = 200


def test_an_unknown_scenario_is_a_short_error() -> None:
    with pytest.raises(
        BenchError,
        match="unknown scenario 'x'; scenarios are batch, buckets, burst, churn, clients,",
    ):
        find_scenario("x")


@pytest.mark.parametrize("name", ["ablation", "burst", "overhead", "steady"])
def test_a_quick_run_is_bounded_and_large_enough(name: str) -> None:
    scenario = find_scenario(name)
    cases = scenario.cases(LoadChoice(quick=True))
    rounds = scenario.round_count(LoadChoice(quick=True))
    assert sum(case.limit_s for case in cases) * rounds <= QUICK_LIMIT_S + 1e-6
    made = [case.workload(0) for case in cases]
    assert sum(len(load.requests) - load.lead_in for load in made) * rounds >= REQUESTS_MIN


def test_prompts_of_steady_share_no_prefix() -> None:
    """Otherwise a prefix cache would skip that part, within a load or across loads."""
    scenario = find_scenario("steady")
    choice = LoadChoice(quick=True)
    cases = scenario.cases(choice)
    turns = range(scenario.round_count(choice) + 1)  # the last one is that of the rehearsal
    loads = [case.workload(turn) for case in cases for turn in turns]
    beginnings = [request.prompt_ids[:8] for load in loads for request in load.requests]
    assert len(set(beginnings)) == len(beginnings)
    assert cases[0].workload(0) == scenario.cases(LoadChoice(quick=True))[0].workload(0)


def test_rounds_have_other_prompts_of_the_same_lengths() -> None:
    case = find_scenario("burst").cases(LoadChoice(quick=True))[0]
    first, second = case.workload(0).requests, case.workload(1).requests
    assert [len(r.prompt_ids) for r in first] == [len(r.prompt_ids) for r in second]
    assert first[0].prompt_ids != second[0].prompt_ids


def test_a_slower_device_gets_a_thinner_load_and_more_workers_a_denser_one() -> None:
    cases = find_scenario("burst").cases
    whole = cases(LoadChoice(quick=True, paced=True))[0].workload(0).requests
    thin = cases(LoadChoice(quick=True, paced=True, slowdown=2, workers=4))[0].workload(0).requests
    assert [request.arrival_s for request in thin] == pytest.approx(
        [request.arrival_s for request in whole]
    )
    # Alone it does not fit into a quick round.
    with pytest.raises(BenchError, match="but a round ends after"):
        cases(LoadChoice(quick=True, paced=True, slowdown=2))
    assert cases(LoadChoice(paced=True, slowdown=2))[0].limit_s > whole[-1].arrival_s


@pytest.mark.parametrize(
    ("name", "choice", "sentence"),
    [
        ("burst", {"trace": "gamma:4,1,300"}, "but a round ends after"),
        ("ablation", {"trace": "gamma:4,1,300"}, "but a round ends after"),
        ("burst", {"trace_duration_s": 2.0}, "a quick run needs at least"),
    ],
)
def test_a_trace_that_does_not_fit_a_round_is_refused(
    name: str, choice: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BenchError, match=sentence):
        find_scenario(name).cases(LoadChoice(quick=True, **choice))


def test_a_burst_uses_synthetic_arrivals_unchanged() -> None:
    choice = LoadChoice(trace="phases:5@2,5@0,5@4", trace_repeat=2)
    workload = find_scenario("burst").cases(choice)[0].workload(0)
    arrivals = [request.arrival_s for request in workload.requests]
    assert all(time % 15 < 5 or time % 15 >= 10 for time in arrivals)
    assert sum(time >= 15 for time in arrivals) == len(arrivals) / 2
    rest = find_scenario("burst").cases(replace(choice, trace_start_s=10.0))[0].workload(0)
    assert all(time < 10 for time in [request.arrival_s for request in rest.requests])
    scaled = find_scenario("burst").cases(LoadChoice(trace="gamma:2,3,30", rate_per_s=4.0))[0]
    assert "a mean of 4 requests/s" in scaled.workload(0).statement


def test_a_trace_may_be_replayed_at_its_own_pace_or_a_multiple() -> None:
    cases = find_scenario("burst").cases
    recorded, slower = (
        cases(LoadChoice(time_scale=scale))[0].workload(0).requests for scale in (1.0, 2.0)
    )
    assert [request.arrival_s for request in slower] == [
        2 * request.arrival_s for request in recorded
    ]
    last_s = max(request.arrival_s for request in recorded)
    at_a_rate = cases(LoadChoice(rate_per_s=5.0))[0].workload(0).requests
    assert last_s < at_a_rate[-1].arrival_s


QUICK = LoadChoice(quick=True, paced=True, slowdown=4)


def co_serving(name: str) -> CoServing:
    scenario_load = find_scenario(name).co_serving
    assert scenario_load is not None
    return scenario_load


@pytest.mark.parametrize("name", ["batch", "coserve", "realtime", "flood"])
def test_co_serving_repeats_no_prompt_and_sets_its_targets(name: str) -> None:
    (case,) = find_scenario(name).cases(QUICK)
    load = co_serving(name).load(QUICK)
    online = [request for turn in range(2) for request in case.workload(turn).requests]
    assert case.backlog is not None
    batch = [case.backlog(turn).request(number) for turn in range(2) for number in range(64)]
    every = [*online, *batch]
    assert len({request.prompt_ids[:8] for request in every}) == len(every)
    promised = (load.targets.ttft_s, load.targets.tpot_s)
    assert {(request.ttft_s, request.tpot_s) for request in online} == {promised}
    assert {(request.slo_class, request.ttft_s, request.tpot_s) for request in batch} == {
        ("batch", None, None)
    }
    assert max(request.arrival_s for request in online) == pytest.approx(load.last_s)
    assert load.last_s < case.limit_s
    longest = max(len(request.prompt_ids) + request.output_tokens for request in every)
    assert longest <= CONFIG["max_position_embeddings"]


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


def test_real_time_requests_have_the_lengths_of_sharegpt() -> None:
    (case,) = find_scenario("realtime").cases(QUICK)
    online = case.workload(0).requests
    assert case.backlog is not None
    batch = [case.backlog(0).request(number) for number in range(400)]
    # BROS Table 2, less the part that is cut off; batch requests are uniform.
    for lengths, mean, deviation in (
        ([len(request.prompt_ids) for request in online], 215, 230),
        ([request.output_tokens for request in online], 227, 240),
        ([len(request.prompt_ids) for request in batch], 768, 512 / 12**0.5),
        ([request.output_tokens for request in batch], 80, 96 / 12**0.5),
    ):
        assert fmean(lengths) == pytest.approx(mean, rel=0.1)
        assert pstdev(lengths) == pytest.approx(deviation, rel=0.15)


def test_online_requests_beside_a_batch_have_the_phases_and_lengths_of_llm_d() -> None:
    choice = LoadChoice(quick=True, paced=True)
    load = co_serving("batch").load(choice)
    (case,) = find_scenario("batch").cases(choice)
    online = [request for turn in range(8) for request in case.workload(turn).requests]
    phase_s = load.window_s / 4
    for phase, rate_per_s in enumerate((15, 1, 15, 1)):
        begin_s = load.window_from_s + phase * phase_s
        count = sum(begin_s <= request.arrival_s < begin_s + phase_s for request in online)
        assert count / (8 * phase_s) == pytest.approx(rate_per_s, rel=0.25)
    assert {len(request.prompt_ids) for request in online} == {512}
    outputs = [request.output_tokens for request in online]
    # 500 ± 400, less the part that is cut off.
    assert fmean(outputs) == pytest.approx(483, rel=0.05)
    assert pstdev(outputs) == pytest.approx(326, rel=0.05)
    slower, given = (replace(choice, slowdown=4.0), replace(choice, rate_per_s=4.0))
    assert co_serving("batch").load(slower).rate_per_s == load.rate_per_s / 4 == 2.0
    assert (
        "phases of 7.5 and 0.5 online"
        in find_scenario("batch").cases(given)[0].workload(0).statement
    )


def test_a_flood_equals_burst_after_the_start_of_batch_work() -> None:
    (case,) = find_scenario("flood").cases(QUICK)
    burst = find_scenario("burst").cases(replace(QUICK, quick=False, trace_repeat=1))[0]
    flood = burst.workload(0).requests
    of_flood = case.workload(0).requests[1 : len(flood) + 1]
    assert [request.prompt_ids for request in of_flood] == [request.prompt_ids for request in flood]
    assert [request.arrival_s for request in of_flood] == [
        15 + request.arrival_s for request in flood
    ]


def test_ablation_steps_enable_one_mechanism_each() -> None:
    check_names(find_scenario("ablation").systems)
    off = [set(system.split("-")[1:]) for system in STEPS.values()]
    assert off[0] == {"exchange", "lookahead", "restore"} and not off[-1]
    assert all(len(switches - other) == 1 and other < switches for switches, other in pairwise(off))
