"""The load of `buckets` and its bars."""

from dataclasses import replace

from benchmarks.scenarios.buckets import (
    LONG,
    SHORT,
    SHORT_SHARE,
    SYSTEMS,
    Measured,
    judge,
    mixed_request,
)
from benchmarks.scenarios.scenario import find_scenario

RATES = {
    "padded-arrival": 100.0,
    "padded-buckets": 150.0,
    "ragged-arrival": 200.0,
    "ragged-buckets": 199.0,
    "static-arrival": 50.0,
}


def measured(**changes: float) -> dict[str, Measured]:
    share = {"padded-buckets": 0.02, "ragged-buckets": 0.018}
    return {
        f"{execution}-{order}": Measured(
            changes.get(f"{execution}_{order}", RATES[f"{execution}-{order}"]),
            share.get(f"{execution}-{order}", 0.015),
            *(None, 1.0, 12_800, 0),
        )
        for execution, order in SYSTEMS
    }


def test_ratios_are_of_buckets_to_the_order_of_arrival() -> None:
    verdict = judge(measured(), {"paced": "A"})
    assert verdict.figures["padded"]["throughput_ratio"] == 1.5
    assert verdict.figures["padded"]["throughput_ratio_to_static"] == 3.0
    assert verdict.figures["ragged"]["throughput_ratio"] == 0.995
    assert abs(verdict.figures["scheduler_share"] - 0.005) < 1e-9
    assert verdict.problems == []


def test_missed_bars_are_problems() -> None:
    slow = measured(padded_buckets=129.0, ragged_buckets=193.0)
    assert len(judge(slow, {}).problems) == 2
    busy = measured()
    busy["ragged-buckets"] = replace(busy["ragged-buckets"], scheduler_share=0.03)
    (problem,) = judge(busy, {}).problems
    assert "scheduler's share" in problem


def test_requests_depend_only_on_the_seed_and_are_short_or_long() -> None:
    requests = [mixed_request(number, 3) for number in range(300)]
    assert requests[7] == mixed_request(7, 3) != mixed_request(7, 4)
    long = sum(len(request.prompt_ids) >= LONG.least for request in requests)
    assert all(
        len(request.prompt_ids) <= SHORT.most or len(request.prompt_ids) >= LONG.least
        for request in requests
    )
    assert abs(long / len(requests) - (1 - SHORT_SHARE)) < 0.08
    assert {request.slo_class for request in requests} == {"batch"}


def test_the_scenario_is_registered() -> None:
    assert find_scenario("buckets").run is not None
