"""Pass criteria ("bars") of a co-serving run, as rules on its figures. Pure.

Most rules compare two systems of the same run. Rules about the load come first: if the load is
wrong, the other bars are meaningless.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from benchmarks.co_serving.online_load import OnlineTargets
from benchmarks.stats import quotient
from benchmarks.systems.schedulings import API

Figures = Mapping[str, Any]
Named = Mapping[str, Figures]
"""Figures by system name, without the pace."""
Value = Callable[[Figures], float | None]
EACH = "each system"
PRIORITY = "priority"
"""System of a rule: `priority` with its best chunk size."""
REQUESTS_MIN = 300
"""Minimum number of online requests for a percentile."""
LATE_MAX = 1.03
"""On idle processors, paced iterations with chunks take at most this multiple of their pace."""
TARGET_TOLERANCE = 0.15
"""Largest deviation of a `coserve` target from the P99 of `online-only`."""


class Judgement(StrEnum):
    """Outcome of comparing a figure with its bar."""

    HOLDS = "holds"
    FAILS = "fails"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Rule:
    """`value` of a system lies in [least, most]; with `over`, as a multiple of that system's value.

    budget       relax the bar by the budget of an iteration: a new request waits for the running
                 iteration
    per_round    `least` applies per round
    if_failed    report the bar only if it fails
    optional     report the bar only if the system ran
    """

    what: str
    system: str
    value: Value
    least: float | None = None
    most: float | None = None
    over: str = ""
    load: bool = False
    budget: bool = False
    per_round: bool = False
    if_failed: bool = False
    optional: bool = False
    remedy: Callable[[float], str] = lambda value: ""
    aim: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a scenario: for its load, then for paced and for unpaced figures.

    `base` is the reference system of the tables. `notes` and `more` extend the verdict.
    """

    base: str
    load: Sequence[Rule]
    paced: Sequence[Rule]
    unpaced: Sequence[Rule] | None = None
    notes: Callable[[Named, OnlineTargets], Iterator[str]] = lambda named, targets: iter(())
    more: Callable[[Named], dict[str, Any]] = lambda named: {}


def judge(
    rules: Rules, systems: Mapping[str, Figures], targets: OnlineTargets, paced: bool
) -> dict[str, Any]:
    """The verdict as JSON; `systems` by label, such as `slo@A100-14B:4`.

    Without rules for an unpaced run, the load is only an estimate, so no bar is judged.
    """
    named = by_name(systems)
    chosen = rules.paced if paced else rules.unpaced
    applied = () if chosen is None else (*rules.load, *chosen)
    return {
        "base": rules.base,
        "targets": asdict(targets),
        **rules.more(named),
        "bars": [bar for rule in applied for bar in _bars(rule, named, targets)],
        "notes": [
            *rules.notes(named, targets),
            # Only paced iterations have a duration to keep.
            *(_late_notes(named) if paced else ()),
            *_cut_off_notes(named),
        ],
    }


def failures(verdict: Figures | None) -> list[str]:
    """A sentence per failed bar, load first; empty without a verdict."""
    failed = [bar for bar in (verdict or {"bars": ()})["bars"] if bar["verdict"] == Judgement.FAILS]
    return [
        f"{bar['system']}: {bar['what']} is {bar['value']:.3g}, expected {bar['wanted']}"
        + (f"; {bar['remedy']}" if bar["remedy"] else "")
        for bar in sorted(failed, key=lambda bar: not bar["load"])
    ]


def by_name(systems: Mapping[str, Figures]) -> dict[str, Figures]:
    """Figures by system name, from figures by label (`slo@A100-14B:4`)."""
    return {label.partition("@")[0]: figures for label, figures in systems.items()}


def at(*keys: str) -> Value:
    """A reader of the figure at the path `keys`; it returns None if a key is missing."""

    def read(figures: Figures) -> float | None:
        value: Any = figures
        for key in keys:
            value = None if value is None else value.get(key)
        return None if value is None else float(value)

    return read


PROCESSED = at("processed_tokens_per_s")
TTFT_P99, GAP_P99 = at("ttft_s", "p99"), at("inter_token_s", "p99")
ONLINE, BATCH = ("classes", "online"), ("classes", "batch")
SENT, CUT_OFF = at(*ONLINE, "sent"), at(*ONLINE, "cut_off")
TTFT_MET, TPOT_MET = (at(*ONLINE, "slo_attainment", name) for name in ("ttft", "tpot"))
NORMALIZED = at(*ONLINE, "normalized_latency_s", "mean")
BATCH_RATE = at(*BATCH, "throughput_requests_per_s")


def _bars(rule: Rule, named: Named, targets: OnlineTargets) -> Iterator[dict[str, Any]]:
    names: Sequence[str] = (rule.system,)
    if rule.system == EACH:
        names = list(named)
    elif rule.optional and rule.system not in named:
        names = ()
    elif rule.system == PRIORITY:
        names = (_best_chunk(named, rule.value) or PRIORITY,)
    for name in names:
        value = _value(named, name, rule.value)
        least, most = rule.least, rule.most
        if least is not None and rule.per_round:
            least *= len(named[name]["rounds"])
        if rule.over:
            value = _ratio(named, name, rule.over, rule.value)
        wanted = _wanted(least, most) + rule.aim
        # An arrival waits for the running iteration, so the strict ratio cannot hold on a fast
        # base.
        if most is not None and rule.budget:
            base_s, strict = _value(named, rule.over, rule.value), most
            most = max(most, 1 + targets.tpot_s / base_s) if base_s else most
            wanted = (
                f"≤ {most:.2f} × ({strict:g} ×, or one budget of {targets.tpot_s * 1e3:.0f} ms"
                " longer)"
            )
        verdict, remedy = Judgement.NOT_MEASURED, ""
        if value is not None:
            holds = (least is None or value >= least) and (most is None or value <= most)
            verdict = Judgement.HOLDS if holds else Judgement.FAILS
            remedy = "" if holds else rule.remedy(value)
        # Rules with `if_failed` are reported only when they explain a failure.
        if verdict == Judgement.FAILS or not rule.if_failed:
            yield {
                "what": rule.what,
                "system": name,
                "wanted": wanted,
                "value": value,
                "verdict": verdict,
                "load": rule.load,
                "remedy": remedy,
            }


def _wanted(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f"{least:.2f}-{most:.2f}"
    return f"≤ {most:g}" if least is None else f"≥ {least:g}"


def _value(named: Named, name: str, value: Value) -> float | None:
    return value(named[name]) if name in named else None


def _ratio(named: Named, name: str, over: str, value: Value) -> float | None:
    return quotient(_value(named, name, value), _value(named, over, value))


def _best_chunk(named: Named, value: Value) -> str | None:
    """The variant of `priority` with the smallest `value`; None if there are none."""
    chunks = [name for name in named if name == PRIORITY or name.startswith(f"{PRIORITY}-")]
    known = {name: own for name in chunks if (own := value(named[name])) is not None}
    return min(known, key=lambda name: known[name], default=None)


def _late_notes(named: Named) -> Iterator[str]:
    for name, figures in named.items():
        late = figures["cost_scale"]["prefill"]
        if late is not None and late > LATE_MAX:
            yield (
                f"{name}: iterations took {late:.2f} times their pace, so other work used the"
                " processors; inter-token gaps show it first"
            )


def _cut_off_notes(named: Named) -> Iterator[str]:
    for name, figures in named.items():
        if cut_off := CUT_OFF(figures):
            yield (
                f"{name}: {cut_off:.0f} online requests were cut off at the end of a round; the"
                " normalized latency excludes them"
            )


def _target_notes(named: Named, targets: OnlineTargets) -> Iterator[str]:
    """Notes on `coserve` targets that deviate from the P99 of `online-only`."""
    for metric, target_s, value in (
        ("first token", targets.ttft_s, TTFT_P99),
        ("gap between tokens", targets.tpot_s, GAP_P99),
    ):
        measured_s = _value(named, "online-only", value)
        if measured_s and abs(target_s / measured_s - 1) > TARGET_TOLERANCE:
            yield (
                f"the target of a {metric} is {target_s * 1e3:,.0f} ms, but the P99 of online-only,"
                f" which it should equal, was {measured_s * 1e3:,.0f} ms"
            )


def _token_shares(named: Named) -> dict[str, Any]:
    """Processed tokens of `online-only` and each system's gain, as shares of `eager`'s."""
    base, most = (_value(named, name, PROCESSED) for name in ("online-only", "eager"))

    def share(own: float | None) -> float | None:
        if base is None or most is None or own is None or most == base:
            return None
        return (own - base) / (most - base)

    return {
        "online_share_of_eager": _ratio(named, "online-only", "eager", PROCESSED),
        "harvested_share": {
            name: share(PROCESSED(own)) for name, own in named.items() if name != "online-only"
        },
    }


def _rival_notes(named: Named, targets: OnlineTargets) -> Iterator[str]:
    """Comparison of `slo` with `priority` at its best chunk size, and with BROS."""
    for rival in (_best_chunk(named, NORMALIZED), "bros"):
        if rival is not None and {rival, "slo"} <= named.keys():
            ratios = [
                (metric, _ratio(named, "slo", rival, value))
                for metric, value in (
                    ("attainment of first tokens", TTFT_MET),
                    ("of times per token", TPOT_MET),
                    ("normalized latency", NORMALIZED),
                    ("batch requests a second", BATCH_RATE),
                )
            ]
            shown = [f"{metric} {'–' if x is None else f'{x:.2f} ×'}" for metric, x in ratios]
            yield f"slo against {rival}: {', '.join(shown)}"


def _changes(merge: bool) -> Value:
    def count(figures: Figures) -> float | None:
        changes = figures.get("changes")
        return (
            None if changes is None else float(sum(change["merge"] is merge for change in changes))
        )

    return count


def _longest_change_s(figures: Figures) -> float | None:
    """None without changes; infinite if a change has not settled."""
    times_s = [change["settled_s"] for change in figures.get("changes") or ()]
    return float("inf") if None in times_s else max(times_s, default=None)


def _problems(figures: Figures) -> float | None:
    return None if "problems" not in figures else float(len(figures["problems"]))


def _other_rate(value: float) -> str:
    rate = "higher" if value > 0.1 else "lower"
    return f"the other figures are meaningless under this load; give a {rate} --rate"


WINDOWS = "online requests in the windows"
TOO_FEW = Rule(WINDOWS, EACH, SENT, REQUESTS_MIN, load=True, if_failed=True)
CLIENTS, FILES = "slo", f"slo-{API}"
"""The systems whose batch requests come from clients, and from files."""
FILE_RULES = (
    Rule("P99 TTFT / that of slo", FILES, TTFT_P99, most=1.1, over=CLIENTS, optional=True),
    Rule(
        *("P99 gap between tokens / that of slo", FILES, GAP_P99),
        most=1.1,
        over=CLIENTS,
        optional=True,
    ),
    Rule("processed tokens / those of slo", FILES, PROCESSED, 0.95, over=CLIENTS, optional=True),
)
COSERVE = Rules(
    base="online-only",
    load=(
        Rule(
            *("online tokens / all that eager processes", "online-only", PROCESSED, 0.43, 0.47),
            over="eager",
            load=True,
            remedy=lambda share: (
                "the other figures are meaningless under this load; give a --rate"
                f" {0.45 / share:.2f} times as high"
                if share
                else ""
            ),
        ),
        TOO_FEW,
        Rule("recomputed share of tokens", "eager", at("recomputed_share"), most=0.02, load=True),
    ),
    paced=(
        Rule("processed tokens", "slo", PROCESSED, 1.5, over="online-only"),
        Rule("P99 TTFT", "slo", TTFT_P99, most=1.15, over="online-only", budget=True),
        Rule("P99 gap between tokens", "slo", GAP_P99, most=1.1, over="online-only"),
        Rule("processed tokens", "slo-full", PROCESSED, 1.7, over="online-only"),
        Rule("P99 TTFT", "slo-full", TTFT_P99, most=1.25, over="online-only", budget=True),
        Rule("P99 gap between tokens", "slo-full", GAP_P99, most=1.1, over="online-only"),
        Rule(
            *("median gap between tokens", "slo", at("inter_token_s", "p50")),
            most=2.7,
            over="online-only",
        ),
        Rule(
            *("mean normalized latency", "slo", at("normalized_latency_s", "mean")),
            most=2.2,
            over="online-only",
        ),
        Rule("P99 TTFT / that of slo", PRIORITY, TTFT_P99, 1.25, over="slo"),
        *FILE_RULES,
    ),
    unpaced=(Rule("processed tokens", "slo", PROCESSED, 1.4, over="online-only"), *FILE_RULES),
    notes=_target_notes,
    more=_token_shares,
)
"""Online requests must be 43 to 47 % of the tokens that `eager` processes (ConServe §6)."""
BATCH_API = Rules(
    base="online-only",
    load=(TOO_FEW,),
    paced=(
        Rule("processed tokens", FILES, PROCESSED, 1.3, over="online-only"),
        Rule("P99 TTFT", FILES, TTFT_P99, most=1.15, over="online-only", budget=True),
        Rule("P99 gap between tokens", FILES, GAP_P99, most=1.1, over="online-only"),
    ),
)
RECOMPUTED = at("recomputed_share")
PHASES = Rules(
    base="slo",
    load=(
        TOO_FEW,
        Rule("recomputed share of tokens", "bros", RECOMPUTED, 0.01, load=True, optional=True),
    ),
    paced=tuple(
        Rule(metric, name, value, most=most, over=base, optional=True)
        for name, base in (("conserve-host", "conserve"), ("bros-host-all", "bros"))
        for metric, value, most in (
            ("recomputed share / that without host memory", RECOMPUTED, 0.1),
            ("P99 TTFT / that without", TTFT_P99, 1.1),
            ("P99 gap between tokens / that without", GAP_P99, 1.1),
        )
    ),
)
"""Host memory saves recomputation at no cost for online requests."""
REALTIME = Rules(
    base="fcfs",
    load=(
        Rule(
            *("attainment of first tokens", "fcfs", TTFT_MET, 0.04, 0.1),
            load=True,
            remedy=_other_rate,
            aim=", at best 0.05-0.08",
        ),
        TOO_FEW,
    ),
    paced=(
        Rule("attainment of first tokens", "slo", TTFT_MET, 0.95),
        Rule("attainment of time per token", "slo", TPOT_MET, 0.95),
        Rule("attainment of first tokens / that of fcfs", "slo", TTFT_MET, 10, over="fcfs"),
        Rule("mean normalized latency", "slo", NORMALIZED, most=0.4, over="fcfs"),
        Rule("batch requests a second", "slo", BATCH_RATE, 0.85, over="fcfs"),
    ),
    notes=_rival_notes,
)
"""BROS §7.2. If `fcfs` attains most TTFT targets there is little to gain; if it attains none,
ratios are meaningless."""
FLOOD_RULES = (
    Rule("P99 TTFT", "slo", TTFT_P99, most=1.1, over="online-only", budget=True),
    Rule("longest change of groups [s]", EACH, _longest_change_s, most=30),
    Rule("problems in the logs", EACH, _problems, most=0),
)
FLOOD = Rules(
    base="online-only",
    load=(
        Rule(WINDOWS, EACH, SENT, 200, load=True),
        Rule("merges", EACH, _changes(merge=True), 1, per_round=True, load=True),
        Rule("splits", EACH, _changes(merge=False), 1, per_round=True, load=True),
        Rule("batch requests completed", "slo", at(*BATCH, "completed"), 1, load=True),
    ),
    paced=FLOOD_RULES,
    unpaced=FLOOD_RULES,
)
"""`slo` against the same flood without batch work. Groups must merge and split during it."""
