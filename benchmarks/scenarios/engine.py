"""`engine`: how much longer iterations of several shapes take than their matrix products alone."""

from collections.abc import Mapping
from typing import Any

from benchmarks.probes.probe import Probe, run_probe
from benchmarks.scenarios.scenario import LoadChoice, Trial, TrialVerdict
from benchmarks.systems.system import Deployment, Say

GIB = 1 << 30
ROUNDS, QUICK_ROUNDS = 25, 7


def run(deployment: Deployment, choice: LoadChoice, line: Say, doing: Say) -> TrialVerdict:
    """Measure one engine of one thread. Raises SystemUnavailable."""
    probe = Probe(
        "engine",
        "iterations beside their products",
        "benchmarks.probes.iteration",
        (
            *("--model-dir", str(deployment.model_dir), "--dtype", deployment.dtype),
            *("--memory-gib", str(deployment.memory_bytes / GIB)),
            *("--rounds", str(QUICK_ROUNDS if choice.quick else ROUNDS)),
        ),
    )
    doing(probe.title)
    figures = run_probe(probe)
    return TrialVerdict(figures, rows(figures), ())


def rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures for people."""
    weights = "in panels" if figures["panels"] else "row-major"
    found = [
        ("weights", f"{figures['dtype']}, {weights}"),
        ("products of many rows", f"{figures['operations_per_s'] / 1e9:,.0f} Gflop/s"),
        ("reading memory", f"{figures['read_bytes_per_s'] / GIB:,.1f} GiB/s"),
    ]
    for one in figures["shapes"]:
        iteration_ms, products_ms = 1e3 * one["iteration_s"], 1e3 * one["products_s"]
        found.append(
            (
                one["shape"],
                f"{iteration_ms:,.1f} ms; its products {products_ms:,.1f} ms:"
                f" {one['over_products']:.2f} x; with the floor of attention,"
                f" {1e3 * one['attention_floor_s']:,.1f} ms: {one['over_floor']:.2f} x",
            )
        )
    return found


TRIAL = Trial(
    name="engine",
    summary="how much longer an iteration takes than its matrix products alone",
    memory="2GiB",
    run=run,
    real_model=True,
)
