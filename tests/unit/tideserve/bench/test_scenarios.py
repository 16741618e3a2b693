"""Scenarios: all found, quick runs within their bounds."""

from dataclasses import replace

import pytest

from tideserve.bench.errors import BenchError
from tideserve.bench.scenarios.scenario import (
    QUICK_LIMIT_S,
    LoadChoice,
    find_scenario,
    find_scenarios,
)
from tideserve.cli.tiny_model import CONFIG, VOCABULARY

REQUESTS_MIN = 200


def test_all_are_found() -> None:
    assert list(find_scenarios()) == ["ablation", "burst", "overhead", "steady"]


def test_an_unknown_one_is_one_sentence() -> None:
    with pytest.raises(
        BenchError,
        match="unknown scenario 'x'; there are ablation, burst, churn, clients, doors, drop,",
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
