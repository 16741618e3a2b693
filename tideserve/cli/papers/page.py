"""A page with a paper's figures beside the simulator's, as one HTML file without other files."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tideserve.cli.papers.svg import Chart

NEAR = 0.2
"""Relative difference up to which a figure counts as reproduced."""
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.35em .6em;
text-align:left;vertical-align:top}td.number{text-align:right;white-space:nowrap}
td:first-child{white-space:nowrap}.charts{display:grid;gap:1em;
grid-template-columns:repeat(auto-fill,minmax(min(440px,100%),1fr))}figure{margin:0}
figcaption{font-weight:600;margin:.4em 0}svg{width:100%;font-size:11px}.differs{color:#a33}
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A number of the paper beside ours; `paper` and `ours` have the same unit, None: not known.

    `note`: why they differ, or how ours was obtained. `at_most`: the paper's is a bound.
    """

    figure: str
    quantity: str
    paper: float | None
    ours: float | None
    unit: str = "×"
    note: str = ""
    at_most: bool = False

    @property
    def near(self) -> bool:
        """Whether ours is within `NEAR` of the paper's, or within its bound."""
        if self.paper is None or self.ours is None:
            return False
        if self.at_most:
            return self.ours <= self.paper
        return abs(self.ours - self.paper) <= NEAR * abs(self.paper)


@dataclass(frozen=True, slots=True)
class PaperPage:
    """Contents of a page. `setting`: what was simulated; `missing`: figures that are left out."""

    title: str
    setting: Sequence[str]
    comparisons: Sequence[Comparison]
    charts: Sequence[Chart]
    missing: Sequence[str] = ()

    def html(self) -> str:
        """The page."""
        setting = "".join(f"<li>{escape(line)}</li>" for line in self.setting)
        missing = "".join(f"<li>{escape(line)}</li>" for line in self.missing)
        rows = "".join(_row(comparison) for comparison in self.comparisons)
        charts = "".join(chart.svg() for chart in self.charts)
        left_out = f"<h2>Left out</h2><ul>{missing}</ul>" if missing else ""
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(self.title)}'
            f"</title><style>{STYLE}</style><h1>{escape(self.title)}</h1>"
            f"<p>Simulated with the policies of tideserve, not measured. Values within"
            f" {NEAR:.0%} of the paper's count as reproduced.</p><ul>{setting}</ul>"
            "<h2>The paper's numbers beside ours</h2><table><tr><th>figure<th>quantity<th>paper"
            f"<th>ours<th>reproduced<th>note</tr>{rows}</table><h2>Plots</h2>"
            f'<div class="charts">{charts}</div>{left_out}</html>\n'
        )


def _row(comparison: Comparison) -> str:
    numbers = "".join(
        f'<td class="number">{escape(value_text(value, comparison.unit))}</td>'
        for value in (comparison.paper, comparison.ours)
    )
    near = "<td>yes</td>" if comparison.near else '<td class="differs">no</td>'
    near = "<td>–</td>" if comparison.paper is None else near
    return (
        f"<tr><td>{escape(comparison.figure)}</td><td>{escape(comparison.quantity)}</td>{numbers}"
        f"{near}<td>{escape(comparison.note)}</td></tr>"
    )


def value_text(value: float | None, unit: str) -> str:
    """A value with its unit; shares as percentages."""
    if value is None:
        return "–"
    if unit == "%":
        return f"{value:.1%}" if value == 0 or abs(value) >= 0.001 else f"{100 * value:.2g}%"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{digits} {unit}".strip()


def ratio(value: float | None, base: float | None) -> float | None:
    """The quotient; None if either is unknown or the base is 0."""
    return None if value is None or not base else value / base
