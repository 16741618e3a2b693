"""Figures of co-serving from synthetic records and counter samples."""

import pytest
from msgspec.structs import replace

from benchmarks.co_serving.figures import (
    co_serving_figures,
    counted_at,
    targets_met,
    ttft_s,
    window,
)
from benchmarks.co_serving.online_load import WINDOW_FROM_S, OnlineTargets
from tideserve.load.client import UNFINISHED
from tideserve.load.record import RequestOutcome, Round, SentRequest, TokenSample
from tideserve.load.workload import BATCH_CLASS

FROM_S = 100.0
"""When the rounds of these tests begin, on the clock."""
PROMISED = OnlineTargets(ttft_s=2.0, tpot_s=0.5, token_group=2)


def record(
    due_s: float,
    first_s: float = 1.0,
    tokens: int = 3,
    gap_s: float = 0.1,
    slo_class: str = "interactive",
) -> SentRequest:
    """A completed request that is due `due_s` after the start of the round."""
    due_s += FROM_S
    times = tuple(due_s + first_s + gap_s * index for index in range(tokens))
    return SentRequest(
        due_s, due_s, times[-1], RequestOutcome.COMPLETED, 642, tokens, times, slo_class=slo_class
    )


def without_token(due_s: float, end_s: float, outcome: RequestOutcome, error: str) -> SentRequest:
    """A request without tokens that ended `end_s` after the start of the round."""
    return SentRequest(
        FROM_S + due_s,
        FROM_S + due_s,
        FROM_S + end_s,
        outcome,
        642,
        slo_class="interactive",
        error=error,
    )


def sample(time_s: float, processed: float, batch: float, again: float = 0.0) -> TokenSample:
    """Counters `time_s` after the start; a tenth of the tokens is output."""
    return TokenSample(
        FROM_S + time_s,
        processed,
        output=processed / 10,
        recomputed=again,
        batch_processed=batch,
        batch_recomputed=again,
    )


def test_the_window_begins_late_and_ends_with_the_last_online_arrival() -> None:
    records = [record(0.0), record(20.0), record(40.0), record(70.0, slo_class=BATCH_CLASS)]
    assert window(records) == (FROM_S + WINDOW_FROM_S, FROM_S + 40.0)
    assert window(records[:1]) is None
    assert window([record(70.0, slo_class=BATCH_CLASS)]) is None


def test_only_online_requests_of_the_window_count_and_batch_ones_beside_them() -> None:
    early = record(0.0, first_s=9.0)
    inside = [record(20.0, first_s=1.0), record(35.0, first_s=3.0)]
    batch = record(1.0, first_s=30.0, slo_class=BATCH_CLASS)
    result = co_serving_figures([Round((early, *inside, batch))], (), {}, PROMISED)
    online = result["classes"]["online"]
    assert set(result["classes"]) == {"online", "batch"}
    assert (result["sent"], online["sent"], result["classes"]["batch"]["sent"]) == (2, 2, 1)
    assert online["ttft_s"]["max"] == pytest.approx(3.0)
    assert result["ttft_s"] == online["ttft_s"]
    assert result["classes"]["batch"]["ttft_s"]["p50"] == pytest.approx(30.0)
    # The mean of 1.2 s and 3.2 s for three tokens each.
    assert online["normalized_latency_s"]["mean"] == pytest.approx(2.2 / 3)


def test_a_request_without_a_token_counts_with_its_waiting_time() -> None:
    cut_off = without_token(20.0, 60.0, RequestOutcome.FAILED, UNFINISHED)
    refused = without_token(30.0, 30.01, RequestOutcome.REJECTED, "no place")
    broken = without_token(40.0, 41.0, RequestOutcome.FAILED, "the stream ended early")
    assert ttft_s(cut_off, FROM_S + 70.0) == pytest.approx(40.0)
    # Otherwise a system that refuses every request at once would be fast.
    assert ttft_s(refused, FROM_S + 70.0) == pytest.approx(40.0)
    assert ttft_s(broken, FROM_S + 70.0) == pytest.approx(30.0)
    rounds = [Round((record(0.0), cut_off, refused, broken, record(50.0)))]
    online = co_serving_figures(rounds, (), {}, PROMISED)["classes"]["online"]
    assert online["ttft_s"]["max"] == pytest.approx(40.0)
    assert online["ttft_s"]["p50"] > 1.0
    counts = [online[key] for key in ("sent", "completed", "cut_off", "rejected", "failed")]
    assert counts == [4, 1, 1, 1, 1]
    assert online["without_token"] == 3


def test_gaps_of_requests_that_were_cut_off_count() -> None:
    """Otherwise a slow system could hide its gaps by never ending a request."""
    cut_off = SentRequest(
        FROM_S + 20.0,
        FROM_S + 20.0,
        FROM_S + 40.0,
        RequestOutcome.FAILED,
        642,
        2,
        (FROM_S + 21.0, FROM_S + 30.0),
        slo_class="interactive",
        error=UNFINISHED,
    )
    result = co_serving_figures([Round((record(0.0), cut_off, record(35.0)))], (), {}, PROMISED)
    assert result["inter_token_s"]["max"] == pytest.approx(9.0)
    assert result["normalized_latency_s"]["mean"] == pytest.approx(1.2 / 3)


def test_a_counter_is_read_between_its_samples() -> None:
    samples = [sample(1.0, 100.0, 0.0), sample(3.0, 300.0, 0.0)]
    times_s = (0.0, 1.0, 1.5, 3.0, 9.0)
    values = [
        counted_at(samples, FROM_S + time_s, lambda counted: counted.processed)
        for time_s in times_s
    ]
    assert values == pytest.approx([100.0, 100.0, 150.0, 300.0, 300.0])
    assert counted_at([], FROM_S, lambda counted: counted.processed) is None


def test_processed_tokens_are_those_that_workers_count_in_the_windows() -> None:
    online = (record(0.0), record(25.0))
    # Before the window 1,000 tokens a second, in its 10 s 200 of which 50 are batch, then more.
    samples = (
        sample(0.0, 0.0, 0.0),
        sample(15.0, 15_000.0, 14_000.0),
        sample(25.0, 17_000.0, 14_500.0, again=500.0),
        sample(40.0, 90_000.0, 80_000.0, again=9_000.0),
    )
    slower = tuple(
        sample(time_s, processed, processed / 2)
        for time_s, processed in ((0.0, 0.0), (15.0, 100.0), (25.0, 1_100.0))
    )
    first, second = Round(online, token_samples=samples), Round(online, token_samples=slower)
    result = co_serving_figures([first, second], (), {}, PROMISED)
    assert result["window_s"] == pytest.approx(20.0)
    assert result["processed_tokens_per_s"] == pytest.approx((2_000 + 1_000) / 20)
    assert result["output_tokens_per_s"] == pytest.approx(300 / 20)
    assert result["recomputed_share"] == pytest.approx(500 / 3_500)
    by_class = {
        name: class_["processed_tokens_per_s"] for name, class_ in result["classes"].items()
    }
    assert by_class == pytest.approx({"online": (1_500 + 500) / 20, "batch": (500 + 500) / 20})
    assert result["classes"]["batch"]["recomputed_share"] == pytest.approx(500 / 1_500)
    of_rounds = [row["processed_tokens_per_s"] for row in result["rounds"]]
    assert of_rounds == pytest.approx([200.0, 100.0])


def test_servers_without_class_counters_report_the_sum() -> None:
    samples = tuple(TokenSample(FROM_S + time_s, 10.0 * time_s) for time_s in (0.0, 30.0))
    rounds = [Round((record(0.0), record(25.0)), token_samples=samples)]
    result = co_serving_figures(rounds, (), {}, PROMISED)
    assert result["processed_tokens_per_s"] == pytest.approx(10.0)
    assert result["recomputed_share"] is None
    assert result["classes"]["batch"]["processed_tokens_per_s"] is None


def test_reset_counters_and_rounds_without_a_window_are_ignored() -> None:
    restarted = (sample(0.0, 500.0, 0.0), sample(20.0, 10.0, 0.0), sample(30.0, 20.0, 0.0))
    result = co_serving_figures(
        [Round((record(0.0), record(25.0)), token_samples=restarted)], (), {}, PROMISED
    )
    assert result["processed_tokens_per_s"] is None
    empty = co_serving_figures([Round(())], (), {}, PROMISED)
    assert empty["processed_tokens_per_s"] is None
    assert empty["classes"]["online"]["ttft_s"]["p99"] is None


def test_attainment_covers_all_online_requests_of_the_windows() -> None:
    refused = without_token(30.0, 30.01, RequestOutcome.REJECTED, "no place")
    slow_first, slow_tokens = record(20.0, first_s=2.1), record(21.0, gap_s=0.6)
    records = (record(0.0, first_s=9.0), slow_first, slow_tokens, record(22.0), refused)
    result = co_serving_figures([Round((*records, record(55.0)))], (), {}, PROMISED)
    online = result["classes"]["online"]
    # One of five got nothing and one each missed a target.
    assert online["slo_attainment"] == pytest.approx({"ttft": 0.6, "tpot": 0.6, "token_group": 0.6})
    assert online["goodput_requests_per_s"] == pytest.approx(2 / 40)


def test_a_longer_lead_makes_a_shorter_window() -> None:
    records = (record(0.0), record(20.0), record(45.0), record(50.0))
    result = co_serving_figures([Round(records)], (), {}, PROMISED, window_from_s=40.0)
    assert (result["sent"], result["window_s"]) == (2, pytest.approx(10.0))


def test_batch_requests_count_where_they_end() -> None:
    due_s = (2.0, 14.0, 20.0, 30.0, 54.0)
    ended = [record(time_s, 1.0, 3, slo_class=BATCH_CLASS) for time_s in due_s]
    broken = without_token(20.0, 41.0, RequestOutcome.FAILED, "the stream ended early")
    rounds = [Round((record(0.0), *ended, replace(broken, slo_class=BATCH_CLASS), record(55.0)))]
    batch = co_serving_figures(rounds, (), {}, PROMISED)["classes"]["batch"]
    # The window is from 15 s to 55 s; the first one ended before it, the last one after it.
    assert batch["throughput_requests_per_s"] == pytest.approx(3 / 40)
    assert batch["throughput_tokens_per_s"] == pytest.approx(9 / 40)


def test_a_cut_off_request_counts_its_received_tokens() -> None:
    def cut_off(end_s: float, *tokens_s: float) -> SentRequest:
        request = without_token(20.0, end_s, RequestOutcome.FAILED, UNFINISHED)
        return replace(request, token_times_s=tuple(FROM_S + time_s for time_s in tokens_s))

    assert targets_met(cut_off(21.6, 21.0, 21.4), PROMISED) == (True, True, 1.0)
    # Nothing for a second after a group that was in time.
    assert targets_met(cut_off(22.9, 21.0, 21.4, 21.8), PROMISED) == (True, False, 0.5)
    assert targets_met(cut_off(24.1, 24.0), PROMISED) == (False, True, 1.0)
    assert targets_met(cut_off(60.0), PROMISED) == (False, False, 0.0)
    broken = replace(cut_off(21.6, 21.0, 21.4), error="the stream ended early")
    assert targets_met(broken, PROMISED) == (False, False, 0.0)
    assert targets_met(record(20.0, tokens=1), PROMISED) == (True, True, 1.0)
