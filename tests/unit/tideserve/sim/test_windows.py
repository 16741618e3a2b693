"""Figures over time: requests by their send time, tokens by their arrival."""

import pytest

from tideserve.sim.report import WINDOW_S, KvSample, Outcome, Outcomes, Record, figures


def record(sent_s: float, ttft_s: float, outcome: Outcome = Outcome.COMPLETED) -> Record:
    first_s = sent_s + ttft_s
    return Record(sent_s, 8, 4, first_s=first_s, end_s=first_s + 1, outcome=outcome)


def sample(time_s: float, processed: int) -> KvSample:
    return KvSample(time_s, 0, 0, 0, 0, 10, processed)


def test_a_window_has_the_mean_of_its_requests_and_the_speed_between_its_samples() -> None:
    outcomes = Outcomes(
        10,
        records=[
            record(1.0, 0.5),
            record(WINDOW_S - 0.1, 30.0),
            record(WINDOW_S, 2.0),
            record(WINDOW_S, 9.0, Outcome.REJECTED),
        ],
        samples=[
            sample(0.0, 0),
            sample(WINDOW_S - 1, 90),
            sample(WINDOW_S, 100),
            sample(2 * WINDOW_S - 1, 390),
            sample(2 * WINDOW_S, 400),
        ],
    )
    first, second, last = figures(outcomes)["over_time"]
    assert first["ttft_mean_s"] == pytest.approx(15.25)
    assert second["ttft_mean_s"] == pytest.approx(2.0) and last["ttft_mean_s"] is None
    assert [window["time_s"] for window in (first, second)] == [WINDOW_S, 2 * WINDOW_S]
    assert first["processed_tokens_per_s"] == pytest.approx(90 / (WINDOW_S - 1))
    assert second["processed_tokens_per_s"] == pytest.approx(300 / WINDOW_S)
    assert figures(outcomes)["ttft_s"]["mean"] == pytest.approx(32.5 / 3)


def test_a_simulation_without_samples_has_no_windows() -> None:
    assert figures(Outcomes(10))["over_time"] == []
