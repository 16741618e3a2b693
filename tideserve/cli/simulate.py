"""`tideserve simulate`: runs a simulation, prints its figures and writes them as JSON."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.clock import monotonic_s
from services.common.errors import ConfigError
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError, unusable
from tideserve.cli.report import SLOW_STEP_S, Report
from tideserve.cli.simulated_classes import with_targets
from tideserve.cli.simulation_options import PreparedSimulation, read_simulations
from tideserve.cli.status import size_text
from tideserve.sim.cluster import Cluster
from tideserve.sim.report import Outcomes, figures


def check_writable(path: Path | None) -> None:
    """Check before a long run that a file can be written. Raises CommandError."""
    if path is None:
        return
    existed = path.exists()
    try:
        path.touch()
        if not existed:
            path.unlink()
    except OSError as error:
        raise CommandError(f"cannot write to {path}: {error.strerror}", EXIT_UNUSABLE) from error


LATENCIES = (
    ("time to first token", "ttft_s"),
    ("time per output token", "tpot_s"),
    ("end to end", "e2e_s"),
)
CLASS_FIGURES: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None]], ...] = (
    ("processed tokens", lambda figures: figures["processed_tokens_per_s"]),
    ("online P99 TTFT", lambda figures: figures["classes"]["online"]["ttft_s"]["p99"]),
    ("P99 gap", lambda figures: figures["classes"]["online"]["inter_token_s"]["p99"]),
    ("median gap", lambda figures: figures["classes"]["online"]["inter_token_s"]["p50"]),
    (
        "normalized latency",
        lambda figures: figures["classes"]["online"]["normalized_latency_s"]["mean"],
    ),
    (
        "first tokens in time",
        lambda figures: figures["classes"]["online"]["slo_attainment"]["ttft"],
    ),
    (
        "times per token in time",
        lambda figures: figures["classes"]["online"]["slo_attainment"]["tpot"],
    ),
    (
        "batch requests/s",
        lambda figures: figures["classes"]["batch"]["throughput_requests_per_s"],
    ),
)
"""Figures to compare systems that serve a backlog of batch requests."""


class ProgressLines:
    """Reports the progress of a simulation every SLOW_STEP_S."""

    def __init__(self, report: Report, duration_s: float) -> None:
        self._report = report
        self._duration_s = duration_s
        self._reported_s = monotonic_s()

    def __call__(self, simulated_s: float) -> None:
        if monotonic_s() - self._reported_s < SLOW_STEP_S:
            return
        self._reported_s = monotonic_s()
        if simulated_s <= self._duration_s:
            self._report.doing(f"{simulated_s:.0f} of {self._duration_s:.0f} s simulated")
        else:
            self._report.doing(f"{simulated_s:.0f} s simulated, the last requests are running")


def run_simulation(path: Path, seed: int | None, json_path: Path | None) -> None:
    """Run the simulations of a file. Raises CommandError."""
    check_writable(json_path)
    with unusable(ConfigError):
        loads = read_simulations(path, seed)
    report = Report()
    results = {}
    for name, prepared in loads.items():
        for note in prepared.notes:
            report.warn(note)
        if name:
            report.line(f"load {name}")
        results[name] = _run(prepared, report)
    if json_path is not None:
        write(_together(results), json_path)
        report.line(f"figures written to {json_path}")


def _run(prepared: PreparedSimulation, report: Report) -> dict[str, Any]:
    """Simulate a load and print its figures; returns the JSON result. Raises CommandError."""
    systems: dict[str, dict[str, Any]] = {}
    wall_s: dict[str, float] = {}
    kind = "system" if prepared.description["systems"] else "overload policy"
    for system in prepared.systems:
        name = system if len(prepared.systems) > 1 else "simulated"
        spec = prepared.systems[system][0]
        title = f"Simulating {spec.instances} instances of {prepared.description['device']}"
        started_s = monotonic_s()
        with report.step(f"{title}, {kind} {system}"):
            outcomes = simulate(prepared, system, ProgressLines(report, prepared.duration_s))
        wall_s[name] = monotonic_s() - started_s
        systems[name] = figures(outcomes)
        show(systems[name], report, f"{kind} {system}", wall_s[name])
        if system == prepared.targets_of:
            with unusable(ConfigError):
                prepared = targeted(prepared, systems[name])
    if len(systems) > 1:
        for line in comparison(systems):
            report.line(line)
    return result_of(prepared, systems, wall_s)


def _together(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The JSON result of all loads, in the format of a benchmark with several loads."""
    first = next(iter(results.values()))
    if len(results) == 1:
        return first
    sections = {
        name: {"systems": load["systems"], "simulation": load["simulation"]}
        for name, load in results.items()
    }
    return first | {"systems": {}, "scenarios": sections}


def simulate(
    prepared: PreparedSimulation, system: str, progress: ProgressLines | None = None
) -> Outcomes:
    """Simulate `system`; returns the outcomes of its requests."""
    spec, workload = prepared.systems[system]
    return Cluster(spec, prepared.time_model, workload).run(progress)


def figures_of_load(
    prepared: PreparedSimulation, note: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Simulate a load; returns the figures by system. `note` gets the name of each before it runs.

    Raises ConfigError.
    """
    systems = {}
    for system in prepared.systems:
        note(system)
        systems[system] = figures(simulate(prepared, system))
        if system == prepared.targets_of:
            prepared = targeted(prepared, systems[system])
    return systems


def targeted(prepared: PreparedSimulation, figures: Mapping[str, Any]) -> PreparedSimulation:
    """Set the P99 latencies of `figures` as targets of online requests. Raises ConfigError."""
    online = figures.get("classes", {}).get("online")
    if online is None or online["inter_token_s"]["p99"] is None:
        raise ConfigError(
            f"system '{prepared.targets_of}' has no P99 to use as a target: add online requests,"
            " and a section 'batch' (with 0 clients if no batch work is wanted)"
        )
    targets = online["ttft_s"]["p99"], online["inter_token_s"]["p99"]
    systems = {
        name: (spec, with_targets(load, *targets))
        for name, (spec, load) in prepared.systems.items()
    }
    return replace(prepared, systems=systems)


def comparison(systems: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences that compare each system with the first."""
    first, *others = systems
    if all("classes" in figures for figures in systems.values()):
        return class_comparison(systems)
    lines = []
    for other in others:
        for title, key, share in (
            ("P99 time to first token", "ttft_s", "p99"),
            ("median time per output token", "tpot_s", "p50"),
        ):
            mine, theirs = systems[first][key][share], systems[other][key][share]
            if mine and theirs:
                lines.append(f"{title}: {other} has {theirs / mine:.2f} times that of {first}")
    return lines


def result_of(
    prepared: PreparedSimulation,
    systems: Mapping[str, Mapping[str, Any]],
    wall_s: Mapping[str, float],
) -> dict[str, Any]:
    """The JSON result, in the format of a benchmark's result."""
    return {
        "scenario": "simulate",
        "config": prepared.description,
        "simulation": {"wall_s": sum(wall_s.values())},
        "systems": dict(systems),
    }


def write(result: Mapping[str, Any], path: Path) -> None:
    """Write the JSON. Raises CommandError."""
    try:
        path.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


def show(figures: Mapping[str, Any], report: Report, title: str, took_s: float) -> None:
    """Print the figures."""
    rows = [
        (
            "requests",
            f"{figures['sent']} sent, {figures['completed']} completed,"
            f" {figures['rejected']} rejected, {figures['unfinished']} unfinished",
        )
    ]
    for name, key in LATENCIES:
        values = figures[key]
        rows.append((name, "  ".join(f"{p} {_time(values[p])}" for p in ("p50", "p90", "p99"))))
    throughput = figures["throughput_tokens_per_s"]
    rows += [
        ("throughput", "–" if throughput is None else f"{throughput:,.0f} output tokens/s"),
        ("preemptions", f"{figures['preemptions']:,}"),
        (
            "KV cache in use",
            f"{_share(figures['kv_usage_mean'])} on average, {_share(figures['kv_usage_peak'])} at"
            f" most; demand up to {_share(figures['kv_demand_peak_ratio'])}",
        ),
        (
            "simulated",
            f"{figures['simulated_s']:,.0f} s in {took_s:.1f} s: {figures['iterations']:,}"
            f" iterations, {figures['iterations_fast_forwarded']:,} of them fast-forwarded",
        ),
    ]
    if queries := figures["prefix_queries"]:
        share = figures["prefix_hits"] / queries
        rows[-1:-1] = [("prefix caches", f"hit rate {share:.1%} of {queries:,} prompt tokens")]
    rows[-1:-1] = change_rows(figures["changes"])
    rows[-1:-1] = class_rows(figures)
    report.box(f"simulated, not measured: {title}", rows)


def class_comparison(systems: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Ratios of throughput and online latency of each system to the first."""
    first, *others = systems
    base, lines = systems[first], []
    for other in others:
        ratios = []
        for title, value_of in CLASS_FIGURES:
            mine, theirs = value_of(base), value_of(systems[other])
            if mine and theirs:
                ratios.append(f"{title} {theirs / mine:.2f}")
        lines.append(f"{other} against {first}: {', '.join(ratios)}")
    return lines


def class_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Throughput and latencies of each class, if there was batch work."""
    rows = []
    for name, served in figures.get("classes", {}).items():
        gaps, ttft = served["inter_token_s"], served["ttft_s"]
        rows.append(
            (
                name,
                f"{served['sent']:,} sent, {served['processed_tokens_per_s'] or 0:,.0f} tokens/s"
                f" processed, {_share(served['recomputed_share'])} recomputed; first token p50"
                f" {_time(ttft['p50'])}  p99 {_time(ttft['p99'])}; gap p50 {_time(gaps['p50'])}"
                f"  p99 {_time(gaps['p99'])}",
            )
        )
    if rows:
        rows.append(("targets", _attainment_text(figures["classes"])))
    return rows


def _attainment_text(classes: Mapping[str, Any]) -> str:
    """SLO attainment and goodput of online requests, and throughput of batch requests."""
    online, batch = classes["online"], classes["batch"]
    kept = online["slo_attainment"]
    return (
        f"met by {_share(kept['ttft'])} of first tokens, {_share(kept['tpot'])} of times per token,"
        f" {_share(kept['token_group'])} of token groups; goodput"
        f" {online['goodput_requests_per_s'] or 0:.2f} online requests/s, with"
        f" {batch['throughput_requests_per_s'] or 0:.2f} batch requests/s; normalized latency"
        f" {_time(online['normalized_latency_s']['mean'])}"
    )


def change_rows(changes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows about merges and splits; empty if there were none."""
    if not changes["merges"] and not changes["failed"]:
        return []
    failed = sum(changes["failed"].values())
    exchange, restore = changes["exchange_s"], changes["restore_s"]
    return [
        (
            "groups",
            f"{changes['merges']} merges, {changes['splits']} splits, {failed} failed;"
            f" up to {size_text(changes['freed_bytes_peak'])} of parameters dropped",
        ),
        (
            "exchange",
            f"{size_text(changes['moved_bytes'])} of KV moved; {_time(exchange['mean'])} on"
            f" average, {_time(exchange['max'])} at most",
        ),
        (
            "restore",
            f"{_time(restore['mean'])} on average from decision to commit,"
            f" {_time(restore['max'])} at most",
        ),
        ("bubbles", f"{_share(changes['bubble_share'])} of the time of pipelines' stages"),
    ]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
