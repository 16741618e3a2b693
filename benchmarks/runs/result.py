"""The result of a run as JSON: figures by system, ratios between systems."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.ablation import effects
from benchmarks.co_serving.figures import co_serving_figures
from benchmarks.runs.pairs import pairs
from benchmarks.runs.runner import BenchPlan, RunOutcomes
from benchmarks.stats import Figures, best_p50_s, figures, ratios
from benchmarks.systems.catalog import device_of, is_reference
from tideserve.load.record import Round


def result_of(plan: BenchPlan, outcomes: RunOutcomes) -> dict[str, Any]:
    """The whole result. With several cases, `scenarios` holds each and `systems` pools them."""
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
    for name, found in outcomes.inspections.items():
        result["systems"].get(name, {}).update(found)
    if plan.scenario.steps:
        result["steps"] = {
            part["scenario"]: effects(plan.scenario.steps, part["systems"])
            for part in sections(result)
        }
    if plan.scenario.paired:
        by_load = {part["scenario"]: part["systems"] for part in sections(result)}
        result["pairs"] = pairs(plan, by_load)
    if (beside := plan.scenario.co_serving) is not None:
        # The other loads are there to be looked at.
        judged = result.get("scenarios", {}).get(plan.scenario.name, result)
        targets = beside.load(plan.choice).targets
        result["co_serving"] = beside.judge(
            judged["systems"], targets, plan.deployment.paced is not None
        )
    if sentences := _too_mild(plan, result["systems"]):
        result["too_mild"] = sentences
    if outcomes.unavailable:
        result["unavailable"] = outcomes.unavailable
    return result


def sections(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The parts of a result that are shown as a table each."""
    return list(result.get("scenarios", {}).values()) or [result]


def _too_mild(plan: BenchPlan, systems: Mapping[str, Figures]) -> Sequence[str]:
    """A sentence for each system on which the load was milder than the scenario intends.

    Systems with ample memory are left out, and so are unpaced systems in a paced run, whose load is
    for a slower device.
    """
    return [
        f"{name}: KV demand came to {ratio:.3g} × what the workers hold, less than the"
        f" {plan.scenario.demand_min:g} × that {plan.scenario.name} is about; give a higher --rate"
        " or less --memory"
        for name, found in systems.items()
        if not is_reference(name)
        and device_of(name) == (plan.deployment.paced or "")
        and (ratio := found["kv_demand_peak_ratio"]) is not None
        and ratio < plan.scenario.demand_min
    ]


def _compared(plan: BenchPlan, rounds: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    best: dict[str, Mapping[str, float | None]] = {}
    for device in {device_of(name) for name in rounds}:
        own = {name: found for name, found in rounds.items() if device_of(name) == device}
        # A system without a memory limit is a yardstick, not a competitor.
        rivals = {name: found for name, found in own.items() if not is_reference(name)}
        best[device] = best_p50_s(rivals or own)
    make: Callable[..., Figures] = figures
    if (beside := plan.scenario.co_serving) is not None:
        load = beside.load(plan.choice)
        make = partial(co_serving_figures, promised=load.targets, window_from_s=load.window_from_s)
    systems = {
        name: make(found, plan.targets, best[device_of(name)]) for name, found in rounds.items()
    }
    return {"systems": systems, "ratios": ratios(systems)}


def _config(plan: BenchPlan, outcomes: RunOutcomes) -> dict[str, Any]:
    deployment = plan.deployment
    return {
        "quick": plan.choice.quick,
        "seed": plan.choice.seed,
        # Everything that a simulation needs to make the same requests.
        "load": asdict(plan.choice),
        "rounds": plan.scenario.rounds(plan.choice.quick),
        "model": deployment.model_name,
        "dtype": deployment.dtype,
        "workers": deployment.workers,
        "memory_bytes": deployment.memory_bytes,
        # Made-up weights have no file that tells their size.
        "parameter_share": deployment.parameter_bytes / deployment.memory_bytes or None,
        "paced": deployment.paced,
        "workload": outcomes.statements,
        "systems": outcomes.descriptions,
    }
