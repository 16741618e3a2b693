"""Ratios of the first system to the others per load: in each system's faster dtype and in float32.

A run may measure a system in two dtypes. The faster dtype has the higher throughput, as geometric
mean over the loads measured in both, regardless of the dtype that the run chose by rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean
from typing import Any

from benchmarks.runs.runner import BenchPlan
from benchmarks.stats import quotient
from benchmarks.systems.catalog import dtype_of, without_dtype

THROUGHPUT = "throughput_tokens_per_s"
ByLoad = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Figures by load, then by system."""
Variants = Mapping[str, Mapping[str, str]]
"""Labels of the figures by system, then by dtype."""


def pairs(plan: BenchPlan, figures: ByLoad) -> dict[str, Any]:
    """The tables of ratios; {} for a single system.

    `fastest` compares systems in their faster dtypes, `float32` the systems measured in float32.
    Each has, by load and other system, the ratio of the first system's figure to the other's.
    """
    variants = _variants(plan, figures)
    if len(variants) < 2:
        return {}
    rates = {base: _rates(labels, figures) for base, labels in variants.items()}
    dtypes = {base: next(iter(by_dtype)) for base, by_dtype in rates.items()}
    second = plan.scenario.second_dtype
    tables = {"fastest": _table(plan, figures, variants, dtypes)}
    # If every system is fastest in the second dtype, both tables would be equal.
    if second is not None and set(dtypes.values()) != {second}:
        both = {
            base: {second: labels[second]} for base, labels in variants.items() if second in labels
        }
        if len(both) > 1:
            tables[second] = _table(plan, figures, both, dict.fromkeys(both, second))
    return {"rule_dtype": plan.deployment.dtype, "throughput_by_dtype": rates, "tables": tables}


def _variants(plan: BenchPlan, figures: ByLoad) -> Variants:
    measured = {label for systems in figures.values() for label in systems}
    variants: dict[str, dict[str, str]] = {}
    for name in plan.system_names:
        label = name.partition("=")[0]
        if label in measured:
            base = label if "=" in name else without_dtype(name)
            variants.setdefault(base, {})[dtype_of(name) or plan.deployment.dtype] = label
    return variants


def _rates(labels: Mapping[str, str], figures: ByLoad) -> dict[str, float | None]:
    """Throughput by dtype, highest first; None without a load measured in all dtypes."""
    rates: dict[str, list[float]] = {dtype: [] for dtype in labels}
    for systems in figures.values():
        of_load = [systems.get(label, {}).get(THROUGHPUT) or 0.0 for label in labels.values()]
        if all(of_load):
            for dtype, rate in zip(labels, of_load, strict=True):
                rates[dtype].append(rate)
    means = {dtype: geometric_mean(rate) if rate else None for dtype, rate in rates.items()}
    return dict(sorted(means.items(), key=lambda item: -(item[1] or 0.0)))


def _table(
    plan: BenchPlan, figures: ByLoad, variants: Variants, dtypes: Mapping[str, str]
) -> dict[str, Any]:
    """Ratios of the first system to the others by load; loads not measured are left out."""
    reads = {case.name for case in plan.scenario.cases(plan.choice) if case.reads_weights}
    loads: dict[str, Any] = {}
    for load, systems in figures.items():
        chosen: dict[str, tuple[str, Mapping[str, Any]]] = {}
        for base, labels in variants.items():
            # Use the chosen dtype, or another if the load was measured only in that.
            for dtype in (dtypes[base], *labels):
                if labels[dtype] in systems:
                    chosen[base] = (dtype, systems[labels[dtype]])
                    break
        first, *others = variants
        if first not in chosen:
            continue
        row = {
            other: _ratios(chosen[first][1], chosen[other][1])
            for other in others
            if other in chosen
        }
        if row and load in reads:
            row["weight_bytes_per_s"] = {
                # A decode step reads all weights once per token of a request.
                base: quotient(
                    replace(plan.deployment, dtype=dtype).parameter_bytes or None,
                    system_figures["tpot_s"]["p50"],
                )
                for base, (dtype, system_figures) in chosen.items()
            }
        if row:
            loads[load] = row
    return {"dtypes": dict(dtypes), "loads": loads}


def _ratios(ours: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    rounds = zip(ours["rounds"], other["rounds"], strict=False)
    return {
        "throughput": quotient(ours[THROUGHPUT], other[THROUGHPUT]),
        "throughput_by_round": [quotient(a[THROUGHPUT], b[THROUGHPUT]) for a, b in rounds],
        **{
            f"{name}_{percentile}": quotient(
                ours[f"{name}_s"][percentile], other[f"{name}_s"][percentile]
            )
            for name in ("ttft", "tpot")
            for percentile in ("p50", "p95")
        },
    }


def faster_than_chosen(compared: Mapping[str, Any]) -> Sequence[str]:
    """A sentence per system that was faster in another dtype than the rule chose."""
    chosen = compared.get("rule_dtype")
    fastest = {
        base: next(iter(rates))
        for base, rates in compared.get("throughput_by_dtype", {}).items()
        if chosen in rates
    }
    return [
        f"{base} was faster in {dtype} than in {chosen}, so it is compared in {dtype}"
        for base, dtype in fastest.items()
        if dtype != chosen
    ]
