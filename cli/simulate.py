"""`tideserve simulate`: run a simulation, show its figures, write them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cli.errors import EXIT_UNUSABLE, CommandError
from cli.report import SLOW_STEP_S, Report
from cli.simulation_options import Prepared, read_simulation
from services.common.clock import monotonic_s
from services.common.errors import ConfigError
from sim.cluster import Cluster
from sim.report import Outcomes, figures

LATENCIES = (
    ("time to first token", "ttft_s"),
    ("time per output token", "tpot_s"),
    ("end to end", "e2e_s"),
)


class Progress:
    """Says every few seconds how far the simulation is."""

    def __init__(self, report: Report, duration_s: float) -> None:
        self._report = report
        self._duration_s = duration_s
        self._said_s = monotonic_s()

    def __call__(self, simulated_s: float) -> None:
        if monotonic_s() - self._said_s < SLOW_STEP_S:
            return
        self._said_s = monotonic_s()
        if simulated_s <= self._duration_s:
            self._report.doing(f"{simulated_s:.0f} of {self._duration_s:.0f} s simulated")
        else:
            self._report.doing(f"{simulated_s:.0f} s simulated, the last requests run")


def run_simulation(path: Path, seed: int | None, json_path: Path | None) -> None:
    """Simulate what the file describes. Raises CommandError."""
    try:
        prepared = read_simulation(path, seed)
    except ConfigError as error:
        raise CommandError(str(error), EXIT_UNUSABLE) from error
    report = Report()
    started_s = monotonic_s()
    title = f"Simulating {prepared.spec.instances} instances of {prepared.description['device']}"
    with report.step(title):
        outcomes = simulate(prepared, Progress(report, prepared.duration_s))
    took_s = monotonic_s() - started_s
    found = figures(outcomes)
    show(found, report, took_s)
    if json_path is not None:
        write(result_of(prepared, found, took_s), json_path)
        report.line(f"figures written to {json_path}")


def simulate(prepared: Prepared, progress: Progress | None = None) -> Outcomes:
    """The outcomes of a prepared simulation."""
    cluster = Cluster(prepared.spec, prepared.time_model, prepared.workload)
    return cluster.run(progress)


def result_of(prepared: Prepared, found: Mapping[str, Any], took_s: float) -> dict[str, Any]:
    """What is written as JSON, in the shape of a benchmark's result."""
    return {
        "scenario": "simulate",
        "config": prepared.description,
        "simulation": {"wall_s": took_s},
        "systems": {"simulated": dict(found)},
    }


def write(result: Mapping[str, Any], path: Path) -> None:
    """Write the JSON. Raises CommandError."""
    try:
        path.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


def show(found: Mapping[str, Any], report: Report, took_s: float) -> None:
    """Print the figures."""
    rows = [
        (
            "requests",
            f"{found['sent']} sent, {found['completed']} completed,"
            f" {found['rejected']} rejected, {found['unfinished']} unfinished",
        )
    ]
    for name, key in LATENCIES:
        values = found[key]
        rows.append((name, "  ".join(f"{p} {_time(values[p])}" for p in ("p50", "p90", "p99"))))
    throughput = found["throughput_tokens_per_s"]
    rows += [
        ("throughput", "–" if throughput is None else f"{throughput:,.0f} output tokens/s"),
        ("preemptions", f"{found['preemptions']:,}"),
        (
            "KV cache in use",
            f"{_share(found['kv_usage_mean'])} on average, {_share(found['kv_usage_peak'])} at"
            f" most; demand up to {_share(found['kv_demand_peak_ratio'])}",
        ),
        (
            "simulated",
            f"{found['simulated_s']:,.0f} s in {took_s:.1f} s: {found['iterations']:,} iterations,"
            f" {found['iterations_fast_forwarded']:,} of them fast-forwarded",
        ),
    ]
    report.box("simulated, not measured", rows)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
