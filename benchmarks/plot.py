"""Pictures of a run: KV demand and capacity, TTFT over time, distributions of latencies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks.kv_demand import timeline
from benchmarks.stats import latencies
from tideserve.load.record import RequestOutcome, Round

# Distinguishable without colour vision (Okabe and Ito's palette).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SHARED = "0.4"
"""The colour of a capacity that several systems share."""
LATENCIES = (
    ("ttft_s", "TTFT"),
    ("tpot_s", "time per output token"),
    ("e2e_s", "end-to-end latency"),
)
CLOSE = 0.05
DECADE = 10
Rounds = Mapping[str, Sequence[Round]]
Colours = Mapping[str, str]
"""Colours by system, the same in all panels."""


def draw(title: str, cases: Mapping[str, Rounds], path: Path) -> None:
    """Write one picture with a row of panels for each case. Panels over time show the first round;
    the distributions pool all rounds. The path's suffix is the format.
    """
    matplotlib.use("Agg")
    rows = 2 * len(cases)
    figure = Figure(figsize=(15, 4.3 * rows), layout="constrained", dpi=110)
    figure.suptitle(title)
    systems = list(dict.fromkeys(name for rounds in cases.values() for name in rounds))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(systems)}
    for index, (case, rounds) in enumerate(cases.items()):
        panels = [figure.add_subplot(rows, 6, (12 * index + a, 12 * index + b)) for a, b in _TOP]
        _draw_demand(panels[0], case, rounds, colours)
        _draw_ttft(panels[1], case, rounds, colours)
        for offset, (metric, label) in enumerate(LATENCIES):
            start = 12 * index + 7 + 2 * offset
            axes = figure.add_subplot(rows, 6, (start, start + 1))
            _draw_distribution(axes, case, rounds, colours, (metric, label))
    # One legend for all panels: in them it would hide curves.
    figure.legend(
        [Line2D([], [], color=colour) for colour in colours.values()],
        list(colours),
        loc="outside lower center",
        ncols=min(4, len(colours)),
    )
    figure.savefig(path)


_TOP = ((1, 3), (4, 6))


def _draw_demand(axes: Any, case: str, rounds: Rounds, colours: Colours) -> None:
    capacities: dict[int, list[str]] = {}
    for name, measured in rounds.items():
        first = measured[0]
        points = timeline(first.records)
        start_s = _start_s(first)
        axes.step(
            [time_s - start_s for time_s, _ in points],
            [tokens for _, tokens in points],
            where="post",
            color=colours[name],
        )
        if len({tokens for _, tokens in first.capacity_samples}) > 1:
            axes.step(
                [time_s - start_s for time_s, _ in first.capacity_samples],
                [tokens for _, tokens in first.capacity_samples],
                where="post",
                color=colours[name],
                linestyle="--",
            )
        elif first.capacity_tokens:
            capacities.setdefault(first.capacity_tokens, []).append(name)
    # An ample capacity far above the demand would flatten the curves.
    top = 1.15 * max((one.get_ydata().max() for one in axes.get_lines()), default=1)
    above = []
    for capacity, owners in _merged(capacities).items():
        label = f"{', '.join(owners)}: {'about ' if len(owners) > 1 else ''}{capacity:,}"
        if capacity > top:
            above.append(f"{label}, above the picture")
            continue
        colour = colours[owners[0]] if len(owners) == 1 else SHARED
        axes.axhline(capacity, color=colour, linestyle="--")
        _note(axes, capacity, label, "bottom")
    _note(axes, 0.99 * top, "\n".join(above), "top")
    axes.set_ylim(0, top)
    title = f"{case}: KV demand (solid) and capacity (dashed), round 1"
    _finish(axes, title, "time [s]", "KV cache [tokens]")


def _note(axes: Any, height: float, text: str, side: str) -> None:
    """A line of text at the right, its `side` at `height`."""
    axes.text(
        *(0.99, height, text),
        transform=axes.get_yaxis_transform(),
        horizontalalignment="right",
        verticalalignment=side,
        fontsize=8,
    )


def _merged(capacities: Mapping[int, Sequence[str]]) -> dict[int, list[str]]:
    """Capacities within a few per cent share a line."""
    found: dict[int, list[str]] = {}
    for capacity, owners in sorted(capacities.items()):
        near = next((one for one in found if abs(one - capacity) <= CLOSE * capacity), capacity)
        found.setdefault(near, []).extend(owners)
    return found


def _draw_ttft(axes: Any, case: str, rounds: Rounds, colours: Colours) -> None:
    for name, measured in rounds.items():
        first = measured[0]
        start_s = _start_s(first)
        done = [r for r in first.records if r.outcome is RequestOutcome.COMPLETED]
        axes.plot(
            [record.due_s - start_s for record in done],
            [record.ttft_s for record in done],
            marker="o",
            markersize=3,
            linewidth=1,
            color=colours[name],
        )
    _scale(axes.yaxis, [v for one in rounds.values() for v in latencies(one[0].records, "ttft_s")])
    _finish(axes, f"{case}: time to first token, round 1", "arrival [s]", "TTFT [s]")


def _draw_distribution(
    axes: Any, case: str, rounds: Rounds, colours: Colours, what: tuple[str, str]
) -> None:
    metric, label = what
    pooled: list[float] = []
    for name, measured in rounds.items():
        values = sorted(v for one in measured for v in latencies(one.records, metric))
        shares = [(rank + 1) / len(values) for rank in range(len(values))]
        axes.step(values, shares, where="post", color=colours[name])
        pooled += values
    _scale(axes.xaxis, pooled)
    axes.set_ylim(0, 1.02)
    _finish(axes, f"{case}: {label}, all rounds", f"{label} [s]", "share of requests")


def _scale(axis: Any, values: Sequence[float]) -> None:
    """Logarithmic over a decade and more, with plain numbers; linear below, where it says more."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) >= DECADE * min(positive):
        # The axis itself has no public way to scale it.
        (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def _finish(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3, which="both")


def _start_s(one: Round) -> float:
    return min((record.due_s for record in one.records), default=0.0)
