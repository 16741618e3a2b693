"""Plots of a run: KV demand and capacity, TTFT over time, latency distributions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks.stats import latencies, timeline
from tideserve.load.record import RequestOutcome, Round

# Distinguishable without colour vision (Okabe and Ito's palette).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LATENCIES = (
    ("ttft_s", "TTFT"),
    ("tpot_s", "time per output token"),
    ("e2e_s", "end-to-end latency"),
)
CLOSE = 0.05
"""Relative difference below which capacities share a line."""
DECADE = 10
Rounds = Mapping[str, Sequence[Round]]
Colours = Mapping[str, str]
"""Colours by system, the same in all panels."""


def draw(title: str, cases: Mapping[str, Rounds], path: Path) -> None:
    """Write a picture with two rows of panels per case: demand and TTFT over time of the first
    round, then distributions over all rounds. The suffix of `path` selects the format.
    """
    matplotlib.use("Agg")
    rows = 2 * len(cases)
    figure = Figure(figsize=(15, 4.3 * rows), layout="constrained", dpi=110)
    figure.suptitle(title)
    systems = list(dict.fromkeys(name for rounds in cases.values() for name in rounds))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(systems)}
    for index, (case, rounds) in enumerate(cases.items()):
        first = 12 * index + 1
        _draw_demand(figure.add_subplot(rows, 6, (first, first + 2)), case, rounds, colours)
        _draw_ttft(figure.add_subplot(rows, 6, (first + 3, first + 5)), case, rounds, colours)
        for number, latency in enumerate(LATENCIES):
            start = first + 6 + 2 * number
            axes = figure.add_subplot(rows, 6, (start, start + 1))
            _draw_distribution(axes, case, rounds, colours, latency)
    # A shared legend outside the panels, where it hides no curves.
    lines = [Line2D([], [], color=colour) for colour in colours.values()]
    figure.legend(lines, list(colours), loc="outside lower center", ncols=min(4, len(colours)))
    figure.savefig(path)


def _draw_demand(axes: Any, case: str, rounds: Rounds, colours: Colours) -> None:
    capacities: dict[int, list[str]] = {}
    for name, (first, *_) in rounds.items():
        changing = len({tokens for _, tokens in first.capacity_samples}) > 1
        for style, points in (("-", timeline(first.records)), ("--", first.capacity_samples)):
            if style == "-" or changing:
                times_s = [time_s - _start_s(first) for time_s, _ in points]
                tokens = [tokens for _, tokens in points]
                axes.step(times_s, tokens, where="post", color=colours[name], linestyle=style)
        if first.capacity_tokens and not changing:
            own = first.capacity_tokens
            near = next(
                (capacity for capacity in capacities if abs(capacity - own) <= CLOSE * own), own
            )
            capacities.setdefault(near, []).append(name)
    # An ample capacity far above the demand would flatten the curves.
    top = 1.15 * max((line.get_ydata().max() for line in axes.get_lines()), default=1)
    above = []
    for capacity, owners in sorted(capacities.items()):
        label = f"{', '.join(owners)}: {'about ' if len(owners) > 1 else ''}{capacity:,}"
        if capacity > top:
            above.append(f"{label}, above the plot")
            continue
        colour = colours[owners[0]] if len(owners) == 1 else "0.4"
        axes.axhline(capacity, color=colour, linestyle="--")
        _note(axes, capacity, label, "bottom")
    _note(axes, 0.99 * top, "\n".join(above), "top")
    axes.set_ylim(0, top)
    title = f"{case}: KV demand (solid) and capacity (dashed), round 1"
    _finish(axes, title, "time [s]", "KV cache [tokens]")


def _note(axes: Any, height: float, text: str, side: str) -> None:
    """Add a line of text at the right edge, its `side` at `height`."""
    place = {"horizontalalignment": "right", "verticalalignment": side}
    axes.text(0.99, height, text, transform=axes.get_yaxis_transform(), fontsize=8, **place)


def _draw_ttft(axes: Any, case: str, rounds: Rounds, colours: Colours) -> None:
    for name, (first, *_) in rounds.items():
        done = [r for r in first.records if r.outcome is RequestOutcome.COMPLETED]
        due_s = [record.due_s - _start_s(first) for record in done]
        ttfts_s = [record.ttft_s for record in done]
        axes.plot(due_s, ttfts_s, marker="o", markersize=3, linewidth=1, color=colours[name])
    _scale(
        axes.yaxis,
        [v for measured in rounds.values() for v in latencies(measured[0].records, "ttft_s")],
    )
    _finish(axes, f"{case}: time to first token, round 1", "arrival [s]", "TTFT [s]")


def _draw_distribution(
    axes: Any, case: str, rounds: Rounds, colours: Colours, latency: tuple[str, str]
) -> None:
    metric, label = latency
    pooled: list[float] = []
    for name, measured in rounds.items():
        values = sorted(v for round_ in measured for v in latencies(round_.records, metric))
        shares = [(rank + 1) / len(values) for rank in range(len(values))]
        axes.step(values, shares, where="post", color=colours[name])
        pooled += values
    _scale(axes.xaxis, pooled)
    axes.set_ylim(0, 1.02)
    _finish(axes, f"{case}: {label}, all rounds", f"{label} [s]", "share of requests")


def _scale(axis: Any, values: Sequence[float]) -> None:
    """Use a logarithmic axis with plain numbers from a decade of range on, else a linear axis."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) >= DECADE * min(positive):
        # Axis has no public method to set its scale.
        (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def _finish(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3, which="both")


def _start_s(round_: Round) -> float:
    return min((record.due_s for record in round_.records), default=0.0)
