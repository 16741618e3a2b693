"""What a flood of online requests has to show with offline load behind it. Pure.

`slo` is compared with `online-only`, the same flood without batch work, in the same run.
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
    ttft_bar,
)

BASE, DEFAULT = "online-only", "slo"
REQUESTS_MIN = 200
TTFT_MAX = 1.10
SETTLED_WITHIN_S = 30.0


def judge(systems: Mapping[str, Figures], targets: OnlineTargets, paced: bool) -> dict[str, Any]:
    """The bars as JSON; `systems` by label, such as `slo@A100-14B:2`."""
    named = by_name(systems)
    bars = [*_load_bars(named), *_bars(named, targets)]
    return {
        "base": BASE,
        "targets": asdict(targets),
        "bars": [asdict(one) for one in bars],
        "notes": [*(late_notes(named) if paced else ()), *cut_off_notes(named)],
    }


def _load_bars(named: Mapping[str, Figures]) -> Iterator[Bar]:
    """Whether groups merged and split under a flood, before batch work that went on."""
    for name in named:
        sent = figure_of(named, name, "classes", "online", "sent")
        yield at_least("online requests in the windows", name, sent, REQUESTS_MIN, load=True)
        for what, merge in (("merges", True), ("splits", False)):
            count = _count(named[name], merge)
            yield at_least(what, name, count, len(named[name]["rounds"]), load=True)
    batch = figure_of(named, DEFAULT, "classes", "batch", "completed")
    yield at_least("batch requests completed", DEFAULT, batch, 1, load=True)


def _bars(named: Mapping[str, Figures], targets: OnlineTargets) -> Iterator[Bar]:
    """First tokens, how long changes take, and that no concession was dearer than needed."""
    yield ttft_bar(named, DEFAULT, TTFT_MAX, targets.tpot_s, over=BASE)
    for name, found in named.items():
        longest_s = _longest_s(found)
        yield judged(
            "longest change of groups [s]",
            name,
            f"≤ {SETTLED_WITHIN_S:g}",
            longest_s,
            lambda value: value <= SETTLED_WITHIN_S,
        )
        yield at_most("problems in the logs", name, _problems(found), 0)


def _count(found: Figures, merge: bool) -> float | None:
    changes = found.get("changes")
    return None if changes is None else float(sum(one["merge"] is merge for one in changes))


def _longest_s(found: Figures) -> float | None:
    """None if nothing changed; for ever, if a change has not settled."""
    changes = found.get("changes")
    times_s = [one["settled_s"] for one in changes or ()]
    if None in times_s:
        return float("inf")
    return max(times_s, default=None)


def _problems(found: Figures) -> float | None:
    return None if "problems" not in found else float(len(found["problems"]))
