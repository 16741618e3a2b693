"""`preempt`: how soon an iteration of batch work gives way, and what that costs.

One engine, unpaced, measured from its servicer: two processes of the same model, of which one
interrupts batch work for online requests (`--preempt always`), and a third one for the cost of
safepoints. `bench steady` and `bench coserve` tell what whole clusters do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.probes.probe import Probe, run_probe
from benchmarks.scenarios.scenario import LoadChoice, Trial, TrialVerdict
from benchmarks.stats import distribution
from benchmarks.systems.system import Deployment, Say
from tideserve.sim.report import percentile

GIB = 1 << 30
TOKENS = 2048
SMALL_TOKENS = 256
"""`max_batch_tokens` by default."""
SLACK_S = 0.002
"""Beside one interval between safepoints."""
SAFEPOINT_SHARE_MAX = 0.01
TTFT_RATIO_MAX = 0.25
SAFEPOINTS_TIMEOUT_S, PREEMPTION_TIMEOUT_S = 300.0, 900.0


@dataclass(frozen=True, slots=True)
class ProbeExtent:
    """Rounds of the probes: see `probes/preemption.py` and `probes/safepoints.py`."""

    rounds: int
    arrivals: int
    drops: int
    behind: int
    pairs: int


FULL, QUICK = ProbeExtent(40, 6, 25, 8, 25), ProbeExtent(12, 6, 6, 4, 7)


def run(deployment: Deployment, choice: LoadChoice, line: Say, doing: Say) -> TrialVerdict:
    """Measure both parts, one after the other. Raises SystemUnavailable."""
    extent = QUICK if choice.quick else FULL
    found = {}
    for probe in probes(deployment, extent):
        doing(probe.title)
        found[probe.part] = run_probe(probe)
    return judge(found["safepoints"], found["preemption"])


def probes(deployment: Deployment, extent: ProbeExtent) -> tuple[Probe, ...]:
    """What runs, one after the other."""
    engine = (
        *("--model-dir", str(deployment.model_dir), "--dtype", deployment.dtype),
        *("--memory-gib", str(deployment.memory_bytes / GIB)),
    )
    return (
        Probe(
            "safepoints",
            "batches with and without safepoints",
            "benchmarks.probes.safepoints",
            (*engine, "--tokens", f"{SMALL_TOKENS},{TOKENS}", "--pairs", str(extent.pairs)),
            SAFEPOINTS_TIMEOUT_S,
        ),
        Probe(
            "preemption",
            "online requests and drops while batch work runs",
            "benchmarks.probes.preemption",
            (
                *engine,
                *("--tokens", str(TOKENS), "--rounds", str(extent.rounds)),
                *("--arrivals", str(extent.arrivals), "--drops", str(extent.drops)),
                *("--behind", str(extent.behind)),
            ),
            PREEMPTION_TIMEOUT_S,
        ),
    )


def judge(safepoints: Mapping[str, Any], preemption: Mapping[str, Any]) -> TrialVerdict:
    """Figures, and a problem for every bar that is missed."""
    iteration_s = median(preemption["iteration_s"])
    (large,) = [one for one in safepoints["batches"] if one["tokens"] == TOKENS]
    between = _told(large["interval_s"])
    stretch = between["p99"] / between["p50"]
    batches = {str(one["tokens"]): _share(one) for one in safepoints["batches"]}
    ttft = {case: _both(found) for case, found in preemption["ttft_s"].items()}
    figures: dict[str, Any] = {
        "tokens": preemption["tokens"],
        "iteration_s": iteration_s,
        "interval_s": between,
        "stretch": stretch,
        "noticed": _noticed(preemption["noticed"], preemption["layers"], stretch),
        "drop_noticed": _noticed(preemption["drop_noticed"], preemption["layers"], stretch),
        "drop_prepared_s": _told(preemption["drop_prepared_s"]),
        "safepoints_share": batches,
        "ttft_s": ttft,
        "resumed": {name: preemption[name] for name in (*_COUNTS, "compared_tokens")},
    }
    figures["problems"] = problems = _problems(figures)
    return TrialVerdict(figures, rows(figures), problems)


_COUNTS = (
    "preempted_iterations",
    "resumed_iterations",
    "discarded_tokens",
    "recomputed_tokens",
    "different_tokens",
)
_LOSSES = _COUNTS[2:]
_CASES = {
    "single": "P99 of first tokens",
    "behind": "P99 of first tokens while a batch prompt waits",
}


def _told(values: list[float]) -> dict[str, Any]:
    return {"count": len(values)} | distribution(values)


def _both(found: Mapping[str, list[float]]) -> dict[str, Any]:
    """First tokens with preemption and without, and the ratio of the slowest ones."""
    always, off = (percentile(found[name], 0.99) for name in ("always", "off"))
    return {
        "always": _told(found["always"]),
        "off": _told(found["off"]),
        "p99_ratio": always / off if always is not None and off else None,
    }


def _share(batch: Mapping[str, list[float]]) -> dict[str, float]:
    """What safepoints add to an iteration: the median over the pairs, and the middle half of it."""
    shares = [
        after / before - 1
        for before, after in zip(batch["without_s"], batch["with_s"], strict=True)
    ]
    quarters = [percentile(shares, part) for part in (0.25, 0.75)]
    assert quarters[0] is not None and quarters[1] is not None, "there are no pairs"
    return {"median": median(shares), "p25": quarters[0], "p75": quarters[1]}


def _noticed(found: Sequence[Sequence[float]], layers: int, stretch: float) -> dict[str, Any]:
    """How long it took, in seconds and in intervals between safepoints of the same iteration.

    `late_s` is what it took beyond one interval. On a machine with other work intervals are no
    longer alike, so that one may be `stretch` times the mean.
    """
    intervals_s = [iteration_s / layers for _, iteration_s in found]
    after_s = [seconds for seconds, _ in found]
    pairs = list(zip(after_s, intervals_s, strict=True))
    return {
        "after_s": _told(after_s),
        "own_interval_s": _told(intervals_s),
        "intervals": _told([seconds / interval_s for seconds, interval_s in pairs]),
        "late_s": _told([seconds - stretch * interval_s for seconds, interval_s in pairs]),
    }


def _problems(figures: Mapping[str, Any]) -> list[str]:
    resumed = figures["resumed"]
    share = figures["safepoints_share"][str(TOKENS)]["median"]
    problems = []
    for name, what in (("noticed", "an online request"), ("drop_noticed", "a drop")):
        late = figures[name]["late_s"]
        if not late["count"]:
            problems.append(f"nothing came while batch work ran: when {what} is noticed is unknown")
        elif late["p99"] > SLACK_S:
            problems.append(
                f"{what} is noticed {1e3 * late['p99']:.1f} ms (P99) later than an interval of"
                f" safepoints lasts; at most {1e3 * SLACK_S:.0f} ms is right"
            )
    if share > SAFEPOINT_SHARE_MAX:
        problems.append(f"safepoints cost {share:.1%} of an iteration of {TOKENS} tokens")
    if not resumed["resumed_iterations"]:
        problems.append("no iteration was interrupted and went on")
    lost = {name: resumed[name] for name in _LOSSES if resumed[name]}
    if lost:
        told = ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in lost.items())
        problems.append(f"interrupted work lost something: {told}")
    for case, found in figures["ttft_s"].items():
        ratio = found["p99_ratio"]
        if ratio is not None and ratio > TTFT_RATIO_MAX:
            problems.append(
                f"{_CASES[case]} is {ratio:.2f} x of that without preemption; it should be at most"
                f" {TTFT_RATIO_MAX} x"
            )
    return problems


def rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures for people, with their bars."""
    resumed = figures["resumed"]
    shares = figures["safepoints_share"]
    return [
        (
            f"an iteration of {figures['tokens']:,} tokens",
            f"{figures['iteration_s']:.2f} s",
        ),
        ("from safepoint to safepoint", _ms(figures["interval_s"])),
        ("online request noticed after", _notice(figures["noticed"], figures["stretch"])),
        ("Prepare of a drop noticed after", _notice(figures["drop_noticed"], figures["stretch"])),
        ("drop prepared by both members after", _ms(figures["drop_prepared_s"])),
        *(
            (
                f"safepoints, {int(tokens):,} tokens",
                f"{one['median']:+.2%} (middle half {one['p25']:+.2%} to {one['p75']:+.2%})"
                + (f"; bar {SAFEPOINT_SHARE_MAX:.0%}" if tokens == str(TOKENS) else ""),
            )
            for tokens, one in shares.items()
        ),
        (
            "interrupted / went on",
            f"{resumed['preempted_iterations']} / {resumed['resumed_iterations']}",
        ),
        (
            "tokens discarded / recomputed / different",
            f"{resumed['discarded_tokens']} / {resumed['recomputed_tokens']}"
            f" / {resumed['different_tokens']} of {resumed['compared_tokens']}; bar 0",
        ),
        *(
            (title, f"{_ttft(figures['ttft_s'][case])}; bar {TTFT_RATIO_MAX}")
            for case, title in _CASES.items()
        ),
    ]


def _ms(found: Mapping[str, Any]) -> str:
    if not found["count"]:
        return "–"
    return f"P50 {1e3 * found['p50']:.1f}, P99 {1e3 * found['p99']:.1f} ms of {found['count']}"


def _notice(found: Mapping[str, Any], stretch: float) -> str:
    if not found["late_s"]["count"]:
        return "–"
    return (
        f"{_ms(found['after_s'])}; P99 {found['intervals']['p99']:.2f} intervals of its iteration,"
        f" of which the slowest are {stretch:.2f} (P99); beyond: {1e3 * found['late_s']['p99']:.1f}"
        f" ms, bar {1e3 * SLACK_S:.0f} ms"
    )


def _ttft(found: Mapping[str, Any]) -> str:
    if found["p99_ratio"] is None:
        return "–"
    always, off = found["always"], found["off"]
    return (
        f"{1e3 * always['p99']:.0f} ms of {always['count']}, without preemption"
        f" {1e3 * off['p99']:.0f} ms of {off['count']}: {found['p99_ratio']:.2f} x"
    )


TRIAL = Trial(
    name="preempt",
    summary="how soon batch work gives way to online requests and drops, and what safepoints cost",
    memory="1GiB",
    run=run,
    real_model=True,
)
