"""Charts as inline SVG: lines over a numeric axis, and groups of bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 68, 22, 12, 62
TICKS = 5
ROW = 16
"""Height of a row of the legend."""
CHARACTER = 6.4
"""Width of a character of a label."""
# Distinguishable without colour vision (Okabe and Ito's palette).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines by name, each through (x, y) points; `guide`: height of a dashed line."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Points]
    guide: float | None = None

    def svg(self) -> str:
        """The chart as an element."""
        xs = [x for points in self.lines.values() for x, _ in points]
        ys = [y for points in self.lines.values() for _, y in points]
        frame = _Frame(min(xs, default=0.0), max(xs, default=1.0), _top([*ys, self.guide or 0.0]))
        parts = frame.axes(self.x_label, self.y_label)
        parts += [
            _text(frame.x(tick), HEIGHT - BOTTOM + 16, _number(tick), "middle")
            for tick in round_ticks(frame.least, frame.most)
        ]
        if self.guide is not None:
            y = frame.y(self.guide)
            parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "#888", dash=True))
        for index, points in enumerate(self.lines.values()):
            colour, path = COLOURS[index % len(COLOURS)], sorted(points)
            places = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in path]
            parts.append(
                f'<polyline fill="none" stroke="{colour}" stroke-width="2"'
                f' points="{" ".join(places)}"/>'
            )
        return _svg(self.title, parts, list(self.lines))


@dataclass(frozen=True, slots=True)
class BarChart:
    """For each group, a bar per name; `values[name]` has a value per group, None: no bar."""

    title: str
    y_label: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float | None]]

    def svg(self) -> str:
        """The chart as an element."""
        top = _top([value or 0.0 for values in self.values.values() for value in values])
        frame = _Frame(0.0, float(max(1, len(self.groups))), top)
        parts, wide = frame.axes("", self.y_label), 0.8 / max(1, len(self.values))
        # Labels that would overlap alternate between two heights.
        widest = CHARACTER * max(map(len, self.groups), default=0)
        rows = 2 if widest > frame.x(1.0) - frame.x(0.0) else 1
        for place, group in enumerate(self.groups):
            label_y = HEIGHT - BOTTOM + 16 + 14 * (place % rows)
            parts.append(_text(frame.x(place + 0.5), label_y, group, "middle"))
            for index, values in enumerate(self.values.values()):
                if (value := values[place]) is None:
                    continue
                x, y = frame.x(place + 0.1 + index * wide), frame.y(value)
                width = frame.x(wide) - frame.x(0.0)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}"'
                    f' height="{HEIGHT - BOTTOM - y:.1f}" fill="{COLOURS[index % len(COLOURS)]}">'
                    f"<title>{escape(f'{group}: {_number(value)}')}</title></rect>"
                )
        return _svg(self.title, parts, list(self.values))


Chart = LineChart | BarChart


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps values to positions; the vertical axis begins at 0."""

    least: float
    most: float
    top: float

    def x(self, value: float) -> float:
        span = self.most - self.least or 1.0
        return LEFT + (value - self.least) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - min(value, self.top) / self.top * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_label: str, y_label: str) -> list[str]:
        """Grid, labels of the vertical axis, and names of the axes."""
        parts = []
        for tick in _spread(0.0, self.top):
            y = self.y(tick)
            parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "#ddd"))
            parts.append(_text(LEFT - 6, y + 4, _number(tick), "end"))
        middle = (HEIGHT - BOTTOM + TOP) / 2
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 32, x_label, "middle"))
        parts.append(
            f'<text x="14" y="{middle}" text-anchor="middle"'
            f' transform="rotate(-90 14 {middle})">{escape(y_label)}</text>'
        )
        return parts


def _svg(title: str, parts: Sequence[str], names: Sequence[str]) -> str:
    """The figure with its legend, in as many rows as it needs."""
    legend, x, height = [], float(LEFT), HEIGHT
    for index, name in enumerate(names):
        colour, width = COLOURS[index % len(COLOURS)], 14 + CHARACTER * len(name)
        if x + width > WIDTH and x > LEFT:
            x, height = float(LEFT), height + ROW
        legend.append(
            f'<rect x="{x:.0f}" y="{height - 18}" width="10" height="10" fill="{colour}"/>'
        )
        legend.append(_text(x + 14, height - 9, name, "start"))
        x += 12 + width
    body = "".join([*parts, *legend])
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height}"'
        f' role="img" aria-label="{escape(title)}">{body}</svg></figure>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: bool = False) -> str:
    style = ' stroke-dasharray="4 3"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{style}/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def round_ticks(least: float, most: float) -> list[float]:
    """Multiples of a round step from `least` to `most`, at most `TICKS`; `least` without any."""
    wanted = (most - least) / (TICKS - 1) or 1.0
    power = 10.0 ** floor(log10(wanted))
    step = next(power * part for part in (1, 2, 2.5, 5, 10) if power * part >= wanted)
    first, last = ceil(least / step - 1e-9), floor(most / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [least]


def _spread(least: float, most: float) -> list[float]:
    return [least + (most - least) * index / (TICKS - 1) for index in range(TICKS)]


def _top(values: Sequence[float]) -> float:
    """The end of the vertical axis: a round number above all values."""
    most = max(values, default=0.0)
    if most <= 0:
        return 1.0
    step = 1.0
    while step < most:
        step *= 10
    while step >= 10 * most:
        step /= 10
    return next(step * part for part in (0.2, 0.4, 0.6, 0.8, 1.0) if step * part >= most)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
