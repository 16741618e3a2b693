"""Simulations of KunServe's figures: bursts by lengths and policy, a long run, an endless burst."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tideserve.cli.papers.runs import Figures, PageRun, run_example

EXAMPLE = "drop-a100"
DROP, RECOMPUTE, MIGRATE, STATIC = "drop", "recompute", "migrate", "static-pipeline"
POLICIES = (DROP, RECOMPUTE, MIGRATE, STATIC)
BASELINES: Mapping[str, str] = {
    RECOMPUTE: "vLLM (DP)",
    MIGRATE: "Llumnix",
    STATIC: "vLLM (PP)",
}
"""The paper's systems, by the policy that stands for each."""
KEPT = "drop without restore"
INSTANCES, FEWER = 8, 4
SHAREGPT, BURSTGPT, LONGBENCH = "ShareGPT", "BurstGPT", "LongBench"
LENGTHS: Mapping[str, Mapping[str, Any]] = {
    SHAREGPT: {
        "prompt": {"mean": 1660, "cv": 1.0, "most": 4000},
        "output": {"mean": 373, "cv": 1.0, "most": 2000},
    },
    BURSTGPT: {
        "prompt": {"mean": 642, "cv": 1.0, "most": 4000},
        "output": {"mean": 262, "cv": 1.0, "most": 2000},
    },
    LONGBENCH: {
        "prompt": {"mean": 5900, "cv": 0.6, "most": 16000},
        "output": {"mean": 499, "cv": 0.6, "most": 2000},
    },
}
"""Means of KunServe §5.1."""
RATES: Mapping[str, tuple[float, float]] = {
    SHAREGPT: (5, 20),
    BURSTGPT: (12, 48),
    LONGBENCH: (1.6, 6),
}
"""Requests/s before and during the burst, which overflow the memory of eight instances."""
BURST_S, CV = (45.0, 75.0), 1.5
LONG_S, WAVE_S, CALM_S = 640.0, 30.0, 200.0
"""The long run: waves with the rate of the burst, each after a calm time."""
ENDLESS_S, ENDLESS_BEGIN_S, ENDLESS_RATE = 240.0, 60.0, 18
"""The endless burst: more requests/s than the devices compute."""
NEVER_S = 3600


@dataclass(frozen=True, slots=True)
class PaperRuns:
    """Figures by policy: of a burst by set of lengths, on fewer instances, long, and endless."""

    bursts: Mapping[str, Mapping[str, Figures]]
    fewer: Mapping[str, Figures]
    long: Mapping[str, Figures]
    endless: Mapping[str, Figures]


def run_all(run: PageRun) -> PaperRuns:
    """Run the simulations."""
    compared = {"overload_policy": list(POLICIES)}
    loads = {name: _burst(name, INSTANCES) for name in LENGTHS}
    fewer = {"instances": FEWER, "workload": _burst(SHAREGPT, FEWER)}
    return PaperRuns(
        run_example(EXAMPLE, run, compared | {"loads": loads}),
        run_example(EXAMPLE, run, compared | fewer)[""],
        _long(run),
        _endless(run),
    )


def _burst(name: str, instances: int) -> dict[str, Any]:
    """A burst with the rates of a set, scaled to the number of instances."""
    rate_per_s, burst_rate_per_s = (rate * instances / INSTANCES for rate in RATES[name])
    return {
        "kind": "burst",
        "rate_per_s": rate_per_s,
        "burst_rate_per_s": burst_rate_per_s,
        "start_s": BURST_S[0],
        "end_s": BURST_S[1],
        "cv": CV,
        **LENGTHS[name],
    }


def _long(run: PageRun) -> dict[str, Figures]:
    """Several overloads in a row, each policy, and `drop` that never splits its groups."""
    calm, wave = RATES[BURSTGPT]
    waves = {
        "kind": "on_off",
        "on_rate_per_s": calm,
        "off_rate_per_s": wave,
        "on_s": CALM_S,
        "off_s": WAVE_S,
        **LENGTHS[BURSTGPT],
    }
    load = {"workload": waves, "duration_s": LONG_S}
    kept = load | {"overload_policy": DROP, "monitor": {"split_dwell_s": NEVER_S}}
    return {
        **run_example(EXAMPLE, run, load | {"overload_policy": list(POLICIES)})[""],
        KEPT: run_example(EXAMPLE, run, kept)[""][DROP],
    }


def _endless(run: PageRun) -> Mapping[str, Figures]:
    """A burst that does not end."""
    burst = {
        "kind": "burst",
        "rate_per_s": RATES[SHAREGPT][0],
        "burst_rate_per_s": ENDLESS_RATE,
        "start_s": ENDLESS_BEGIN_S,
        "end_s": ENDLESS_S,
        **LENGTHS[SHAREGPT],
    }
    load = {"workload": burst, "duration_s": ENDLESS_S}
    return run_example(EXAMPLE, run, load | {"overload_policy": [DROP, RECOMPUTE]})[""]


def over_time(figures: Figures, key: str) -> list[tuple[float, float]]:
    """Samples of the KV cache, as shares of the undropped capacity."""
    return [(sample["time_s"], sample[key]) for sample in figures["kv_over_time"]]


def windows(figures: Figures, key: str) -> list[tuple[float, float]]:
    """A figure of each window at its end; windows without requests are left out."""
    pairs = [(window["time_s"], window[key]) for window in figures["over_time"]]
    return [(time_s, value) for time_s, value in pairs if value is not None]


def full_s(figures: Figures, start_s: float) -> float | None:
    """Time after `start_s` from which on demand exceeds the present capacity; None if never."""
    demands = over_time(figures, "demand_share")
    capacities = over_time(figures, "capacity_share")
    pairs = list(zip(demands, capacities, strict=True))
    fits = [at_s for (at_s, demand), (_, capacity) in pairs if demand <= max(1.0, capacity)]
    full = [
        at_s
        for (at_s, demand), (_, capacity) in pairs
        if at_s > start_s and demand > max(1.0, capacity)
    ]
    before = [at_s for at_s in fits if full and at_s < max(full)]
    later = [at_s for at_s in full if at_s > max(before, default=start_s)]
    return min(later) - start_s if later else None
