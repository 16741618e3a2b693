"""Bars of co-serving: what holds, what fails, what nobody measured."""

import io
from typing import Any

import pytest
from rich.console import Console

from benchmarks.co_serving.bars import judge
from benchmarks.co_serving.judging import Judgement, OnlineTargets, failures
from benchmarks.co_serving.tables import show_co_serving

TARGETS = OnlineTargets(ttft_s=1.0, tpot_s=0.4)
Systems = dict[str, dict[str, Any]]


def system(
    processed: float = 1000.0,
    ttft_p99_s: float = 1.0,
    gap_s: tuple[float, float] = (0.08, 0.4),
    normalized_s: float = 0.1,
    sent: int = 320,
    recomputed: float | None = 0.0,
) -> dict[str, Any]:
    """Figures of one system; `gap_s` are its median and its P99."""
    return {
        "processed_tokens_per_s": processed,
        "output_tokens_per_s": processed / 10,
        "recomputed_share": recomputed,
        "ttft_s": {"p50": ttft_p99_s / 2, "p99": ttft_p99_s},
        "inter_token_s": {"p50": gap_s[0], "p99": gap_s[1]},
        "normalized_latency_s": {"mean": normalized_s},
        "cost_scale": {"prefill": 1.01, "decode": None},
        "classes": {
            "online": {"sent": sent, "without_token": 0, "cut_off": 0},
            "batch": {"processed_tokens_per_s": processed - 900, "completed": 7},
        },
    }


@pytest.fixture
def systems() -> Systems:
    return {
        "online-only@A100-14B:4": system(900.0),
        "eager@A100-14B:4": system(2000.0, 5.0, (1.0, 2.0), recomputed=0.01),
        "priority@A100-14B:4": system(1900.0, 2.0),
        "priority-256@A100-14B:4": system(1700.0, 1.8),
        "slo@A100-14B:4": system(1440.0, 1.1, (0.2, 0.42), 0.2),
        "slo-full@A100-14B:4": system(1620.0, 1.2, (0.3, 0.42), 0.3),
    }


def verdicts(systems: Systems, paced: bool = True) -> dict[tuple[str, str], str]:
    """By system and the beginning of what is judged."""
    bars = judge(systems, TARGETS, paced)["bars"]
    return {(one["system"], one["what"]): one["verdict"] for one in bars}


def test_all_hold(systems: Systems) -> None:
    found = judge(systems, TARGETS, paced=True)
    assert {one["verdict"] for one in found["bars"]} == {Judgement.HOLDS}
    assert failures(found) == []
    assert found["online_share_of_eager"] == pytest.approx(0.45)
    assert found["harvested_share"]["slo"] == pytest.approx(540 / 1100)
    assert found["notes"] == []


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("slo", {"processed_tokens_per_s": 1349.0}, "processed tokens"),
        ("slo-full", {"processed_tokens_per_s": 1529.0}, "processed tokens"),
        ("slo", {"ttft_s": {"p50": 1, "p99": 1.41}}, "P99 TTFT"),
        ("slo-full", {"ttft_s": {"p50": 1, "p99": 1.41}}, "P99 TTFT"),
        ("slo", {"inter_token_s": {"p50": 0.2, "p99": 0.445}}, "P99 gap between tokens"),
        ("slo-full", {"inter_token_s": {"p50": 0.3, "p99": 0.445}}, "P99 gap between tokens"),
        ("slo", {"inter_token_s": {"p50": 0.22, "p99": 0.4}}, "median gap between tokens"),
        ("slo", {"normalized_latency_s": {"mean": 0.23}}, "mean normalized latency"),
        ("eager", {"recomputed_share": 0.03}, "recomputed share of tokens"),
    ],
)
def test_each_fails_by_itself(
    systems: Systems, name: str, change: dict[str, Any], what: str
) -> None:
    systems[f"{name}@A100-14B:4"] |= change
    found = judge(systems, TARGETS, paced=True)
    assert [one["what"] for one in found["bars"] if one["verdict"] == Judgement.FAILS] == [what]
    (sentence,) = failures(found)
    assert sentence.startswith(f"{name}: {what} is ")


def test_the_first_token_may_take_a_budget_longer_if_that_is_more(systems: Systems) -> None:
    """An arrival finds an iteration that runs: of a short P99 that is more than 15 %."""
    slo, base = systems["slo@A100-14B:4"], systems["online-only@A100-14B:4"]
    slo["ttft_s"]["p99"], base["ttft_s"]["p99"] = 1.39, 1.0
    assert verdicts(systems)["slo", "P99 TTFT"] == Judgement.HOLDS
    slo["ttft_s"]["p99"], base["ttft_s"]["p99"] = 11.4, 10.0
    assert verdicts(systems)["slo", "P99 TTFT"] == Judgement.HOLDS
    slo["ttft_s"]["p99"] = 11.6
    assert verdicts(systems)["slo", "P99 TTFT"] == Judgement.FAILS


def test_priority_is_judged_with_its_best_chunk(systems: Systems) -> None:
    """A baseline is not made slow by a chunk that does not suit it."""
    assert verdicts(systems)["priority-256", "P99 TTFT / that of slo"] == Judgement.HOLDS
    systems["priority-256@A100-14B:4"]["ttft_s"]["p99"] = 1.3
    assert verdicts(systems)["priority-256", "P99 TTFT / that of slo"] == Judgement.FAILS


@pytest.mark.parametrize(
    ("base", "verdict"), [(850.0, "fails"), (950.0, "fails"), (930.0, "holds")]
)
def test_a_load_outside_its_range_fails_and_says_the_rate(
    systems: Systems, base: float, verdict: str
) -> None:
    systems["online-only@A100-14B:4"]["processed_tokens_per_s"] = base
    systems["slo@A100-14B:4"]["processed_tokens_per_s"] = 1200.0
    found = judge(systems, TARGETS, paced=True)
    assert found["bars"][0]["verdict"] == verdict
    first, *_ = failures(found)
    # The wrong load is told before what else fails.
    told = "give a --rate" in first and first.startswith("online-only: online tokens / all")
    assert told is (verdict == "fails")
    if told:
        assert f"--rate {0.45 / (base / 2000):.2f} times as high" in first


def test_too_few_requests_fail(systems: Systems) -> None:
    systems["slo@A100-14B:4"]["classes"]["online"]["sent"] = 299
    assert verdicts(systems)["slo", "online requests in the windows"] == Judgement.FAILS


def test_what_did_not_run_is_not_measured(systems: Systems) -> None:
    for name in ("eager", "slo-full", "priority", "priority-256"):
        del systems[f"{name}@A100-14B:4"]
    found = verdicts(systems)
    assert found["online-only", "online tokens / all that eager processes"] == "not measured"
    assert found["slo-full", "processed tokens"] == Judgement.NOT_MEASURED
    assert found["priority", "P99 TTFT / that of slo"] == Judgement.NOT_MEASURED
    assert found["slo", "processed tokens"] == Judgement.HOLDS
    assert failures(judge(systems, TARGETS, paced=True)) == []
    assert failures(None) == []
    assert set(verdicts({}).values()) == {Judgement.NOT_MEASURED}


def test_unpaced_only_tokens_have_a_bar(systems: Systems) -> None:
    systems["slo@A100-14B:4"] |= {"processed_tokens_per_s": 1270.0, "inter_token_s": {"p99": 9.0}}
    found = verdicts(systems, paced=False)
    assert found["slo", "processed tokens"] == Judgement.HOLDS
    assert not {what for _, what in found} & {"P99 TTFT", "P99 gap between tokens"}


def test_targets_that_are_not_the_p99_of_online_only_are_told(systems: Systems) -> None:
    systems["online-only@A100-14B:4"]["inter_token_s"]["p99"] = 0.6
    (note,) = judge(systems, TARGETS, paced=True)["notes"]
    assert "the target of a gap between tokens is 400 ms" in note and "was 600 ms" in note


def test_figures_that_are_not_what_they_seem_are_told(systems: Systems) -> None:
    systems["slo@A100-14B:4"]["cost_scale"]["prefill"] = 1.065
    systems["eager@A100-14B:4"]["classes"]["online"]["cut_off"] = 9
    cut_off, late = sorted(judge(systems, TARGETS, paced=True)["notes"])
    assert cut_off.startswith("eager: 9 online requests were cut off")
    assert late.startswith("slo: iterations took 1.06 times what they are paced to")
    assert judge(systems, TARGETS, paced=False)["notes"] == [cut_off]


def test_tables_show_ratios_and_verdicts(systems: Systems) -> None:
    output = io.StringIO()
    del systems["slo-full@A100-14B:4"]
    systems["slo@A100-14B:4"]["processed_tokens_per_s"] = 1000.0
    verdict = judge(systems, TARGETS, paced=True)
    show_co_serving("coserve", systems, verdict, Console(file=output, width=160))
    text = output.getvalue()
    for part in (
        *("1,900 (2.11×)", "420 (1.05×)", "harvested share", "not measured"),
        *("fails", "holds", "≤ 1.40 × (1.15 ×, or one budget of 400 ms longer)"),
    ):
        assert part in text
