"""What each step of an ablation changes against the step before it. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]
EFFECTS = (
    *("ttft_p99_s", "tpot_p50_s", "bubble_share", "bubble_share_arriving"),
    "throughput_tokens_per_s",
)
"""The figures of a round whose changes are reported."""
OWN_TIME = "unpaced"


def effects(steps: Mapping[str, str], systems: Mapping[str, Figures]) -> dict[str, Any]:
    """Rows in the order of `steps` (system by label), by the device that was paced to.

    A row has the step's figures over all rounds; `effect` is each of them as a multiple of the
    step's before, and `effect_range` the least and the most of that multiple in any round: rounds
    of the same number had the same requests. A system that could not run is left out.
    """
    found: dict[str, Any] = {}
    for paced in sorted({name.partition("@")[2] for name in systems}):
        rows: list[dict[str, Any]] = []
        before: Figures | None = None
        for label, system in steps.items():
            name = f"{system}@{paced}" if paced else system
            if name not in systems:
                continue
            rows.append(_row(label, name, systems[name], before))
            before = systems[name]
        if rows:
            found[paced or OWN_TIME] = rows
    return found


def _row(label: str, name: str, own: Figures, before: Figures | None) -> dict[str, Any]:
    values = _values(own)
    row = {
        "step": label,
        "system": name,
        **values,
        "bubble_s": own["bubble_s"],
        "busy_s": own["busy_s"],
    }
    if before is None:
        return row
    earlier = _values(before)
    by_round = [
        {key: _ratio(one[key], other[key]) for key in EFFECTS}
        for one, other in zip(own["rounds"], before["rounds"], strict=False)
    ]
    return row | {
        "effect": {key: _ratio(values[key], earlier[key]) for key in EFFECTS},
        "effect_range": {key: _range([one[key] for one in by_round]) for key in EFFECTS},
    }


def _values(figures: Figures) -> dict[str, float | None]:
    return {
        "ttft_p99_s": figures["ttft_s"]["p99"],
        "tpot_p50_s": figures["tpot_s"]["p50"],
        "bubble_share": figures["bubble_share"],
        "bubble_share_arriving": figures["bubble_share_arriving"],
        "throughput_tokens_per_s": figures["throughput_tokens_per_s"],
    }


def _ratio(value: float | None, earlier: float | None) -> float | None:
    return value / earlier if value is not None and earlier else None


def _range(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None
