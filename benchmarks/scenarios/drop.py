"""`drop`: cost of a drop of layers without load.

Probes in separate processes measure the pause of a drop and the first use of new KV, with the model
and with the memory layout of a 14B model; and round trips of activations during bulk transfers, by
shared memory and over TCP.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from psutil import virtual_memory

from benchmarks.probes.probe import Probe, run_probe
from benchmarks.scenarios.scenario import LoadChoice, Scenario, TrialVerdict
from benchmarks.systems.system import Deployment, Say
from tideserve.cli.errors import SystemUnavailable

GIB = 1 << 30
LAYOUT_GIB_MAX = 30
"""A 14B model in 16 bits, with a small KV cache."""
LAYOUT_SHARE = 0.6
"""Share of the available memory for the layout, whose pages are all touched."""
KINDS = {
    "idle": "alone",
    "coordinated": "beside bulk that stands aside",
    "uncoordinated": "beside bulk that does not",
}


def probes(deployment: Deployment, quick: bool) -> tuple[Probe, ...]:
    """Probes of a drop, with the model and with a layout, and of lanes between processes."""
    memory = (
        *("--model-dir", str(deployment.model_dir), "--dtype", deployment.dtype),
        *("--memory-gib", str(deployment.memory_bytes / GIB), "--rounds", "2" if quick else "5"),
    )
    layout_gib = max(1, min(LAYOUT_GIB_MAX, int(LAYOUT_SHARE * virtual_memory().available / GIB)))
    layout = ("--layout", str(layout_gib), "--rounds", "1" if quick else "3")
    trips = ("--trips", "300" if quick else "2000")
    drop, lanes = "benchmarks.probes.drop", "benchmarks.probes.lanes"
    return (
        Probe("memory", "dropping half of the layers", drop, memory),
        Probe("layout", f"dropping half of 48 layers in {layout_gib} GiB", drop, layout),
        Probe("lanes", "activations beside bulk", lanes, trips),
        Probe(
            *("lanes_tcp", "activations beside bulk, over TCP", lanes),
            (*trips, "--transports", "tcp"),
        ),
    )


def measure(wanted: Sequence[Probe], progress: Say) -> dict[str, Any]:
    """The output of each probe by part; `unavailable` has the errors of failed probes."""
    figures: dict[str, Any] = {"unavailable": {}}
    for probe in wanted:
        progress(probe.title)
        try:
            figures[probe.part] = run_probe(probe)
        except SystemUnavailable as error:
            figures["unavailable"][probe.part] = str(error)
    return figures


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Run all probes; a failing probe is a problem."""
    figures = measure(probes(deployment, choice.quick), progress)
    return TrialVerdict(figures, rows(figures), list(figures["unavailable"].values()))


def rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures as table rows, as medians over rounds."""
    shown: list[tuple[str, str]] = []
    for part, prefix in (("memory", ""), ("layout", "48 layers: ")):
        if part in figures:
            shown += [(prefix + name, text) for name, text in _memory(figures[part]["rounds"])]
    for part, prefix in (("lanes", ""), ("lanes_tcp", "TCP: ")):
        if part in figures:
            shown += [(prefix + name, text) for name, text in _lanes(figures[part])]
    return shown


def _lanes(lanes: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for kind, label in KINDS.items():
        trips = lanes[kind]
        bulk = trips["bulk_bytes_per_s"] / 2**20
        beside = f", {bulk:,.0f} MiB/s beside it" if bulk else ""
        p50_ms, p99_ms = 1e3 * trips["p50_s"], 1e3 * trips["p99_s"]
        yield f"activation and back, {label}", f"p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms{beside}"
    bulk, plain, cached = (
        lanes[f"{name}_bytes_per_s"] / 2**20 for name in ("bulk", "plain", "plain_cached")
    )
    yield (
        "bulk with nothing beside it",
        f"{bulk:,.0f} MiB/s, {bulk / plain:.0%} of what UCX alone carries",
    )
    yield "UCX alone", f"{plain:,.0f} MiB/s from slab to slab, {cached:,.0f} in the caches"


def _memory(rounds: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    first = rounds[0]["drop"]
    before, after = first["blocks"]
    yield "parameters dropped", f"{first['dropped_bytes'] / 2**20:,.0f} MiB"
    yield "KV blocks before and after", f"{before:,} → {after:,}"
    for prepared, label in ((True, "prepared"), (False, "at once")):
        # CPU time excludes the time in which other processes used the core.
        if chosen := [turn for turn in rounds if turn["prepared"] is prepared]:
            pause_ms, cpu_ms = (
                median(turn["drop"][key] for turn in chosen) / 1e3
                for key in ("elapsed_us", "cpu_us")
            )
            yield (
                f"pause of a drop, {label}",
                f"{pause_ms:.2f} ms ({cpu_ms:.2f} ms of CPU time)",
            )
            touch_ms, warm_ms = (
                median(turn[f"{key}_touch_ms_per_gib"]["elapsed"] for turn in chosen)
                for key in ("first", "warm")
            )
            yield (
                f"writing of 1 GiB of new KV, {label}",
                f"{touch_ms:,.0f} ms, {warm_ms:,.0f} ms the second time",
            )
    switch_ms = median(turn["restore"]["set_stage"]["elapsed_ms"] for turn in rounds)
    yield "pause when layers come back", f"{switch_ms:.2f} ms"


SCENARIO = Scenario(name="drop", memory="1GiB", run=run)
