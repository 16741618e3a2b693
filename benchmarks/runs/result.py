"""The result of a run as JSON: figures by system, ratios between systems."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.co_serving.bars import judge
from benchmarks.co_serving.figures import co_serving_figures
from benchmarks.runs.pairs import pairs
from benchmarks.runs.runner import BenchPlan, RunOutcomes
from benchmarks.stats import Figures, best_p50_s, figures, quotient, ratios
from benchmarks.systems.catalog import device_of, is_reference
from tideserve.load.record import Round

COMPARED = (
    *("ttft_p99_s", "tpot_p50_s", "bubble_share", "bubble_share_arriving"),
    "throughput_tokens_per_s",
)
"""The figures of the steps of an ablation."""


def result_of(plan: BenchPlan, outcomes: RunOutcomes) -> dict[str, Any]:
    """The result of a run. With several cases, `scenarios` has each and `systems` pools them."""
    pooled: dict[str, list[Round]] = {}
    for by_system in outcomes.rounds.values():
        for name, rounds in by_system.items():
            pooled.setdefault(name, []).extend(rounds)
    shared = {"machine": outcomes.machine, "config": _config(plan, outcomes)}
    result = {"scenario": plan.scenario.name} | shared | _compared(plan, pooled)
    if len(outcomes.rounds) > 1:
        result["scenarios"] = {
            case: {"scenario": case} | shared | _compared(plan, by_system)
            for case, by_system in outcomes.rounds.items()
        }
    for name, inspected in outcomes.inspections.items():
        result["systems"].get(name, {}).update(inspected)
    if plan.scenario.steps:
        result["steps"] = {
            part["scenario"]: effects(plan.scenario.steps, part["systems"])
            for part in sections(result)
        }
    if plan.scenario.paired:
        by_load = {part["scenario"]: part["systems"] for part in sections(result)}
        result["pairs"] = pairs(plan, by_load)
    if (beside := plan.scenario.co_serving) is not None:
        # The other loads are informative only.
        judged = result.get("scenarios", {}).get(plan.scenario.name, result)
        targets = beside.load(plan.choice).targets
        paced = plan.deployment.paced is not None
        result["co_serving"] = judge(beside.rules, judged["systems"], targets, paced)
    if sentences := _too_mild(plan, result["systems"]):
        result["too_mild"] = sentences
    if outcomes.unavailable:
        result["unavailable"] = outcomes.unavailable
    return result


def sections(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The sections of a result, each shown as a table."""
    return list(result.get("scenarios", {}).values()) or [result]


def _too_mild(plan: BenchPlan, systems: Mapping[str, Figures]) -> Sequence[str]:
    """A sentence per system whose KV demand stayed below the scenario's minimum.

    Systems with ample memory are left out, as are unpaced systems in a paced run, whose load is
    sized for a slower device.
    """
    return [
        f"{name}: KV demand peaked at {ratio:.3g} × the workers' capacity, less than the"
        f" {plan.scenario.demand_min:g} × that {plan.scenario.name} needs; give a higher --rate"
        " or less --memory"
        for name, figures in systems.items()
        if not is_reference(name)
        and device_of(name) == (plan.deployment.paced or "")
        and (ratio := figures["kv_demand_peak_ratio"]) is not None
        and ratio < plan.scenario.demand_min
    ]


def _compared(plan: BenchPlan, rounds: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    best: dict[str, Mapping[str, float | None]] = {}
    for device in {device_of(name) for name in rounds}:
        own = {name: measured for name, measured in rounds.items() if device_of(name) == device}
        # A system without a memory limit is a reference, not a competitor.
        rivals = {name: measured for name, measured in own.items() if not is_reference(name)}
        best[device] = best_p50_s(rivals or own)
    make: Callable[..., Figures] = figures
    if (beside := plan.scenario.co_serving) is not None:
        load = beside.load(plan.choice)
        make = partial(co_serving_figures, promised=load.targets, window_from_s=load.window_from_s)
    systems = {
        name: make(measured, plan.targets, best[device_of(name)])
        for name, measured in rounds.items()
    }
    return {"systems": systems, "ratios": ratios(systems)}


def _config(plan: BenchPlan, outcomes: RunOutcomes) -> dict[str, Any]:
    deployment = plan.deployment
    return {
        "quick": plan.choice.quick,
        "seed": plan.choice.seed,
        # All options that a simulation needs to generate the same requests.
        "load": asdict(plan.choice),
        "rounds": plan.scenario.round_count(plan.choice),
        "model": deployment.model_name,
        "dtype": deployment.dtype,
        "workers": deployment.workers,
        "memory_bytes": deployment.memory_bytes,
        # Random weights have no file to measure.
        "parameter_share": deployment.parameter_bytes / deployment.memory_bytes or None,
        "paced": deployment.paced,
        "workload": outcomes.statements,
        "systems": outcomes.descriptions,
    }


def effects(steps: Mapping[str, str], systems: Mapping[str, Figures]) -> dict[str, Any]:
    """Rows in the order of `steps` (system by label), by the device whose pace was kept.

    A row has the step's figures over all rounds; `effect` is the ratio of each figure to the
    previous step's, and `effect_range` the minimum and maximum of that ratio over the rounds, since
    rounds of the same number had the same requests. Systems that could not run are left out.
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
