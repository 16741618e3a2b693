"""What deadlines of real-time requests beside best-effort ones have to show (BROS §7.2). Pure.

All bars compare with `fcfs` in the same run, at a load of which it attains 5 to 8 % of the targets
of first tokens: where it attains many there is little to gain, where it attains none no ratio says
anything. A request without a token has missed all of its targets.
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
)

BASE, PRIORITY, BROS, DEFAULT = "fcfs", "priority", "bros", "slo"
ATTAINED_MIN, ATTAINED_MAX = 0.04, 0.10
"""Outside these the load is another one than the bars are about; 5 to 8 % is aimed at."""
AIM = "0.05-0.08"
ATTAINED = ("classes", "online", "slo_attainment")
NORMALIZED = ("classes", "online", "normalized_latency_s", "mean")
BATCH_THROUGHPUT = ("classes", "batch", "throughput_requests_per_s")


def judge(systems: Mapping[str, Figures], targets: OnlineTargets, paced: bool) -> dict[str, Any]:
    """The bars as JSON; `systems` by label, such as `slo@A100-40G-7B:4`.

    The load of an unpaced run is an estimate, so its figures have no bars.
    """
    named = by_name(systems)
    bars = [*_load_bars(named), *_bars(named)] if paced else []
    return {
        "base": BASE,
        "targets": asdict(targets),
        "bars": [asdict(one) for one in bars],
        "notes": [
            *_rival_notes(named),
            *(late_notes(named) if paced else ()),
            *cut_off_notes(named),
        ],
    }


def _load_bars(named: Mapping[str, Figures]) -> Iterator[Bar]:
    """Whether the load is the one that the bars are about."""
    share = figure_of(named, BASE, *ATTAINED, "ttft")
    remedy = ""
    if share is not None and not ATTAINED_MIN <= share <= ATTAINED_MAX:
        rate = "higher" if share > ATTAINED_MAX else "lower"
        remedy = f"the other figures say nothing of this load; give a {rate} --rate"
    yield judged(
        "attainment of first tokens",
        BASE,
        f"{ATTAINED_MIN:.2f}-{ATTAINED_MAX:.2f}, at best {AIM}",
        share,
        lambda value: ATTAINED_MIN <= value <= ATTAINED_MAX,
        load=True,
        remedy=remedy,
    )
    yield from too_few_requests(named)


def _bars(named: Mapping[str, Figures]) -> Iterator[Bar]:
    """What the default has to show against `fcfs`."""
    for metric, what in (("ttft", "first tokens"), ("tpot", "time per token")):
        attained = figure_of(named, DEFAULT, *ATTAINED, metric)
        yield at_least(f"attainment of {what}", DEFAULT, attained, 0.95)
    times = ratio_of(named, DEFAULT, *ATTAINED, "ttft", over=BASE)
    yield at_least("attainment of first tokens / that of fcfs", DEFAULT, times, 10)
    normalized = ratio_of(named, DEFAULT, *NORMALIZED, over=BASE)
    yield at_most("mean normalized latency", DEFAULT, normalized, 0.40)
    batch = ratio_of(named, DEFAULT, *BATCH_THROUGHPUT, over=BASE)
    yield at_least("batch requests a second", DEFAULT, batch, 0.85)


def _rival_notes(named: Mapping[str, Figures]) -> Iterator[str]:
    """Where the default stands to `priority` at the chunk that suits it best, and to BROS."""
    chunks = [name for name in named if name == PRIORITY or name.startswith(f"{PRIORITY}-")]
    latencies = {name: figure_of(named, name, *NORMALIZED) for name in chunks}
    known = {name: value for name, value in latencies.items() if value is not None}
    best = min(known, key=lambda name: known[name], default=None)
    for rival in (best, BROS):
        if rival is None or rival not in named or DEFAULT not in named:
            continue
        told = []
        for what, keys in (
            ("attainment of first tokens", (*ATTAINED, "ttft")),
            ("of times per token", (*ATTAINED, "tpot")),
            ("normalized latency", NORMALIZED),
            ("batch requests a second", BATCH_THROUGHPUT),
        ):
            times = ratio_of(named, DEFAULT, *keys, over=rival)
            told.append(f"{what} {'–' if times is None else f'{times:.2f} ×'}")
        yield f"{DEFAULT} against {rival}: {', '.join(told)}"
