"""The change that each step of an ablation makes against the step before it. Pure."""

from collections.abc import Mapping
from typing import Any

from benchmarks.stats import quotient

Figures = Mapping[str, Any]
COMPARED = (
    *("ttft_p99_s", "tpot_p50_s", "bubble_share", "bubble_share_arriving"),
    "throughput_tokens_per_s",
)


def effects(steps: Mapping[str, str], systems: Mapping[str, Figures]) -> dict[str, Any]:
    """Rows in the order of `steps` (system by label), by the device that was paced to.

    A row has the step's figures over all rounds; `effect` is each of them as a multiple of the
    step's before, and `effect_range` the least and the most of that multiple in any round: rounds
    of the same number had the same requests. A system that could not run is left out.
    """
    by_device: dict[str, Any] = {}
    for paced in sorted({name.partition("@")[2] for name in systems}):
        rows: list[dict[str, Any]] = []
        before: Figures | None = None
        for label, system in steps.items():
            name = f"{system}@{paced}" if paced else system
            if name in systems:
                rows.append({"step": label, "system": name, **_row(systems[name], before)})
                before = systems[name]
        if rows:
            by_device[paced or "unpaced"] = rows
    return by_device


def _row(own: Figures, before: Figures | None) -> dict[str, Any]:
    values = _values(own)
    row = values | {"bubble_s": own["bubble_s"], "busy_s": own["busy_s"]}
    if before is None:
        return row
    earlier = _values(before)
    rounds = list(zip(own["rounds"], before["rounds"], strict=False))
    by_round = {key: [quotient(a[key], b[key]) for a, b in rounds] for key in COMPARED}
    known = {key: [x for x in by_round[key] if x is not None] for key in COMPARED}
    return row | {
        "effect": {key: quotient(values[key], earlier[key]) for key in COMPARED},
        "effect_range": {key: [min(xs), max(xs)] if xs else None for key, xs in known.items()},
    }


def _values(figures: Figures) -> dict[str, float | None]:
    pooled = {"ttft_p99_s": figures["ttft_s"]["p99"], "tpot_p50_s": figures["tpot_s"]["p50"]}
    return pooled | {key: figures[key] for key in COMPARED if key not in pooled}
