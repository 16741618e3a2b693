"""Figures: percentiles, service levels, pooled rounds, ratios."""

import random

import numpy as np
import pytest

from benchmarks.stats import (
    LatencyTarget,
    attainment,
    bubble_share,
    bubble_share_arriving,
    figures,
    peak_ratio,
    ratios,
    throughput,
    timeline,
)
from tideserve.load.record import RequestOutcome, Round, SentRequest
from tideserve.sim.report import percentile


def record(
    ttft_s: float = 1.0,
    tokens: int = 5,
    outcome: RequestOutcome = RequestOutcome.COMPLETED,
    due_s: float = 0.0,
) -> SentRequest:
    """A request with one token every 0.1 s after the first."""
    times = tuple(due_s + ttft_s + 0.1 * index for index in range(tokens))
    done = outcome is RequestOutcome.COMPLETED
    return SentRequest(
        due_s=due_s,
        sent_s=due_s,
        end_s=times[-1],
        outcome=outcome,
        prompt_tokens=20,
        output_tokens=tokens if done else 0,
        token_times_s=times if done else (),
    )


def test_percentiles_equal_those_of_numpy() -> None:
    rng = random.Random(1)
    for count in (1, 2, 7, 1000):
        values = [rng.random() for _ in range(count)]
        for share in (0.5, 0.9, 0.99, 0.999):
            assert percentile(values, share) == pytest.approx(np.quantile(values, share))
    assert percentile([], 0.5) is None


def test_latencies_of_a_request_are_computed() -> None:
    request = record(ttft_s=1.0, tokens=5, due_s=10.0)
    assert request.ttft_s == pytest.approx(1.0)
    assert request.tpot_s == pytest.approx(0.1)
    assert request.e2e_s == pytest.approx(1.4)
    assert request.normalized_s == pytest.approx(0.28)
    assert record(tokens=1).tpot_s is None
    late = SentRequest(0.0, 0.5, 1.0, RequestOutcome.COMPLETED, 1, 1, (1.0,), late=True)
    assert late.ttft_s == 1.0


def test_refusals_and_failures_miss_every_target() -> None:
    records = [
        record(0.5),
        record(2.0),
        record(outcome=RequestOutcome.REJECTED),
        record(outcome=RequestOutcome.FAILED),
    ]
    assert attainment(records, LatencyTarget("ttft_s", 1.0), None) == 0.25
    assert attainment(records, LatencyTarget("ttft_s", 5, relative=True), 0.5) == 0.5
    assert attainment(records, LatencyTarget("ttft_s", 5, relative=True), None) is None


def test_figures_pool_rounds_and_show_their_spread() -> None:
    rounds = [
        Round(
            (record(1.0), record(outcome=RequestOutcome.REJECTED)),
            preemptions=2,
            recomputed_tokens=100.0,
            capacity_tokens=48,
        ),
        Round(
            (record(3.0), record(outcome=RequestOutcome.FAILED)),
            preemptions=1,
            recomputed_tokens=20.0,
            capacity_tokens=48,
        ),
    ]
    result = figures(rounds, [LatencyTarget("ttft_s", 1.5)], {})
    assert (result["sent"], result["completed"]) == (4, 2)
    assert (result["rejected"], result["failed"]) == (1, 1)
    assert (result["preemptions"], result["recomputed_tokens"]) == (3, 120)
    assert result["ttft_s"]["p50"] == pytest.approx(2.0)
    assert result["spread"]["ttft_p50_s"] == pytest.approx(1.0)
    assert result["slo_attainment"] == {"ttft ≤ 1.5 s": 0.25}
    assert set(result["classes"]) == {"standard"}
    assert result["classes"]["standard"]["sent"] == 4


def test_the_slowest_of_all_rounds_is_reported() -> None:
    rounds = [Round(records=(record(0.1), record(0.7))), Round(records=(record(0.3),))]
    result = figures(rounds, (), {})
    assert result["ttft_s"]["max"] == pytest.approx(0.7)
    assert [row["ttft_max_s"] for row in result["rounds"]] == pytest.approx([0.7, 0.3])
    assert not any(name.endswith(".max") for name in ratios({"a": result, "b": result})["a/b"])
    assert result["ttft_s"]["mean"] == pytest.approx(1.1 / 3)
    none = figures([Round(records=())], (), {})["ttft_s"]
    assert none["max"] is None and none["mean"] is None


def test_throughput_counts_each_rounds_own_time() -> None:
    rounds = [[record(0.6, 5)], [record(0.6, 5, due_s=100.0)]]
    assert throughput(rounds) == pytest.approx(10 / 2.0)


def test_percentiles_of_few_samples_are_not_compared() -> None:
    for count, compared in ((999, False), (1000, True)):
        many = figures([Round((record(1.0),) * 1000)], [], {})
        few = figures([Round((record(2.0),) * count)], [], {})
        for ratio in ratios({"many": many, "few": few}).values():
            assert ("ttft_s.p99.9" in ratio) is compared
            assert "ttft_s.p99" in ratio


def test_a_single_stall_does_not_change_the_ratio_of_the_median_round() -> None:
    systems = {
        "a": figures([Round((record(ttft_s),)) for ttft_s in (1.0, 1.0, 9.0)], [], {}),
        "b": figures([Round((record(2.0),))] * 3, [], {}),
    }
    both = ratios(systems)
    assert both["a/b"]["ttft_s.p99"] == pytest.approx(1 / both["b/a"]["ttft_s.p99"])
    assert both["a/b"]["ttft_s.p99"] > 4
    assert both["a/b"]["ttft_s.p99.median_round"] == pytest.approx(0.5)


def test_demand_counts_running_and_queued() -> None:
    running = SentRequest(
        0.0, 0.0, 5.0, RequestOutcome.COMPLETED, 20, 15, tuple(1 + i / 10 for i in range(15))
    )
    queued = SentRequest(2.0, 2.0, 4.0, RequestOutcome.FAILED, 40)
    refused = SentRequest(2.0, 2.0, 4.0, RequestOutcome.REJECTED, 40)
    points = timeline([running, queued, refused])
    # Queued: 2 blocks of prompt and one more. The first token still fits into the prompt's.
    assert points[0] == (0.0, 48)
    assert (1.0, 32) in points
    # 33 tokens need a third block.
    assert (1 + 12 / 10, 48 + 48 + 16) in points
    assert points[-1] == (5.0, 0)
    assert peak_ratio([running, queued], 56) == pytest.approx(112 / 56)


def test_bubbles_are_reported_for_the_round_and_the_arrivals() -> None:
    """Due at 0 and 10 s; afterwards a single request leaves one of two stages idle."""
    records = (record(due_s=0.0, tokens=100), record(due_s=10.0, tokens=300))
    samples = ((0.5, 1.0, 0.0), (5.0, 5.0, 1.0), (10.5, 10.0, 1.0), (40.0, 25.0, 16.0))
    whole = Round(records, busy_s=25.0, bubble_s=16.0, pipeline_samples=samples)
    assert bubble_share([whole]) == pytest.approx(16 / 41)
    assert bubble_share_arriving([whole]) == pytest.approx(1 / 10)
    alone = Round(records, busy_s=0.0, bubble_s=0.0, pipeline_samples=((5.0, 0.0, 0.0),))
    assert bubble_share_arriving([alone]) is None and bubble_share([alone]) is None
    nothing = Round(records=(), pipeline_samples=whole.pipeline_samples)
    assert bubble_share_arriving([nothing, whole]) == pytest.approx(1 / 10)
    assert bubble_share([whole, alone]) == bubble_share([whole])
    result = figures([whole], [], {})
    assert (result["busy_s"], result["bubble_s"]) == (25.0, 16.0)
    assert result["rounds"][0]["bubble_share_arriving"] == pytest.approx(1 / 10)


def test_iteration_times_are_compared_with_the_cost_model() -> None:
    round_ = Round((record(),), prefill_s=3.0, prefill_predicted_s=2.0, decode_s=1.0)
    two = Round((record(),), prefill_s=2.0, prefill_predicted_s=2.0)
    assert figures([round_, two], [], {})["cost_scale"] == {"prefill": 1.25, "decode": None}
