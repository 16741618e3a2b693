"""Verdicts on the bars of coserve, its phases, realtime and flood."""

from typing import Any

import pytest

from benchmarks.co_serving.bars import (
    BATCH_API,
    COSERVE,
    EACH,
    FLOOD,
    PHASES,
    REALTIME,
    Judgement,
    Rules,
    failures,
    judge,
)
from benchmarks.co_serving.online_load import OnlineTargets
from benchmarks.scenarios.coserve_phases import SCENARIO

TARGETS = OnlineTargets(ttft_s=1.0, tpot_s=0.4)
Systems = dict[str, dict[str, Any]]


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return base | {
        key: merged(base[key], value) if isinstance(value, dict) and key in base else value
        for key, value in changes.items()
    }


def system(**changes: Any) -> dict[str, Any]:
    """Figures of a system with two rounds, in each of which groups merged and split."""
    figures: dict[str, Any] = {
        "processed_tokens_per_s": 1000.0,
        "recomputed_share": 0.0,
        "ttft_s": {"p99": 1.0},
        "inter_token_s": {"p50": 0.08, "p99": 0.4},
        "normalized_latency_s": {"mean": 0.1},
        "cost_scale": {"prefill": 1.01, "decode": None},
        "classes": {
            "online": {
                "sent": 320,
                "cut_off": 0,
                "slo_attainment": {"ttft": 0.97, "tpot": 0.99},
                "normalized_latency_s": {"mean": 0.05},
            },
            "batch": {"completed": 7, "throughput_requests_per_s": 5.0},
        },
        "rounds": [{}, {}],
        "changes": [{"merge": n % 2 == 0, "settled_s": 3.0} for n in range(4)],
        "problems": [],
    }
    return merged(figures, changes)


def p99(ttft_s: float) -> dict[str, Any]:
    return {"ttft_s": {"p99": ttft_s}}


def attained(ttft: float, tpot: float = 0.99) -> dict[str, Any]:
    return {"classes": {"online": {"slo_attainment": {"ttft": ttft, "tpot": tpot}}}}


def online(**figures: Any) -> dict[str, Any]:
    return {"classes": {"online": figures}}


def gaps(p50: float, p99: float) -> dict[str, Any]:
    return {"inter_token_s": {"p50": p50, "p99": p99}}


def tokens(rate: float) -> dict[str, Any]:
    return {"processed_tokens_per_s": rate}


def batch(**figures: Any) -> dict[str, Any]:
    return {"classes": {"batch": figures}}


def changes(*settled_s: float | None, merge: bool = True) -> dict[str, Any]:
    return {"changes": [{"merge": merge, "settled_s": value} for value in settled_s]}


GOOD: dict[str, tuple[Rules, Systems]] = {
    "coserve": (
        COSERVE,
        {
            "online-only": system(**tokens(900.0)),
            "eager": system(**tokens(2000.0), recomputed_share=0.01),
            "priority": system(**p99(2.0)),
            "priority-256": system(**p99(1.8)),
            "slo": system(
                **tokens(1440.0), **p99(1.1), **gaps(0.2, 0.42), normalized_latency_s={"mean": 0.2}
            ),
            "slo-full": system(**tokens(1620.0), **p99(1.2), **gaps(0.3, 0.42)),
            "slo-api": system(**tokens(1400.0), **p99(1.15), **gaps(0.2, 0.44)),
        },
    ),
    "batch": (
        BATCH_API,
        {
            "online-only": system(**tokens(900.0)),
            "slo-api": system(**tokens(1300.0), **p99(1.1), **gaps(0.1, 0.42)),
        },
    ),
    "realtime": (
        REALTIME,
        {
            "fcfs": system(
                **merged(
                    attained(0.06, 0.7),
                    merged(
                        online(normalized_latency_s={"mean": 0.14}),
                        batch(throughput_requests_per_s=5.4),
                    ),
                )
            ),
            "slo": system(),
        },
    ),
    "flood": (FLOOD, {"online-only": system(**p99(0.5)), "slo": system(**p99(0.65))}),
    "phases": (
        PHASES,
        {
            "conserve": system(recomputed_share=0.13),
            "conserve-host": system(recomputed_share=0.012, **p99(1.09), **gaps(0.1, 0.43)),
            "bros": system(recomputed_share=0.02),
            "bros-host-all": system(recomputed_share=0.0009, **p99(1.09), **gaps(0.1, 0.43)),
        },
    ),
}


def judged(
    name: str, changed: str = "", change: dict[str, Any] | None = None, paced: bool = True
) -> dict[str, Any]:
    """The verdict on systems that hold all bars, except for a single change."""
    rules, systems = GOOD[name]
    if changed:
        systems = systems | {changed: merged(systems[changed], change or {})}
    return judge(rules, {f"{key}@A100:4": own for key, own in systems.items()}, TARGETS, paced)


def failing(verdict: dict[str, Any]) -> list[tuple[str, str]]:
    bars = verdict["bars"]
    return [(bar["system"], bar["what"]) for bar in bars if bar["verdict"] == Judgement.FAILS]


@pytest.mark.parametrize("name", GOOD)
def test_all_bars_hold(name: str) -> None:
    verdict = judged(name)
    assert {bar["verdict"] for bar in verdict["bars"]} == {Judgement.HOLDS}
    assert failures(verdict) == failures(None) == []


@pytest.mark.parametrize(
    ("name", "system", "change", "figure"),
    [
        ("coserve", "slo", tokens(1349.0), "processed tokens"),
        ("coserve", "slo-full", tokens(1529.0), "processed tokens"),
        ("coserve", "slo", p99(1.41), "P99 TTFT"),
        ("coserve", "slo-full", p99(1.41), "P99 TTFT"),
        ("coserve", "slo", gaps(0.2, 0.445), "P99 gap between tokens"),
        ("coserve", "slo-full", gaps(0.3, 0.445), "P99 gap between tokens"),
        ("coserve", "slo", gaps(0.22, 0.4), "median gap between tokens"),
        ("coserve", "slo", {"normalized_latency_s": {"mean": 0.23}}, "mean normalized latency"),
        ("coserve", "slo-api", tokens(1360.0), "processed tokens / those of slo"),
        ("coserve", "slo-api", p99(1.22), "P99 TTFT / that of slo"),
        ("coserve", "slo-api", gaps(0.2, 0.47), "P99 gap between tokens / that of slo"),
        ("batch", "slo-api", tokens(1160.0), "processed tokens"),
        ("batch", "slo-api", p99(1.41), "P99 TTFT"),
        ("batch", "slo-api", gaps(0.1, 0.45), "P99 gap between tokens"),
        ("batch", "slo-api", online(sent=299), "online requests in the windows"),
        ("coserve", "eager", {"recomputed_share": 0.03}, "recomputed share of tokens"),
        # A baseline is judged with the chunk that suits it best.
        ("coserve", "priority-256", p99(1.3), "P99 TTFT / that of slo"),
        ("coserve", "slo", online(sent=299), "online requests in the windows"),
        ("realtime", "slo", attained(0.94), "attainment of first tokens"),
        ("realtime", "slo", attained(0.97, 0.94), "attainment of time per token"),
        (
            *("realtime", "slo", online(normalized_latency_s={"mean": 0.14 * 0.41})),
            "mean normalized latency",
        ),
        (
            *("realtime", "slo", batch(throughput_requests_per_s=5.4 * 0.84)),
            "batch requests a second",
        ),
        ("realtime", "slo", online(sent=299), "online requests in the windows"),
        ("flood", "slo", p99(0.91), "P99 TTFT"),
        ("flood", "slo", {"problems": ["I11: a dearer step"]}, "problems in the logs"),
        ("flood", "slo", batch(completed=0), "batch requests completed"),
        ("flood", "slo", online(sent=199), "online requests in the windows"),
        ("phases", "bros", {"recomputed_share": 0.0095}, "recomputed share of tokens"),
        *(
            ("phases", system, change, figure)
            for system, more in (("conserve-host", 0.014), ("bros-host-all", 0.0021))
            for change, figure in (
                ({"recomputed_share": more}, "recomputed share / that without host memory"),
                (p99(1.11), "P99 TTFT / that without"),
                (gaps(0.1, 0.45), "P99 gap between tokens / that without"),
            )
        ),
    ],
)
def test_each_bar_fails_independently(
    name: str, system: str, change: dict[str, Any], figure: str
) -> None:
    verdict = judged(name, system, change)
    assert failing(verdict) == [(system, figure)]
    (sentence,) = failures(verdict)
    assert sentence.startswith(f"{system}: {figure} is ")


@pytest.mark.parametrize(
    ("change", "whats"),
    [
        (changes(*[31.0] * 4), {"longest change of groups [s]", "splits"}),
        (changes(*[None] * 4), {"longest change of groups [s]", "splits"}),
        (changes(3.0, 3.0, merge=False), {"merges"}),
        (changes(3.0, 3.0), {"splits"}),
    ],
)
def test_groups_have_to_merge_and_split_in_each_round_and_soon(
    change: dict[str, Any], whats: set[str]
) -> None:
    assert {figure for _, figure in failing(judged("flood", "slo", change))} == whats


def test_the_first_token_may_take_a_budget_longer_if_that_is_more() -> None:
    """An arrival waits for an iteration, which is more than 15 % of a short P99."""
    assert failing(judged("coserve", "slo", p99(1.39))) == []
    _, systems = GOOD["coserve"]
    for ttft_s, fails in ((11.4, False), (11.6, True)):
        slow = systems | {"online-only": merged(systems["online-only"], p99(10.0))}
        slow["slo"] = merged(slow["slo"], p99(ttft_s))
        slow |= {name: merged(systems[name], p99(20.0)) for name in ("priority", "priority-256")}
        verdict = judge(COSERVE, slow, TARGETS, paced=True)
        assert (("slo", "P99 TTFT") in failing(verdict)) is fails
        (bar,) = (bar for bar in verdict["bars"] if bar["wanted"].startswith("≤ 1.15"))
        assert bar["wanted"] == "≤ 1.15 × (1.15 ×, or one budget of 400 ms longer)"


@pytest.mark.parametrize(
    ("base", "remedy"),
    [(850.0, "give a --rate 1.06 times as high"), (950.0, "0.95 times as high"), (930.0, None)],
)
def test_a_mismatched_rate_fails_before_the_bars(base: float, remedy: str | None) -> None:
    _, systems = GOOD["coserve"]
    changed = systems | {"online-only": merged(systems["online-only"], tokens(base))}
    changed["slo"] = merged(systems["slo"], tokens(1200.0))
    first, *_ = failures(judge(COSERVE, changed, TARGETS, paced=True))
    assert first.startswith("online-only: online tokens / all") is (remedy is not None)
    assert remedy is None or remedy in first


@pytest.mark.parametrize(
    ("share", "rate"), [(0.039, "lower"), (0.04, None), (0.10, None), (0.101, "higher")]
)
def test_real_time_is_judged_where_fcfs_attains_a_little(share: float, rate: str | None) -> None:
    sentences = failures(judged("realtime", "fcfs", attained(share, 0.7)))
    if rate is None:
        assert all(sentence.startswith("slo: attainment of first") for sentence in sentences)
    else:
        assert sentences[0].startswith("fcfs: attainment of first tokens is 0")
        assert sentences[0].endswith(f"give a {rate} --rate")


def test_ten_times_as_many_first_tokens_are_wanted() -> None:
    figure = "attainment of first tokens / that of fcfs"
    assert failing(judged("realtime", "fcfs", attained(0.0971, 0.7))) == [("slo", figure)]
    # A baseline that attains nothing has no ratio.
    bars = judged("realtime", "fcfs", attained(0.0, 0.7))["bars"]
    (ratio,) = (bar for bar in bars if bar["what"] == figure)
    assert ratio["verdict"] == Judgement.NOT_MEASURED


@pytest.mark.parametrize("name", [name for name in GOOD if name != "phases"])
def test_bars_of_absent_runs_are_not_measured(name: str) -> None:
    rules, systems = GOOD[name]
    label = "slo-api" if name == "batch" else "slo"
    figures = systems[label] if name != "flood" else system(**p99(0.6))
    known = {key: own for key, own in figures.items() if key not in ("changes", "problems")}
    verdict = judge(rules, {label: known}, TARGETS, paced=True)
    assert failures(verdict) == []
    assert Judgement.NOT_MEASURED in {judged_bar["verdict"] for judged_bar in verdict["bars"]}
    nothing = judge(rules, {}, TARGETS, paced=True)
    assert {bar["verdict"] for bar in nothing["bars"]} == {Judgement.NOT_MEASURED}
    assert nothing["notes"] == []


def test_only_papers_that_ran_are_judged_in_phases() -> None:
    rules, systems = GOOD["phases"]
    ran = {name: systems[name] for name in ("conserve", "conserve-host")}
    bars = judge(rules, ran, TARGETS, paced=True)["bars"]
    assert {bar["system"] for bar in bars if not bar["load"]} == {"conserve-host"}
    assert {bar["verdict"] for bar in bars} == {Judgement.HOLDS}
    assert {bar["system"] for bar in judged("phases")["bars"]} == systems.keys() - {"conserve"}


def test_the_bars_of_phases_are_those_of_its_systems() -> None:
    """Bars of absent systems are left out, so a wrong name would never fail."""
    named = {name for rule in (*PHASES.load, *PHASES.paced) for name in (rule.system, rule.over)}
    assert named - {EACH, ""} <= {*SCENARIO.systems} == {*SCENARIO.paced_systems}


def test_only_measured_files_are_judged() -> None:
    rules, systems = GOOD["coserve"]
    without = {name: own for name, own in systems.items() if name != "slo-api"}
    whats = [
        {bar["what"] for bar in judge(rules, run, TARGETS, True)["bars"]}
        for run in (systems, without)
    ]
    assert whats[0] - whats[1] == {
        "P99 gap between tokens / that of slo",
        "processed tokens / those of slo",
    }


def test_unpaced_runs_have_their_own_bars() -> None:
    whats = {bar["what"] for bar in judged("coserve", paced=False)["bars"]}
    assert "processed tokens" in whats and "P99 TTFT" not in whats
    assert judged("realtime", paced=False)["bars"] == []


def test_token_shares_are_relative_to_eager() -> None:
    verdict = judged("coserve")
    assert verdict["online_share_of_eager"] == pytest.approx(0.45)
    assert verdict["harvested_share"]["slo"] == pytest.approx(540 / 1100)


@pytest.mark.parametrize(
    ("name", "system", "change", "paced", "begins"),
    [
        ("coserve", "slo", {"cost_scale": {"prefill": 1.065}}, True, "slo: iterations took 1.06"),
        ("coserve", "slo", {"cost_scale": {"prefill": 1.065}}, False, None),
        ("flood", "slo", online(cut_off=9), False, "slo: 9 online requests were cut off"),
        ("coserve", "online-only", gaps(0.08, 0.6), True, "the target of a gap between tokens"),
        ("realtime", "slo", {}, True, None),
    ],
)
def test_misleading_figures_are_annotated(
    name: str, system: str, change: dict[str, Any], paced: bool, begins: str | None
) -> None:
    notes = judged(name, system, change, paced)["notes"]
    assert len(notes) == (begins is not None)
    assert all(note.startswith(begins) for note in notes)
