"""The result as tables for people."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.co_serving.tables import show_co_serving
from benchmarks.runs.result import sections
from benchmarks.scenarios.scenario import FASTEST
from benchmarks.stats import PHASES
from benchmarks.systems.catalog import is_reference
from tideserve.sim.report import PERCENTILES

PAIR_LATENCIES = (
    *(("ttft_p50", "TTFT P50"), ("ttft_p95", "P95")),
    *(("tpot_p50", "TPOT P50"), ("tpot_p95", "P95")),
)
Figures = Mapping[str, Any]
Reader = Callable[[Figures], str]
Row = tuple[str, Reader]


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a table for each part of the result with its ratios, then what could not run."""
    for section in sections(result):
        console.print(_table(section, result["config"]))
        _show_ratios(section, console)
    console.print(
        "* of the round with the least\n** (largest − smallest) / median over the rounds",
        highlight=False,
    )
    for name, table in result.get("pairs", {}).get("tables", {}).items():
        console.print(_pairs_table(name, table))
    if result.get("pairs") and (speed := result["machine"].get("read_bytes_per_s")):
        console.print(f"one core reads {speed / 1e9:.1f} GB/s of memory", highlight=False)
    for case, by_device in result.get("steps", {}).items():
        for device, rows in by_device.items():
            console.print(_steps_table(f"{case}, {device}", rows))
    for name, found in result["systems"].items():
        for figure, value in found.get("overhead", {}).items():
            console.print(f"{name}: {figure} {_plain(value)}", highlight=False, soft_wrap=True)
    _show_co_serving(result, console)
    for name, reason in result.get("unavailable", {}).items():
        console.print(
            f"{name} could not run: {reason}",
            style="red",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _show_co_serving(result: Mapping[str, Any], console: Console) -> None:
    """The tables of each load; the bars are those of the load that is called as the scenario."""
    if (verdict := result.get("co_serving")) is None:
        return
    for section in sections(result):
        judged = section["scenario"] == result["scenario"]
        shown = verdict if judged else verdict | {"bars": [], "notes": []}
        show_co_serving(section["scenario"], section["systems"], shown, console)


def _table(section: Mapping[str, Any], config: Figures) -> Table:
    paced = f" · @{config['paced']} is paced, not this machine's speed" if config["paced"] else ""
    table = Table(title=f"{section['scenario']}{paced}", title_justify="left")
    # Labels stay whole and names are folded, or many systems would be hard to read.
    table.add_column("", no_wrap=True)
    for name in section["systems"]:
        table.add_column(name, justify="right", overflow="fold")
    for group in _row_groups(section["systems"]):
        for label, read in group:
            table.add_row(escape(label), *(read(found) for found in section["systems"].values()))
        table.add_section()
    return table


def _row_groups(systems: Mapping[str, Figures]) -> Iterator[list[Row]]:
    """Groups of rows. Short answers, predictions, bubbles: only if a system has them."""
    counts: list[Row] = [
        (label, _plain_reader(label))
        for label in ("sent", "completed", "rejected", "failed", "preemptions")
    ]
    counts.append(("late sends", _plain_reader("late_sends")))
    if any(found["short_answers"] for found in systems.values()):
        counts.append(("shorter than asked for", _plain_reader("short_answers")))
    yield counts
    yield [("KV demand / capacity, peak*", _plain_reader("kv_demand_peak_ratio"))]
    if any(any(found["cost_scale"].values()) for found in systems.values()):
        yield [(f"{phase} time / predicted", _cost_scale_reader(phase)) for phase in PHASES]
    if any(found["bubble_share"] is not None for found in systems.values()):
        yield [
            ("bubbles of pipelines", _share_reader("bubble_share")),
            ("  while requests arrive", _share_reader("bubble_share_arriving")),
        ]
    for metric, label in (
        ("ttft_s", "TTFT"),
        ("tpot_s", "TPOT"),
        ("inter_token_s", "inter-token"),
        ("e2e_s", "end to end"),
        ("normalized_latency_s", "normalized"),
    ):
        yield [
            (f"{label} {name.upper()} [ms]", _percentile_reader(metric, name))
            for name in (*PERCENTILES, "max")
            if all(name in found[metric] for found in systems.values())
        ]
    yield [("throughput [tokens/s]", _plain_reader("throughput_tokens_per_s"))]
    targets = next(iter(systems.values()))["slo_attainment"] if systems else {}
    yield [(f"SLO {target}", _target_reader(target)) for target in targets]
    yield [
        (f"{label}, spread**", _spread_reader(key))
        for key, label in (
            ("ttft_p50_s", "TTFT P50"),
            ("ttft_p99_s", "TTFT P99"),
            ("throughput_tokens_per_s", "throughput"),
        )
    ]


def _steps_table(what: str, rows: Sequence[Figures]) -> Table:
    """The figures of each step, each with its ratio to that of the step before."""
    table = Table(title=f"steps, {what}: figure (× the step before)", title_justify="left")
    table.add_column("")
    columns = (
        ("ttft_p99_s", "TTFT P99 [ms]", _milliseconds),
        ("tpot_p50_s", "TPOT P50 [ms]", _milliseconds),
        ("bubble_share", "bubbles", _share),
        ("bubble_share_arriving", "while requests arrive", _share),
        ("throughput_tokens_per_s", "throughput [tokens/s]", _plain),
    )
    for _, label, _ in columns:
        table.add_column(escape(label), justify="right")
    for row in rows:
        effect = row.get("effect", {})
        cells = []
        for key, _, text in columns:
            times = effect.get(key)
            cells.append(text(row[key]) + ("" if times is None else f" (×{times:.2f})"))
        table.add_row(escape(row["step"]), *cells)
    return table


def _pairs_table(name: str, pair: Figures) -> Table:
    """Ratios of the first system to each other one, a row for each load."""
    first, *others = (f"{base} ({dtype})" for base, dtype in pair["dtypes"].items())
    title = (
        f"{first} / {', '.join(others)}: {'each in its faster dtype' if name == FASTEST else name}"
    )
    table = Table(title=title, title_justify="left")
    columns = ("throughput", "by round", *(label for _, label in PAIR_LATENCIES), "weights [GB/s]")
    table.add_column("")
    for label in columns:
        table.add_column(escape(label), justify="right")
    for load, row in pair["loads"].items():
        read = row.get("weight_bytes_per_s", {})
        speeds = " / ".join(_plain(None if one is None else one / 1e9) for one in read.values())
        for other, found in row.items():
            if other == "weight_bytes_per_s":
                continue
            label = load if len(others) == 1 else f"{load}, {other}"
            cells = [
                _times(found["throughput"]),
                " ".join(_times(one) for one in found["throughput_by_round"]),
                *(_times(found[key]) for key, _ in PAIR_LATENCIES),
            ]
            table.add_row(escape(label), *cells, speeds)
    return table


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _plain_reader(key: str) -> Reader:
    return lambda found: _plain(found[key])


def _share_reader(key: str) -> Reader:
    return lambda found: _share(found[key])


def _cost_scale_reader(phase: str) -> Reader:
    return lambda found: _plain(found["cost_scale"][phase])


def _percentile_reader(metric: str, name: str) -> Reader:
    return lambda found: _milliseconds(found[metric][name])


def _target_reader(target: str) -> Reader:
    return lambda found: _share(found["slo_attainment"].get(target))


def _spread_reader(key: str) -> Reader:
    return lambda found: _share(found["spread"].get(key))


def _show_ratios(section: Mapping[str, Any], console: Console) -> None:
    names = list(section["systems"])
    for pair in _pairs(names):
        found = section["ratios"].get(pair)
        if not found:
            continue
        shown = ", ".join(
            f"{label} {found[key]:.2f}×"
            for key, label in (
                ("ttft_s.p50", "TTFT P50"),
                ("ttft_s.p99", "TTFT P99"),
                ("ttft_s.p99.median_round", "TTFT P99 of the median round"),
                ("tpot_s.p50", "TPOT P50"),
                ("throughput_tokens_per_s", "throughput"),
            )
            if key in found
        )
        console.print(f"{pair}: {shown}", markup=False, highlight=False, soft_wrap=True)


def _pairs(names: Sequence[str]) -> list[str]:
    """Pairs of each system with the first one, and of each system with its references."""
    pairs = [f"{names[0]}/{name}" for name in names[1:]] if names else []
    references = [name for name in names if is_reference(name)]
    pairs += [
        f"{name}/{reference}" for reference in references for name in names[1:] if name != reference
    ]
    return pairs


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "–"
    scaled = value * 1000
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    return f"{value:,.3g}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"
