"""Bars of real-time requests beside best-effort ones: each by itself, and the load before them."""

from typing import Any

import pytest

from benchmarks.co_serving.judging import Judgement, OnlineTargets, failures
from benchmarks.co_serving.real_time import judge

TARGETS = OnlineTargets(1.6, 0.8, 4)
Systems = dict[str, dict[str, Any]]


def system(
    ttft: float | None = 0.97,
    tpot: float = 0.99,
    normalized_s: float = 0.05,
    batch: float = 5.0,
    sent: int = 600,
    cut_off: int = 0,
) -> dict[str, Any]:
    """Figures of one system, by default such as hold all bars."""
    return {
        "cost_scale": {"prefill": 1.0, "decode": None},
        "classes": {
            "online": {
                "sent": sent,
                "cut_off": cut_off,
                "slo_attainment": {"ttft": ttft, "tpot": tpot, "token_group": tpot},
                "normalized_latency_s": {"mean": normalized_s},
            },
            "batch": {"throughput_requests_per_s": batch},
        },
    }


@pytest.fixture
def systems() -> Systems:
    return {
        "fcfs@A100-40G-7B:4": system(0.06, 0.7, 0.14, 5.4, cut_off=3),
        "slo@A100-40G-7B:4": system(),
    }


def failing(systems: Systems) -> list[str]:
    bars = judge(systems, TARGETS, paced=True)["bars"]
    return [one["what"] for one in bars if one["verdict"] == Judgement.FAILS]


def test_all_hold(systems: Systems) -> None:
    found = judge(systems, TARGETS, paced=True)
    assert {one["verdict"] for one in found["bars"]} == {Judgement.HOLDS}
    assert len(found["bars"]) == 6
    assert failures(found) == []
    (note,) = found["notes"]
    assert note.startswith("fcfs: 3 online requests were cut off")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"ttft": 0.94}, "attainment of first tokens"),
        ({"tpot": 0.94}, "attainment of time per token"),
        ({"normalized_s": 0.14 * 0.41}, "mean normalized latency"),
        ({"batch": 5.4 * 0.84}, "batch requests a second"),
        ({"sent": 299}, "online requests in the windows"),
    ],
)
def test_each_fails_by_itself(systems: Systems, changes: dict[str, Any], what: str) -> None:
    systems["slo@A100-40G-7B:4"] = system(**changes)
    assert failing(systems) == [what]


def test_ten_times_as_many_first_tokens_are_wanted(systems: Systems) -> None:
    systems["fcfs@A100-40G-7B:4"] = system(0.0971, 0.7, 0.14, 5.4)
    assert failing(systems) == ["attainment of first tokens / that of fcfs"]
    # A baseline that attains nothing has no ratio, and no load that says anything.
    systems["fcfs@A100-40G-7B:4"] = system(0.0, 0.7, 0.14, 5.4)
    found = judge(systems, TARGETS, paced=True)
    (ratio,) = (one for one in found["bars"] if "that of fcfs" in one["what"])
    assert ratio["verdict"] == Judgement.NOT_MEASURED
    assert failures(found)[0].startswith("fcfs: attainment of first tokens is 0")


@pytest.mark.parametrize(
    ("attained", "rate"), [(0.039, "lower"), (0.04, None), (0.10, None), (0.101, "higher")]
)
def test_another_load_fails_first_and_says_which_rate_to_give(
    systems: Systems, attained: float, rate: str | None
) -> None:
    systems["fcfs@A100-40G-7B:4"] = system(attained, 0.7, 0.14, 5.4)
    systems["slo@A100-40G-7B:4"] = system(tpot=0.5)
    first, *_ = failures(judge(systems, TARGETS, paced=True))
    if rate is None:
        assert first.startswith("slo: attainment of time per token")
    else:
        assert first.startswith("fcfs: attainment of first tokens is 0")
        assert first.endswith(f"give a {rate} --rate")


def test_without_the_baseline_nothing_is_a_ratio_and_nothing_fails(systems: Systems) -> None:
    del systems["fcfs@A100-40G-7B:4"]
    bars = judge(systems, TARGETS, paced=True)["bars"]
    verdicts = {one["what"]: one["verdict"] for one in bars if one["system"] == "slo"}
    assert verdicts["attainment of first tokens"] == Judgement.HOLDS
    assert verdicts["mean normalized latency"] == Judgement.NOT_MEASURED
    assert failing(systems) == []
    assert judge({}, TARGETS, paced=True)["notes"] == []


def test_an_unpaced_run_has_no_bars(systems: Systems) -> None:
    assert judge(systems, TARGETS, paced=False)["bars"] == []


def test_rivals_are_told_priority_at_its_best_chunk(systems: Systems) -> None:
    systems |= {
        "priority@A100-40G-7B:4": system(normalized_s=0.08),
        "priority-256@A100-40G-7B:4": system(0.9, 0.99, 0.0625, batch=4.0),
        "bros@A100-40G-7B:4": system(batch=2.5),
    }
    chunk, bros, _ = judge(systems, TARGETS, paced=True)["notes"]
    assert chunk == (
        "slo against priority-256: attainment of first tokens 1.08 ×, of times per token 1.00 ×,"
        " normalized latency 0.80 ×, batch requests a second 1.25 ×"
    )
    assert bros.startswith("slo against bros:") and bros.endswith("2.00 ×")
