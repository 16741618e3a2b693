"""The tables of co-serving: every system beside the first one of the verdict, then the bars."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.co_serving.judging import Judgement, by_name

Figures = Mapping[str, Any]
Value = Callable[[Figures], float | None]
COLOURS = {Judgement.HOLDS: "green", Judgement.FAILS: "red", Judgement.NOT_MEASURED: "yellow"}


def _of(*keys: str) -> Value:
    def read(found: Figures) -> float | None:
        value: Any = found
        for key in keys:
            value = None if value is None else value.get(key)
        return None if value is None else float(value)

    return read


COMPARED: tuple[tuple[str, Value, float], ...] = (
    ("processed [tokens/s]", _of("processed_tokens_per_s"), 1),
    ("output [tokens/s]", _of("output_tokens_per_s"), 1),
    ("TTFT P50 [ms]", _of("ttft_s", "p50"), 1e3),
    ("TTFT P99 [ms]", _of("ttft_s", "p99"), 1e3),
    ("gap P50 [ms]", _of("inter_token_s", "p50"), 1e3),
    ("gap P99 [ms]", _of("inter_token_s", "p99"), 1e3),
    ("normalized, mean [ms]", _of("normalized_latency_s", "mean"), 1e3),
)
"""Figures of online requests, but for the first two; the factor makes their unit."""
ATTAINED: tuple[tuple[str, Value], ...] = (
    ("first tokens in time", _of("classes", "online", "slo_attainment", "ttft")),
    ("times per token in time", _of("classes", "online", "slo_attainment", "tpot")),
    ("token groups in time", _of("classes", "online", "slo_attainment", "token_group")),
)
"""Shares of the online requests that were sent in the windows; the last is a mean over them."""
RATES: tuple[tuple[str, Value, float], ...] = (
    ("goodput [requests/s]", _of("classes", "online", "goodput_requests_per_s"), 1),
    ("batch [requests/s]", _of("classes", "batch", "throughput_requests_per_s"), 1),
)
SHOWN: tuple[tuple[str, Value], ...] = (
    ("online requests", _of("classes", "online", "sent")),
    ("  without a token", _of("classes", "online", "without_token")),
    ("  cut off at the end", _of("classes", "online", "cut_off")),
    ("batch [tokens/s]", _of("classes", "batch", "processed_tokens_per_s")),
    ("batch requests completed", _of("classes", "batch", "completed")),
)


def show_co_serving(
    load: str, systems: Mapping[str, Figures], verdict: Figures, console: Console
) -> None:
    """Print both tables of a load, and what is to be known of the targets."""
    if systems:
        console.print(_figures_table(load, systems, verdict))
    if verdict["bars"]:
        console.print(_bars_table(verdict))
    for note in verdict["notes"]:
        console.print(note, highlight=False, soft_wrap=True, markup=False)


def _figures_table(load: str, systems: Mapping[str, Figures], verdict: Figures) -> Table:
    named = by_name(systems)
    base = named.get(verdict["base"])
    title = f"{load}: online requests beside batch work (× {verdict['base']})"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in named:
        table.add_column(name, justify="right", overflow="fold")
    for label, value in SHOWN[:3]:
        table.add_row(label, *(_plain(value(found)) for found in named.values()))
    table.add_section()
    for label, value in ATTAINED:
        table.add_row(label, *(_percent(value(found)) for found in named.values()))
    table.add_section()
    for label, value, factor in (*COMPARED, *RATES):
        beside = None if base is None else value(base)
        cells = [_compared(value(found), beside, factor) for found in named.values()]
        table.add_row(escape(label), *cells)
    table.add_section()
    for label, value in SHOWN[3:]:
        table.add_row(escape(label), *(_plain(value(found)) for found in named.values()))
    again = [_percent(found["recomputed_share"]) for found in named.values()]
    table.add_row("recomputed share", *again)
    if (harvested := verdict.get("harvested_share")) is not None:
        table.add_row("harvested share*", *(_percent(harvested.get(name)) for name in named))
        table.caption = "* of what eager processes more than online-only"
    return table


def _bars_table(verdict: Figures) -> Table:
    table = Table(title="bars", title_justify="left")
    for column in ("", "system", "measured", "wanted", ""):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for one in verdict["bars"]:
        colour = COLOURS[Judgement(one["verdict"])]
        table.add_row(
            one["what"],
            one["system"],
            "–" if one["value"] is None else f"{one['value']:.3g}",
            one["wanted"],
            f"[{colour}]{one['verdict']}[/]",
        )
    return table


def _compared(value: float | None, base: float | None, factor: float) -> str:
    if value is None:
        return "–"
    times = f" ({value / base:.2f}×)" if base else ""
    scaled = value * factor
    return (f"{scaled:,.0f}" if scaled >= 10 else f"{scaled:.2f}") + times


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
