"""The first system against the others, load by load: each in its faster dtype, then in float32.

A system may be in a run in two dtypes. Its faster one is that with the higher throughput, by the
geometric mean over the loads that were measured in both, whatever the rule of the run has chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean
from typing import Any

from benchmarks.runs.runner import BenchPlan
from benchmarks.systems.catalog import dtype_of, without_dtype

LATENCIES = (("ttft_s", "ttft"), ("tpot_s", "tpot"))
PERCENTILES = ("p50", "p95")
THROUGHPUT = "throughput_tokens_per_s"

ByLoad = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Figures by load, then by system."""
Variants = Mapping[str, Mapping[str, str]]
"""Labels in the figures by system, then by dtype."""


def pairs(plan: BenchPlan, figures: ByLoad) -> dict[str, Any]:
    """The tables; {} for a single system.

    `fastest` compares systems in their faster dtypes, `float32` those that were measured in that.
    Each has, by load and other system, the first system's figure over the other's.
    """
    variants = _variants(plan, figures)
    if len(variants) < 2:
        return {}
    faster = {base: _faster(found, figures) for base, found in variants.items()}
    dtypes = {base: next(iter(found)) for base, found in faster.items()}
    second = plan.scenario.second_dtype
    both = {base: found for base, found in variants.items() if second in found}
    tables = {"fastest": _table(plan, figures, variants, dtypes)}
    if second is not None and len(both) > 1 and set(dtypes.values()) != {second}:
        in_second = {base: {second: found[second]} for base, found in both.items()}
        tables[second] = _table(plan, figures, in_second, dict.fromkeys(both, second))
    return {"rule_dtype": plan.deployment.dtype, "throughput_by_dtype": faster, "tables": tables}


def _variants(plan: BenchPlan, figures: ByLoad) -> Variants:
    measured = {label for found in figures.values() for label in found}
    variants: dict[str, dict[str, str]] = {}
    for name in plan.system_names:
        label = name.partition("=")[0]
        if label in measured:
            base = label if "=" in name else without_dtype(name)
            variants.setdefault(base, {})[dtype_of(name) or plan.deployment.dtype] = label
    return variants


def _faster(found: Mapping[str, str], figures: ByLoad) -> dict[str, float | None]:
    """Throughput by dtype, the highest first; None without a load in which all have one."""
    rates: dict[str, list[float]] = {dtype: [] for dtype in found}
    for systems in figures.values():
        of_load = [systems.get(label, {}).get(THROUGHPUT) or 0.0 for label in found.values()]
        if all(of_load):
            for dtype, rate in zip(found, of_load, strict=True):
                rates[dtype].append(rate)
    means = {dtype: geometric_mean(one) if one else None for dtype, one in rates.items()}
    return dict(sorted(means.items(), key=lambda item: -(item[1] or 0.0)))


def _table(
    plan: BenchPlan, figures: ByLoad, variants: Variants, dtypes: Mapping[str, str]
) -> dict[str, Any]:
    """Ratios of the first system to the others by load; those not measured are left out."""
    first, *others = variants
    reads = {case.name for case in plan.scenario.cases(plan.choice) if case.reads_weights}
    loads: dict[str, Any] = {}
    for load, systems in figures.items():
        chosen = {base: _of_load(variants[base], dtypes[base], systems) for base in variants}
        ours = systems.get(chosen[first], {})
        row = {
            other: _ratios(ours, systems[chosen[other]])
            for other in others
            if ours and chosen[other] in systems
        }
        if row and load in reads:
            row["weight_bytes_per_s"] = {
                base: _weight_bytes_per_s(plan, _dtype_in(variants[base], label), systems[label])
                for base, label in chosen.items()
                if label in systems
            }
        if row:
            loads[load] = row
    return {"dtypes": dict(dtypes), "loads": loads}


def _of_load(found: Mapping[str, str], dtype: str, systems: Mapping[str, Any]) -> str:
    """The label in that dtype, or in another one if the load was measured in that alone."""
    return next((one for one in (found[dtype], *found.values()) if one in systems), found[dtype])


def _dtype_in(found: Mapping[str, str], label: str) -> str:
    return next(dtype for dtype, one in found.items() if one == label)


def _ratios(ours: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"throughput": _ratio(ours[THROUGHPUT], other[THROUGHPUT])}
    found["throughput_by_round"] = [
        _ratio(one[THROUGHPUT], two[THROUGHPUT])
        for one, two in zip(ours["rounds"], other["rounds"], strict=False)
    ]
    for metric, name in LATENCIES:
        for percentile in PERCENTILES:
            value = _ratio(ours[metric][percentile], other[metric][percentile])
            found[f"{name}_{percentile}"] = value
    return found


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _weight_bytes_per_s(plan: BenchPlan, dtype: str, system: Mapping[str, Any]) -> float | None:
    """What an engine reads of its weights: all of them for each token of a request."""
    parameter_bytes = replace(plan.deployment, dtype=dtype).parameter_bytes
    return _ratio(parameter_bytes or None, system["tpot_s"]["p50"])


def faster_than_chosen(found: Mapping[str, Any]) -> Sequence[str]:
    """A sentence for each system that was faster in another dtype than the rule has chosen."""
    if not found:
        return []
    chosen = found["rule_dtype"]
    return [
        f"{base} was faster in {next(iter(rates))} than in {chosen}, so it is compared in"
        f" {next(iter(rates))}"
        for base, rates in found["throughput_by_dtype"].items()
        if chosen in rates and next(iter(rates)) != chosen
    ]
