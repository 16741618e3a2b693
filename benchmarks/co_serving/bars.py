"""What co-serving has to show, each bar judged by the figures of a run. Pure.

Every bar but that on recomputed tokens compares two systems of the same run. A run says something
only if its load is right: online requests are to be 43 to 47 % of what `eager` processes, and at
least 300.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.co_serving.judging import (
    Bar,
    Figures,
    OnlineTargets,
    at_least,
    at_most,
    by_name,
    cut_off_notes,
    figure_of,
    judged,
    late_notes,
    ratio_of,
    too_few_requests,
    ttft_bar,
)

SHARE_MIN, SHARE_MAX = 0.43, 0.47
SHARE_AIM = 0.45
RECOMPUTED_MAX = 0.02
TARGET_TOLERANCE = 0.15
"""So far may the targets lie from the P99 of `online-only`, which they stand for."""
BASE, EAGER, PRIORITY, DEFAULT, FULL = "online-only", "eager", "priority", "slo", "slo-full"


def judge(systems: Mapping[str, Figures], targets: OnlineTargets, paced: bool) -> dict[str, Any]:
    """The bars as JSON, with the load's share; `systems` by label, such as `slo@A100-14B:4`."""
    named = by_name(systems)
    bars = [*_load_bars(named), *(_paced_bars(named, targets) if paced else _unpaced_bars(named))]
    return {
        "base": BASE,
        "targets": asdict(targets),
        "online_share_of_eager": _online_share(named),
        "harvested_share": {name: _harvested(named, name) for name in named if name != BASE},
        "bars": [asdict(one) for one in bars],
        "notes": [
            *_target_notes(named, targets),
            *(late_notes(named) if paced else ()),
            *cut_off_notes(named),
        ],
    }


def _load_bars(named: Mapping[str, Figures]) -> Iterator[Bar]:
    """Whether the load is the one that the bars are about."""
    share = _online_share(named)
    remedy = ""
    if share and not SHARE_MIN <= share <= SHARE_MAX:
        remedy = (
            "the other figures say nothing of this load; give a --rate"
            f" {SHARE_AIM / share:.2f} times as high"
        )
    yield judged(
        "online tokens / all that eager processes",
        BASE,
        f"{SHARE_MIN:.2f}-{SHARE_MAX:.2f}",
        share,
        lambda value: SHARE_MIN <= value <= SHARE_MAX,
        load=True,
        remedy=remedy,
    )
    yield from too_few_requests(named)
    again = figure_of(named, EAGER, "recomputed_share")
    yield at_most("recomputed share of tokens", EAGER, again, RECOMPUTED_MAX, load=True)


def _paced_bars(named: Mapping[str, Figures], targets: OnlineTargets) -> Iterator[Bar]:
    """All bars of the default dial, of the full one, and of `priority`."""
    for name, processed_min, ttft_max in ((DEFAULT, 1.5, 1.15), (FULL, 1.7, 1.25)):
        yield at_least(
            "processed tokens", name, _ratio(named, name, "processed_tokens_per_s"), processed_min
        )
        yield ttft_bar(named, name, ttft_max, targets.tpot_s, over=BASE)
        yield at_most(
            "P99 gap between tokens", name, _ratio(named, name, "inter_token_s", "p99"), 1.10
        )
    median = _ratio(named, DEFAULT, "inter_token_s", "p50")
    yield at_most("median gap between tokens", DEFAULT, median, 2.7)
    normalized = _ratio(named, DEFAULT, "normalized_latency_s", "mean")
    yield at_most("mean normalized latency", DEFAULT, normalized, 2.2)
    yield _priority_bar(named)


def _unpaced_bars(named: Mapping[str, Figures]) -> Iterator[Bar]:
    """On this machine's own time only the tokens have a bar."""
    value = _ratio(named, DEFAULT, "processed_tokens_per_s")
    yield at_least("processed tokens", DEFAULT, value, 1.4)


def _priority_bar(named: Mapping[str, Figures]) -> Bar:
    """`priority` with the chunk that suits it best, against the default dial."""
    chunks = [name for name in named if name == PRIORITY or name.startswith(f"{PRIORITY}-")]
    ratios = {name: _ratio(named, name, "ttft_s", "p99", over=DEFAULT) for name in chunks}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    best = min(known, key=lambda name: known[name], default=PRIORITY)
    return at_least("P99 TTFT / that of slo", best, known.get(best), 1.25)


def _target_notes(named: Mapping[str, Figures], targets: OnlineTargets) -> Iterator[str]:
    """Sentences about targets that are not the P99 of `online-only`, which they are to be."""
    for what, target_s, figure in (
        ("first token", targets.ttft_s, "ttft_s"),
        ("gap between tokens", targets.tpot_s, "inter_token_s"),
    ):
        measured_s = figure_of(named, BASE, figure, "p99")
        if measured_s and abs(target_s / measured_s - 1) > TARGET_TOLERANCE:
            yield (
                f"the target of a {what} is {target_s * 1e3:,.0f} ms; the P99 of {BASE}, for which"
                f" it stands, was {measured_s * 1e3:,.0f} ms"
            )


def _online_share(named: Mapping[str, Figures]) -> float | None:
    """What `online-only` processes, as a share of what `eager` does."""
    return _ratio(named, BASE, "processed_tokens_per_s", over=EAGER)


def _harvested(named: Mapping[str, Figures], name: str) -> float | None:
    """What a system processes more than `online-only`, as a share of what `eager` does."""
    key = "processed_tokens_per_s"
    base, most, own = (figure_of(named, one, key) for one in (BASE, EAGER, name))
    if base is None or most is None or own is None or most == base:
        return None
    return (own - base) / (most - base)


def _ratio(named: Mapping[str, Figures], name: str, *keys: str, over: str = BASE) -> float | None:
    return ratio_of(named, name, *keys, over=over)
