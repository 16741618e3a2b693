"""The result as tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.co_serving.bars import Judgement, at, by_name
from benchmarks.runs.result import sections
from benchmarks.scenarios.scenario import FASTEST
from benchmarks.stats import PHASES, quotient
from benchmarks.systems.catalog import is_reference
from tideserve.sim.report import PERCENTILES

Figures = Mapping[str, Any]
Text = Callable[[float | None], str]
Row = tuple[str, Callable[[Figures], float | None], Text]
PAIR_LATENCIES = {
    "TTFT P50": "ttft_p50",
    "TTFT P95": "ttft_p95",
    "TPOT P50": "tpot_p50",
    "TPOT P95": "tpot_p95",
}
COLOURS = {Judgement.HOLDS: "green", Judgement.FAILS: "red", Judgement.NOT_MEASURED: "yellow"}


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a table with ratios per section of the result, then the systems that could not run."""

    def line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    config = result["config"]
    paced = f" · @{config['paced']} is paced, not this machine's speed" if config["paced"] else ""
    for section in sections(result):
        systems = section["systems"]
        console.print(_by_system(f"{section['scenario']}{paced}", systems, _groups(systems)))
        for text in _ratios(section):
            line(text)
    line("* of the round with the least\n** (largest − smallest) / median over the rounds")
    for table in _comparisons(result):
        console.print(table)
    if result.get("pairs") and (speed := result["machine"].get("read_bytes_per_s")):
        line(f"one core reads {speed / 1e9:.1f} GB/s of memory")
    for name, figures in result["systems"].items():
        for figure, value in figures.get("overhead", {}).items():
            line(f"{name}: {figure} {_any(value)}")
    for section in sections(result) if "co_serving" in result else ():
        # The bars apply to the load that is named like the scenario.
        judged = section["scenario"] == result["scenario"]
        _show_co_serving(section, result["co_serving"], judged, console)
    for name, reason in result.get("unavailable", {}).items():
        line(f"{name} could not run: {reason}", style="red")


def _table(title: str, columns: Sequence[str], groups: Iterator[Sequence[Sequence[str]]]) -> Table:
    """A table whose rows have a label and a cell per column; lines separate the row groups."""
    table = Table(title=title, title_justify="left")
    # Fold names but not labels: many systems would be hard to read otherwise.
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(escape(name), justify="right", overflow="fold")
    for group in groups:
        for label, *cells in group:
            table.add_row(escape(label), *cells)
        table.add_section()
    return table


def _by_system(
    title: str, systems: Mapping[str, Figures], groups: Iterator[Sequence[Row]]
) -> Table:
    """A column per system, a row per figure."""
    return _table(
        title,
        list(systems),
        (
            [
                (label, *(text(read(figures)) for figures in systems.values()))
                for label, read, text in group
            ]
            for group in groups
        ),
    )


def _groups(systems: Mapping[str, Figures]) -> Iterator[Sequence[Row]]:
    """Row groups; short answers, predictions and bubbles only if a system has them."""
    counts = ("sent", "completed", "rejected", "failed", "preemptions")
    yield [
        *((name, at(name), _plain) for name in counts),
        ("recomputed tokens", at("recomputed_tokens"), _plain),
        ("late sends", at("late_sends"), _plain),
        *(
            [("shorter than asked for", at("short_answers"), _plain)]
            if any(figures["short_answers"] for figures in systems.values())
            else []
        ),
    ]
    yield [("KV demand / capacity, peak*", at("kv_demand_peak_ratio"), _plain)]
    if any(any(figures["cost_scale"].values()) for figures in systems.values()):
        yield [(f"{phase} time / predicted", at("cost_scale", phase), _plain) for phase in PHASES]
    if any(figures["bubble_share"] is not None for figures in systems.values()):
        yield [
            ("bubbles of pipelines", at("bubble_share"), _share),
            ("  while requests arrive", at("bubble_share_arriving"), _share),
        ]
    for metric, label in (
        ("ttft_s", "TTFT"),
        ("tpot_s", "TPOT"),
        ("inter_token_s", "inter-token"),
        ("e2e_s", "end to end"),
        ("normalized_latency_s", "normalized"),
    ):
        yield [
            (f"{label} {name.upper()} [ms]", at(metric, name), _milliseconds)
            for name in ("mean", *PERCENTILES, "max")
            if all(name in figures[metric] for figures in systems.values())
        ]
    yield [("throughput [tokens/s]", at("throughput_tokens_per_s"), _plain)]
    targets = next(iter(systems.values()))["slo_attainment"] if systems else {}
    yield [(f"SLO {target}", at("slo_attainment", target), _share) for target in targets]
    yield [
        (f"{label}, spread**", at("spread", key), _share)
        for key, label in (
            ("ttft_p50_s", "TTFT P50"),
            ("ttft_p99_s", "TTFT P99"),
            ("throughput_tokens_per_s", "throughput"),
        )
    ]


def _comparisons(result: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of paired systems and of ablation steps."""
    for name, pair in result.get("pairs", {}).get("tables", {}).items():
        yield _pairs_table(name, pair)
    for case, by_device in result.get("steps", {}).items():
        for device, rows in by_device.items():
            yield _steps_table(f"{case}, {device}", rows)


def _ratios(section: Mapping[str, Any]) -> Iterator[str]:
    """Lines of ratios: the first system to the others, and each system to its references."""
    names = list(section["systems"])
    pairs = [f"{names[0]}/{name}" for name in names[1:]] if names else []
    references = [name for name in names if is_reference(name)]
    pairs += [f"{name}/{other}" for other in references for name in names[1:] if name != other]
    for pair in pairs:
        ratios = section["ratios"].get(pair, {})
        shown = [
            f"{label} {ratios[key]:.2f}×"
            for key, label in (
                ("ttft_s.p50", "TTFT P50"),
                ("ttft_s.p99", "TTFT P99"),
                ("ttft_s.p99.median_round", "TTFT P99 of the median round"),
                ("tpot_s.p50", "TPOT P50"),
                ("throughput_tokens_per_s", "throughput"),
            )
            if key in ratios
        ]
        if ratios:
            yield f"{pair}: {', '.join(shown)}"


def _steps_table(label: str, steps: Sequence[Figures]) -> Table:
    """The figures of each step, with their ratios to the previous step."""
    columns: Mapping[str, tuple[str, Text]] = {
        "TTFT P99 [ms]": ("ttft_p99_s", _milliseconds),
        "TPOT P50 [ms]": ("tpot_p50_s", _milliseconds),
        "bubbles": ("bubble_share", _share),
        "while requests arrive": ("bubble_share_arriving", _share),
        "throughput [tokens/s]": ("throughput_tokens_per_s", _plain),
    }
    rows = [
        (
            step["step"],
            *(
                text(step[key]) + _factor(step.get("effect", {}).get(key))
                for key, text in columns.values()
            ),
        )
        for step in steps
    ]
    return _table(f"steps, {label}: figure (× the step before)", list(columns), iter([rows]))


def _pairs_table(name: str, pair: Figures) -> Table:
    """Ratios of the first system to each other system, a row per load."""
    first, *others = (f"{base} ({dtype})" for base, dtype in pair["dtypes"].items())
    kind = "each in its faster dtype" if name == FASTEST else name
    columns = ("throughput", "by round", *PAIR_LATENCIES, "weights [GB/s]")
    rows = []
    for load, row in pair["loads"].items():
        speeds = [
            _plain(quotient(speed, 1e9)) for speed in row.get("weight_bytes_per_s", {}).values()
        ]
        for other, ratios in row.items():
            if other != "weight_bytes_per_s":
                rows.append(
                    (
                        load if len(others) == 1 else f"{load}, {other}",
                        _times(ratios["throughput"]),
                        " ".join(_times(ratio) for ratio in ratios["throughput_by_round"]),
                        *(_times(ratios[key]) for key in PAIR_LATENCIES.values()),
                        " / ".join(speeds),
                    )
                )
    return _table(f"{first} / {', '.join(others)}: {kind}", columns, iter([rows]))


def _show_co_serving(
    section: Mapping[str, Any], verdict: Figures, judged: bool, console: Console
) -> None:
    """Print co-serving figures: every system relative to the base, then the bars."""
    systems = by_name(section["systems"])
    base = systems.get(verdict["base"], {})
    online, batch = ("classes", "online"), ("classes", "batch")

    def compared(label: str, *keys: str, factor: float = 1) -> Row:
        read = at(*keys)

        def text(value: float | None) -> str:
            if value is None:
                return "–"
            scaled = value * factor
            shown = f"{scaled:,.0f}" if scaled >= 10 else f"{scaled:.2f}"
            return shown + _factor(quotient(value, read(base)))

        return label, read, text

    groups: list[list[Row]] = [
        [
            ("online requests", at(*online, "sent"), _count),
            ("  without a token", at(*online, "without_token"), _count),
            ("  cut off at the end", at(*online, "cut_off"), _count),
        ],
        [
            ("first tokens in time", at(*online, "slo_attainment", "ttft"), _share),
            ("times per token in time", at(*online, "slo_attainment", "tpot"), _share),
            ("token groups in time", at(*online, "slo_attainment", "token_group"), _share),
        ],
        [
            compared("processed [tokens/s]", "processed_tokens_per_s"),
            compared("output [tokens/s]", "output_tokens_per_s"),
            compared("TTFT P50 [ms]", "ttft_s", "p50", factor=1e3),
            compared("TTFT P99 [ms]", "ttft_s", "p99", factor=1e3),
            compared("gap P50 [ms]", "inter_token_s", "p50", factor=1e3),
            compared("gap P99 [ms]", "inter_token_s", "p99", factor=1e3),
            compared("normalized, mean [ms]", "normalized_latency_s", "mean", factor=1e3),
            compared("goodput [requests/s]", *online, "goodput_requests_per_s"),
            compared("batch [requests/s]", *batch, "throughput_requests_per_s"),
        ],
        [
            ("batch [tokens/s]", at(*batch, "processed_tokens_per_s"), _count),
            ("batch requests completed", at(*batch, "completed"), _count),
            ("recomputed share", at("recomputed_share"), _share),
        ],
    ]
    if (harvested := verdict.get("harvested_share")) is not None and judged:
        systems = {name: {**own, "harvested": harvested.get(name)} for name, own in systems.items()}
        groups[-1].append(("harvested share (of eager)", at("harvested"), _share))
    if systems:
        title = f"{section['scenario']}: online requests beside batch work (× {verdict['base']})"
        console.print(_by_system(title, systems, iter(groups)))
    if judged and verdict["bars"]:
        table = Table(title="bars", title_justify="left")
        for column in ("", "system", "measured", "wanted", ""):
            table.add_column(column, justify="right" if column == "measured" else "left")
        for bar in verdict["bars"]:
            value = "–" if bar["value"] is None else f"{bar['value']:.3g}"
            colour = COLOURS[Judgement(bar["verdict"])]
            shown = f"[{colour}]{bar['verdict']}[/]"
            table.add_row(escape(bar["what"]), bar["system"], value, bar["wanted"], shown)
        console.print(table)
    for note in verdict["notes"] if judged else ():
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _factor(ratio: float | None) -> str:
    return "" if ratio is None else f" (×{ratio:.2f})"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "–"
    scaled = value * 1000
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _plain(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.3g}" if value < 100 and not float(value).is_integer() else f"{value:,.0f}"


def _any(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_any(part)}" for name, part in value.items())
    return _plain(value)
