"""What a drop costs, without any load: the pause, first use of new KV, activations beside bulk.

It is no scenario, since nothing is served: two probes measure in processes of their own.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from psutil import virtual_memory

from benchmarks.probes.probe import Probe, run_probe
from benchmarks.systems.system import Deployment, Say
from tideserve.cli.errors import SystemUnavailable

NAME = "drop"
MEMORY = "1GiB"
GIB = 1 << 30
MEMORY_PART, LAYOUT_PART, LANES_PART, TCP_PART = "memory", "layout", "lanes", "lanes_tcp"
LAYOUT_GIB_MAX = 30
"""A 14B model in 16 bits, and a little KV cache."""
LAYOUT_SHARE = 0.6
"""Share of the available memory; every page of the layout is touched."""
KINDS = {
    "idle": "alone",
    "coordinated": "beside bulk that stands aside",
    "uncoordinated": "beside bulk that does not",
}


def probes(deployment: Deployment, quick: bool) -> tuple[Probe, ...]:
    """Probes of memory, with the model and with a layout, and of lanes between processes."""
    memory = (
        *("--model-dir", str(deployment.model_dir), "--dtype", deployment.dtype),
        *("--memory-gib", str(deployment.memory_bytes / GIB), "--rounds", "2" if quick else "5"),
    )
    layout_gib = max(1, min(LAYOUT_GIB_MAX, int(LAYOUT_SHARE * virtual_memory().available / GIB)))
    layout = ("--layout", str(layout_gib), "--rounds", "1" if quick else "3")
    lanes = ("--trips", "300" if quick else "2000")
    return (
        Probe(
            MEMORY_PART,
            "dropping half of the layers",
            "benchmarks.probes.drop",
            memory,
        ),
        Probe(
            LAYOUT_PART,
            f"dropping half of 48 layers in {layout_gib} GiB",
            "benchmarks.probes.drop",
            layout,
        ),
        Probe(
            LANES_PART,
            "activations beside bulk",
            "benchmarks.probes.lanes",
            lanes,
        ),
        Probe(
            TCP_PART,
            "activations beside bulk, over TCP",
            "benchmarks.probes.lanes",
            (*lanes, "--transports", "tcp"),
        ),
    )


def measure(wanted: Sequence[Probe], say: Say) -> dict[str, Any]:
    """What each probe printed, by its part; `unavailable` holds the reasons of the others."""
    found: dict[str, Any] = {"unavailable": {}}
    for probe in wanted:
        say(probe.title)
        try:
            found[probe.part] = run_probe(probe)
        except SystemUnavailable as error:
            found["unavailable"][probe.part] = str(error)
    return found


def rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures for people; of several rounds the median."""
    found: list[tuple[str, str]] = []
    if (memory := result.get(MEMORY_PART)) is not None:
        found += _memory_rows(memory["rounds"])
    if (layout := result.get(LAYOUT_PART)) is not None:
        found += [(f"48 layers: {name}", text) for name, text in _memory_rows(layout["rounds"])]
    for part, prefix in ((LANES_PART, ""), (TCP_PART, "TCP: ")):
        if (lanes := result.get(part)) is not None:
            found += [(prefix + name, text) for name, text in _lane_rows(lanes)]
    return found


def _lane_rows(lanes: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = [(f"activation and back, {KINDS[kind]}", _trips(lanes[kind])) for kind in KINDS]
    bulk, plain = lanes["bulk_bytes_per_s"], lanes["plain_bytes_per_s"]
    cached = lanes["plain_cached_bytes_per_s"]
    text = f"{bulk / 2**20:,.0f} MiB/s, {bulk / plain:.0%} of what UCX alone carries"
    alone = f"{plain / 2**20:,.0f} MiB/s from slab to slab, {cached / 2**20:,.0f} in the caches"
    return [*found, ("bulk with nothing beside it", text), ("UCX alone", alone)]


def _memory_rows(rounds: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    drops = [one["drop"] for one in rounds]
    before, after = drops[0]["blocks"]
    found = [
        ("parameters dropped", f"{drops[0]['dropped_bytes'] / 2**20:,.0f} MiB"),
        ("KV blocks before and after", f"{before:,} → {after:,}"),
    ]
    for prepared, label in ((True, "prepared"), (False, "at once")):
        chosen = [one for one in rounds if one["prepared"] is prepared]
        if chosen:
            pause_ms = _median(one["drop"]["elapsed_us"] for one in chosen) / 1e3
            cpu_ms = _median(one["drop"]["cpu_us"] for one in chosen) / 1e3
            touch_ms = _median(one["first_touch_ms_per_gib"]["elapsed"] for one in chosen)
            warm_ms = _median(one["warm_touch_ms_per_gib"]["elapsed"] for one in chosen)
            found += [
                (
                    f"pause of a drop, {label}",
                    f"{pause_ms:.2f} ms ({cpu_ms:.2f} ms of processor time)",
                ),
                (
                    f"writing of 1 GiB of new KV, {label}",
                    f"{touch_ms:,.0f} ms, {warm_ms:,.0f} ms the second time",
                ),
            ]
    switch_ms = _median(one["restore"]["set_stage"]["elapsed_ms"] for one in rounds)
    return [*found, ("pause when layers come back", f"{switch_ms:.2f} ms")]


def _trips(trips: Mapping[str, float]) -> str:
    bulk = trips["bulk_bytes_per_s"] / 2**20
    beside = f", {bulk:,.0f} MiB/s beside it" if bulk else ""
    return f"p50 {1e3 * trips['p50_s']:.2f} ms, p99 {1e3 * trips['p99_s']:.2f} ms{beside}"


def _median(values: Iterable[float]) -> float:
    return float(median(values))
